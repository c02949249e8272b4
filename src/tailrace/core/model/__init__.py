"""The vocabulary of the core: identifiers, commands, facts, decisions, and the options of topics and
groups."""
