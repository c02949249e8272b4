"""Traces of messages, and facts for analysis elsewhere."""
