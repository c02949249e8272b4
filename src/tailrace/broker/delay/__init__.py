"""Delayed messages at work: loaded ahead, released at ticks, cancelled and listed."""
