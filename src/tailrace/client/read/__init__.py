"""Reading the log: readers, stream consumers, keys and facts."""
