"""Who may do what, as pure decisions."""
