"""Seeded simulation: worlds in which disks and networks misbehave, checked against small models."""
