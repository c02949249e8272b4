"""Queues on the log: what each group has done with every message, and who gets which next."""
