"""The history of messages: a fold over facts."""
