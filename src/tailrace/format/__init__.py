"""Bytes to values and back: frames, Arrow batches and the codec of facts; no I/O."""
