"""Dead letters in the shell: written, listed, redriven."""
