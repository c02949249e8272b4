"""Reading what happened: traces of messages, and facts for analysis elsewhere."""
