"""Staged writes at work: staged, decided, applied on every target."""
