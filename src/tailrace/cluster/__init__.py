"""The state that nodes agree on: the catalog of topics. On one node a file keeps it."""
