"""Requests and answers: the transport, calls with retries, and the clocks of a client."""
