"""Partitions at work: the pump, turns and their frames, recovery, and what is kept in memory."""
