"""Storage engines behind `LogStore`: segment files (the default) and memory; and their threads."""
