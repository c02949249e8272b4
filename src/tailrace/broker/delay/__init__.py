"""Delayed messages in the shell: prefetched, released at ticks, cancelled, listed."""
