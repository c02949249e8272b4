"""Writing with Spark: rows are staged by tasks, and one decision makes them messages."""
