"""Staged writes in the shell: staged, decided, applied on every target."""
