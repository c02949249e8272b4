"""The shell around the core: one loop that moves commands, frames and replies."""
