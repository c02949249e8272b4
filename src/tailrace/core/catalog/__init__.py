"""The catalog of topics, and how it compares with the folders on the disk."""
