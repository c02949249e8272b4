"""Partitions in the shell: pump, turns and their frames, recovery, maintenance, cached frames."""
