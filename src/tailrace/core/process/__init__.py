"""Protocols between partitions, as pure machines."""
