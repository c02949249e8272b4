"""The pure core: values in, values out; no I/O, no clock, no randomness, no await."""
