"""The two kinds of partitions: with messages, and what serves them; and with a coordinator of groups."""
