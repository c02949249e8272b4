"""Delayed messages in the shell: the verbs that cancel and list them."""
