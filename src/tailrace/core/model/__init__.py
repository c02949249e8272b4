"""The vocabulary of the core: identifiers, commands, facts, decisions, options of topics and groups."""
