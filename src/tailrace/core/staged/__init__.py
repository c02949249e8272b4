"""Staged writes: batches outside of the readable log, and the decided versions of writers."""
