"""Verbs of readers and consumers: fetches, leases, settlements, and the requests that wait."""
