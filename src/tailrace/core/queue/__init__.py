"""Queues on the log: the state of every message for each group, and which messages a member gets next."""
