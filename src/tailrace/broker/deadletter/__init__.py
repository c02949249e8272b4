"""Dead letters at work: written, listed, sent back."""
