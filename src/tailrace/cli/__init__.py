"""The `tailrace` command: a broker to start, and the SDK for the shell."""
