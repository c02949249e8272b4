"""`python -m tailrace.cli`: the same as the command `tailrace`."""

from tailrace.cli.app import main

main()
