"""Bytes to values and back: frames, Arrow batches, and the codec of commands and facts; no I/O."""
