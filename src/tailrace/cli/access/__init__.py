"""The sub-commands about access: one module for each noun."""
