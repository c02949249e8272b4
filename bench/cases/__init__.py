"""One file per question that a benchmark answers."""
