"""The edges: each protocol translates its own requests into the broker's verbs."""
