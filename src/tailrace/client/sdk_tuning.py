"""Constants of the SDK. Limits protect somebody: what is beyond them is refused, cut or forgotten. Policy
only moves time, memory and fairness: with other values everything still holds.

What is part of one algorithm stands with its theory (`pace`, what is wasted in `lease_polls`).
"""

from __future__ import annotations

from tailrace.core.core_tuning import DELAY_MS_MAX

# ------------------------------------------------------------------------------------------------- limits

BODY_BYTES_MAX = 256 * 1024 * 1024
"""Of one answer."""
TTL_S_MAX = 1e11
DELAY_S_MAX = DELAY_MS_MAX // 1000
"""Of a message that is given back: a year."""
ERROR_CHARS_MAX = 1000
"""Of an error that a message is given back or rejected with."""
TEXT_BYTES_MAX = 16_384
"""Of the text of an error: it has to fit into the headers of an answer, which hold 64 KiB."""
IN_FLIGHT_MAX = 16
"""Batches of one flow: as many as the broker remembers of a producer."""
HELD_MAX = 5_000
"""Leases that a request can name; of more, those that nobody knows end by themselves."""
FAILED_BATCHES_KEPT = 100
FAILED_ACKS_KEPT = 1000
"""Failures of what nobody waited for, until somebody asks."""
NUMBER_MAX = (1 << 53) - 1
"""The largest bound of a quota, and number of a rule."""
LIST_MAX = 1000
"""Waiting messages that are listed at once."""
PROBLEMS_MAX = 20
"""Reasons that a redrive tells of dead letters that stay behind."""

HOSTS_MAX = 100
"""Of one address."""
SECRET_BYTES_MAX = 1024
"""Of a user, password or token: the greeting that carries them is small."""
CREDENTIALS_BYTES_MAX = 1024 * 1024
"""Of the credentials file."""
SOCKET_PATH_BYTES_MAX = 107
"""Of the path of a Unix socket, on Linux."""
ADDRESS_BYTES_MAX = 4096
"""Of the file that names a door."""
CERTIFICATE_NAMES_SHOWN = 10
"""Of a certificate that is for somebody else."""

# --------------------------------------------------------------------------------------- policy: connections

CONNECT_S = 5.0
RECONNECT_PAUSE_S_MIN = 0.05
RECONNECT_PAUSE_S_MAX = 1.0
REFUSED_PAUSE_S = 5.0
"""Before the next attempt where asking again soon is no use: a certificate or a file has to change first."""
REMARK_S = 10.0
"""Between two remarks about a lost connection."""
PAUSE_S_MIN = 0.02
PAUSE_S_MAX = 0.25
"""Before something refused is asked for again: twice as long each time."""
WAIT_MS = 30_000
"""How long a poll waits at the broker."""
REFRESH_MS = 30_000
"""Between two looks for new partitions."""
STALL_PART = 3
"""A lease is extended at half of its time: a stall of a third may be too long for the next extension."""
STALL_LOOKS = 10
STALL_QUIET_S = 30.0
"""No second warning of a stall within this time."""

# ---------------------------------------------------------------------------------------- policy: publishing

BUFFER_BYTES_MAX = 32 * 1024 * 1024
LINGER_MS = 5.0
BATCH_ROWS = 1000
BATCH_BYTES = 512 * 1024
ROW_BYTES = 32
"""What a message costs besides its value in the estimate of a batch's size."""
PIECE_ROWS = 4096
PIECE_BYTES = 4 * 1024 * 1024
"""Of a table that is published."""
STAGE_ROWS = 5_000
STAGE_BYTES = 512 * 1024
ABORT_S = 5.0
"""How long leaving after an error tries to drop what was staged; it expires by itself anyway."""

# ----------------------------------------------------------------------------------------- policy: consuming

AHEAD_MS = 100.0
"""A member holds what it handles in about this time."""
SOON_MS = 10.0
"""What is started within this time is as good as started: it is not given back, and nothing overtakes it."""
MODEST_MS = 200.0
"""So long after another member was hungry, no more is leased ahead than is started soon."""
CALM_MS = 50
"""So long after a look at a lease, messages of it are handed out without another."""
YIELD_ROWS = 256
"""After so many messages in a row the loop gets a turn, so that the next ones can arrive meanwhile."""
LATE_MS = 200.0
"""What would not be started for longer than this is not kept in hand."""
LOOK_MS = 5.0
"""How long to look on, to see how many messages are being started."""
FEW_RUNS = 8
"""So many runs are looked at one by one; with more, all rows at once are quicker."""
DRIFT = 0.02
"""A broker's clock that is set right runs up to one part in a hundred fast; twice that is left out."""
TICK_S_MIN = 0.01
BEAT_MS_MIN = 50
EXIT_S = 5.0
LEAVE_S = 5.0
COMMIT_S = 5.0
"""How long the end of a consumer waits: for its acknowledgements, for the group, for its place."""

# ------------------------------------------------------------------------------ policy: reading, dead letters

AHEAD_BYTES = 12 * 1024 * 1024
FETCH_BYTES = 4 * 1024 * 1024
LETTERS_AT_ONCE = 500
HOLD_MS = 60_000
"""How long a redrive keeps others from the letters that it is about."""
