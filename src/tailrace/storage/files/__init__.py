"""Logs in segment files: append, sync, open after a crash, search, scrub, repair."""
