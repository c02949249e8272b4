"""The processes that a benchmark sets against a broker: a producer and a reader."""
