"""The history of messages, as a fold over facts."""
