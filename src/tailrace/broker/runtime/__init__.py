"""Partitions in the shell, whatever they hold: pump, turns and their frames, recovery, maintenance."""
