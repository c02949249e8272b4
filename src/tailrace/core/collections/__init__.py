"""Data structures that know nothing of queues: span maps, a hash table, a timing wheel, a string pool."""
