"""Benchmarks: what Tailrace does on this machine, beside what the machine could do at most."""
