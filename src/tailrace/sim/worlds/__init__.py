"""The worlds: each a broker or a log, its actors, and the trouble that they are given."""
