"""Consuming a queue: leases ahead, handing out, settling, handlers, and membership."""
