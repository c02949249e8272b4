"""Staged writes: batches outside of the readable log, and the versions that were decided."""
