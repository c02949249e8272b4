"""Appending: idempotent producers, the dedup window, the key index, and the rules of a publish."""
