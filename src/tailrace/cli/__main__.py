"""The command `tailrace`, also as `python -m tailrace.cli`: Ctrl-C ends it quietly from the first moment.

Loading what the commands need takes a while. Python would answer Ctrl-C there with a traceback of whatever
was being imported, so the signal itself ends the process until `app` takes it. Where the signal is ignored
from the start, as in a shell's background, it stays so.
"""

import signal

from tailrace.cli.hidden_arguments import hide_secrets


def main() -> None:
    """The console script."""
    hide_secrets()
    calm = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if calm:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tailrace.cli import app

    if calm:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()


if __name__ == "__main__":
    main()
