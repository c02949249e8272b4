"""Publishing: producers, their flows to partitions, tables, and atomic writes."""
