"""Delayed messages that wait for their time, and the ids of cancelled ones."""
