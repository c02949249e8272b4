"""Verbs of readers and consumers: fetches, leases, settling, and the requests that wait."""
