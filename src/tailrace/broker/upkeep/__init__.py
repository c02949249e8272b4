"""Upkeep of the machine: scrubs, accepted losses, disk space, spare memory, open files."""
