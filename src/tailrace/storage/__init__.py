"""Engines behind `LogStore`: segments in files (the default) and memory, and the threads that drive them."""
