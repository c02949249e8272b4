"""The one tree of errors: what went wrong, whether a retry helps, and whether it may have had effect.

    TailraceError
    ├── InvalidRequest      the request itself is wrong: a field, an option, a malformed frame
    ├── NotFound            no such topic, partition or message
    ├── AlreadyExists       a topic of that name is there already
    ├── Denied              the caller may not do that
    ├── Unauthenticated     the caller is not known
    ├── Fenced              an older epoch or generation: somebody newer has taken over
    ├── LeaseLost           the receipt is stale or foreign
    ├── SequenceConflict    the expected sequence is taken, or not reached yet
    ├── NotLeader           another node leads that partition
    ├── NoQuorum            too few replicas answered
    ├── Overloaded          a bound is reached: slow down and come back
    ├── TooLarge            a key, header, value or batch is above its limit
    ├── StorageFault        the disk failed
    │   ├── Corrupt         stored bytes are not what was written
    │   └── Full            no space is left
    ├── Timeout             no answer in time
    └── Unavailable         the broker cannot be reached, or is shutting down

Every error has a stable ``code``. ``retriable`` says that the same request may succeed later. ``outcome``
is ``none`` when the request certainly had no effect and ``unknown`` when it may still appear. `EDGES` is
the only place that translates a code for other protocols and for the shell's exit status.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

Outcome = Literal["none", "unknown"]


class TailraceError(Exception):
    """Root of every error that Tailrace raises on purpose."""

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False
    default_outcome: ClassVar[Outcome] = "none"

    def __init__(self, message: str, *, outcome: Outcome | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.outcome: Outcome = outcome or self.default_outcome
        self.details: dict[str, Any] = details

    def __getattr__(self, name: str) -> Any:
        """Details read as attributes: ``error.current_sequence``, ``error.retry_after_ms``."""
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.code, self.message, self.outcome, self.details)


class InvalidRequest(TailraceError):
    """The request is wrong; the message names the field."""

    code = "invalid_request"


class NotFound(TailraceError):
    """The thing that the request names does not exist."""

    code = "not_found"


class AlreadyExists(TailraceError):
    """The thing that the request would create exists already."""

    code = "already_exists"


class Denied(TailraceError):
    """The caller is known and may not do this."""

    code = "denied"


class Unauthenticated(TailraceError):
    """The caller did not prove who it is."""

    code = "unauthenticated"


class Fenced(TailraceError):
    """A newer epoch or generation has taken over; the caller must stop."""

    code = "fenced"


class LeaseLost(TailraceError):
    """The receipt does not hold the message any more."""

    code = "lease_lost"


class SequenceConflict(TailraceError):
    """The expected sequence is not the next one; ``current_sequence`` names the current end."""

    code = "sequence_conflict"


class NotLeader(TailraceError):
    """Another node leads the partition; ``leader`` names that node if it is known."""

    code = "not_leader"
    retriable = True


class NoQuorum(TailraceError):
    """Too few replicas confirmed in time."""

    code = "no_quorum"
    retriable = True
    default_outcome: ClassVar[Outcome] = "unknown"


class Overloaded(TailraceError):
    """A bound is reached and nothing was done; try again after ``retry_after_ms``."""

    code = "overloaded"
    retriable = True


class TooLarge(TailraceError):
    """Something is above its limit; the message names it and the limit."""

    code = "too_large"


class StorageFault(TailraceError):
    """The storage below the partition failed."""

    code = "storage_fault"
    default_outcome: ClassVar[Outcome] = "unknown"


class Corrupt(StorageFault):
    """Stored bytes are damaged; ``path`` and ``position`` name the place."""

    code = "corrupt"


class Full(StorageFault):
    """The disk is full: writes are refused, reads go on."""

    code = "full"
    retriable = True
    default_outcome: ClassVar[Outcome] = "none"


class Timeout(TailraceError):
    """No answer arrived in the time given."""

    code = "timeout"
    retriable = True
    default_outcome: ClassVar[Outcome] = "unknown"


class Unavailable(TailraceError):
    """The broker cannot be reached, or will not take requests now."""

    code = "unavailable"
    retriable = True


class Edge(NamedTuple):
    """Translation of one code for other protocols and for the exit status."""

    http: int
    grpc: str
    mqtt: int
    exit: int


EDGES: dict[str, Edge] = {
    "error": Edge(500, "INTERNAL", 0x80, 1),
    "invalid_request": Edge(400, "INVALID_ARGUMENT", 0x83, 2),
    "not_found": Edge(404, "NOT_FOUND", 0x90, 3),
    "already_exists": Edge(409, "ALREADY_EXISTS", 0x83, 4),
    "denied": Edge(403, "PERMISSION_DENIED", 0x87, 5),
    "unauthenticated": Edge(401, "UNAUTHENTICATED", 0x86, 6),
    "fenced": Edge(409, "ABORTED", 0x83, 7),
    "lease_lost": Edge(409, "FAILED_PRECONDITION", 0x83, 8),
    "sequence_conflict": Edge(409, "FAILED_PRECONDITION", 0x83, 9),
    "not_leader": Edge(503, "UNAVAILABLE", 0x9C, 10),
    "no_quorum": Edge(503, "UNAVAILABLE", 0x88, 11),
    "overloaded": Edge(429, "RESOURCE_EXHAUSTED", 0x97, 12),
    "too_large": Edge(413, "OUT_OF_RANGE", 0x95, 13),
    "storage_fault": Edge(500, "INTERNAL", 0x80, 14),
    "corrupt": Edge(500, "DATA_LOSS", 0x80, 15),
    "full": Edge(507, "RESOURCE_EXHAUSTED", 0x97, 16),
    "timeout": Edge(504, "DEADLINE_EXCEEDED", 0x88, 17),
    "unavailable": Edge(503, "UNAVAILABLE", 0x88, 18),
}


def _tree(root: type[TailraceError]) -> dict[str, type[TailraceError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[TailraceError]] = _tree(TailraceError)


def from_code(code: str, message: str, outcome: Outcome, details: dict[str, Any]) -> TailraceError:
    """Build the error that a code names; an unknown code (a newer broker) becomes the root class."""
    return BY_CODE.get(code, TailraceError)(message, outcome=outcome, **details)


def _rebuild(code: str, message: str, outcome: Outcome, details: dict[str, Any]) -> TailraceError:
    return from_code(code, message, outcome, details)
