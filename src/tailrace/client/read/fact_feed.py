"""Facts out of a broker: what the log of a partition says has happened to its messages, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.core.model.commands import Reply
from tailrace.core.model.facts import Fact
from tailrace.core.model.queue_commands import FactsRead
from tailrace.format import frame
from tailrace.format.codec import facts_decoder
from tailrace.format.frame import Buffer, Header

_decode = facts_decoder(Fact)


class FactPiece(msgspec.Struct, frozen=True):
    """What one answer tells. `appended` are (entry, base offset, span, append time) of data frames, `frames`
    the facts with the headers of their frames; both in the order of the log."""

    next_entry: int
    end_entry: int
    groups: dict[int, str]
    appended: list[tuple[int, int, int, int]]
    frames: list[tuple[Header, list[Any]]]

    @property
    def last(self) -> bool:
        """Whether there is no more."""
        return self.next_entry >= self.end_entry


def piece_of(reply: Reply, parts: Sequence[Buffer]) -> FactPiece:
    """The piece that an answer holds; its checksums are checked."""
    assert isinstance(reply, FactsRead), reply
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    frames = [(header, _decode(facts)) for header, facts in frame.walk(body)]
    return FactPiece(reply.next_entry, reply.end_entry, reply.groups, reply.appended, frames)
