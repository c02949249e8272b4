"""Verbs of readers and consumers: fetches, leases, settling, reads by key."""
