"""Simulated people of a world: clients, members, workers, operators, and who looks after the books."""
