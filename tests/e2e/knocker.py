"""Opens many connections, says the same on each and no more, and leaves some seconds later.

`python knocker.py HOST PORT HEX COUNT`; HEX is `-` for nothing. The connections come from several addresses.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import threading

STAY_S = 3.0
ADDRESSES = 4


def main() -> None:
    host, port, said, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    words = b"" if said == "-" else bytes.fromhex(said)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    links = []
    for number in range(count):
        link = socket.socket()
        link.bind((f"127.0.0.{10 + number % ADDRESSES}", 0))
        link.settimeout(20)
        link.connect((host, port))
        with contextlib.suppress(OSError):  # It may have been turned out already.
            link.sendall(words)
        links.append(link)
    threading.Event().wait(STAY_S)
    for link in links:
        link.close()


if __name__ == "__main__":
    main()
