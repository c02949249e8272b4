"""Constants of the edges. Limits protect the broker from its peers: who is beyond them is refused or closed.
Policy only moves time and memory. What an operator may set is in `native.Limits`."""

from __future__ import annotations

# ------------------------------------------------------------------------------------------------- limits

GREETING_US = 10_000_000
"""How long a new connection may take to greet, and its credentials to be looked at."""
GUESTS_MAX = 4096
"""Connections that have not greeted."""
HANDSHAKES_MAX = 256
"""Of them, those in a TLS handshake or just behind it: each may hold some 100 KB, at worst 0.5 MB."""
HANDSHAKE_S = 5.0
HANDSHAKES_CALM = 64
HANDSHAKE_GAP_S = 0.002
"""With more handshakes under way, the next begins so much later: each costs some 0.2 ms of the loop."""
TLS_SHUTDOWN_S = 10.0
"""How long the end of a TLS connection may take, with the answers that are still to be sent."""
TLS_HELLO_BYTES = 11
"""So much of the first message of TLS tells its version."""
CERTIFICATE_NAMES_MAX = 64
"""Of one client that are looked at."""
BACKLOG = 1024
"""Connections that the system holds until the broker takes them."""
TLS_READ_BYTES_MAX = 64 * 1024
"""Of a connection that is not read, above what the system holds for it."""
FRAME_US = 30_000_000
FRAME_BYTES_PER_SECOND_MIN = 64 * 1024
"""How long a message may take: some time, and as much as its body needs at this rate."""
REQUESTS_MAX = 1024
"""Of one connection that wait for their answers."""
HEADER_WEIGHT = 64
"""Memory of a waiting request, as a multiple of its header: a fetch of many partitions watches each."""
PARTIAL_BYTES_MAX = 128 * 1024 * 1024
PARTIAL_BYTES_HARD_MAX = 512 * 1024 * 1024
PARTIAL_GRACE_US = 1_000_000
"""Incomplete messages of all connections together: above the first bound the largest is closed if it had its
time, above the second in any case."""
UNSENT_BYTES_MAX = 64 * 1024 * 1024
"""Bound on answers that peers do not take and on reads for them, of all connections together."""
CONNECTION_READ_BYTES_MAX = 8 * 1024 * 1024
STUCK_US = 30_000_000
STUCK_GRACE_US = 1_000_000
"""How long a peer may take nothing of its answers; the shorter one while too much is unsent."""
HTTP_CONNECTIONS_MAX = 100
HTTP_HEAD_BYTES_MAX = 8 * 1024
HTTP_REQUEST_S = 5.0
HTTP_LINGER_S = 1.0
HTTP_LINGER_BYTES_MAX = 256 * 1024
"""What a peer may still send when its answer is sent, before the connection is closed."""

# ------------------------------------------------------------------------------------------------- policy

WRITE_HIGH_BYTES = 1024 * 1024
"""From so many unsent bytes on, a connection counts as not writable."""
OWNER_ONLY = 0o600
WITH_GROUP = 0o660
"""Who may open a Unix socket: the broker's user alone, or its group too, as soon as there are users."""
SWEEP_S = 1.0
"""Between two looks for peers that are silent or stuck, credentials that ended, and new certificates."""
REMARK_US = 10_000_000
"""Between two lines in the log about the same mistake of strangers."""
CERTIFICATE_WARNING_S = 14 * 86_400
"""So long before the certificate of the broker ends, operators are warned."""
TLS_PIECE_BYTES = 256 * 1024
"""Answers are encrypted and handed to the system in such pieces, as fast as the peer takes them."""
SPIN_US = 400
SPIN_BYTES = 4096
"""A peer that sent so little so soon after its last request is polled for instead of going to sleep."""
TURN_US = 20_000
"""So long the requests of one connection are taken before those of others: listings of much can take long."""
CROWD_US = 500
"""If two connections send within this time, more may follow: their requests share a turn."""
