"""Verbs of dead letters: find unsettled ones, hold them, send them back, settle them.

A redrive is a move that the client drives. The message is opened again at its origin (`Reopen`), or a copy is
appended there (`Republish`); then its dead letter is settled (`SettleOffsets`). Each step is answered when it
is synced, whatever the topics promise (`broker.runtime.assurance`). A crash between the two leaves the dead
letter on the list: redriving it again finds the message open, or recognises the copy by its dedup id. If the
group has settled the message in between, it is delivered once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.broker.queue.lease_verbs import COUNT_MAX, MEMBER_MAX
from tailrace.broker.runtime.framing import publish_batch
from tailrace.broker.topics import Topics
from tailrace.core.model.commands import Publish
from tailrace.core.model.identifiers import HEADER_BYTES_MAX
from tailrace.core.model.internal_commands import EvictMember, HoldRun
from tailrace.core.model.queue_commands import (
    FindUnsettled,
    HoldOffsets,
    Reopen,
    Republish,
    SettleOffsets,
    UnsettledFound,
)
from tailrace.core.queue.lease_decision import LEASE_MS_MAX
from tailrace.errors import InvalidRequest
from tailrace.format import batch
from tailrace.format.frame import Buffer, crc32c
from tailrace.ports import Gate, Respond, Verb

MARK_BYTES_MAX = 512
"""Extra bytes for the header that names the group of a copy, above the limit for headers of a message."""


class DeadLetterVerbs:
    """Answers requests about dead letters; they work on every other topic as well."""

    def __init__(self, topics: Topics, new_lease: Callable[[], int]) -> None:
        self._topics = topics
        self._new_lease = new_lease
        self.verbs: dict[type[Any], Verb] = {
            FindUnsettled: self._find,
            HoldOffsets: self._hold,
            Republish: self._republish,
            Reopen: self._surely,
            SettleOffsets: self._surely,
        }

    def _find(self, request: FindUnsettled, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        if not 1 <= request.count_max <= COUNT_MAX:
            raise InvalidRequest(f"count_max: 1 to {COUNT_MAX}, not {request.count_max}")
        spans = runtime.unsettled(request.group, request.offset, request.count_max)
        # A redrive names dead letters by their offsets: after a crash these must not be other messages.
        runtime.answer(runtime.surely(respond), UnsettledFound(spans))

    def _hold(self, request: HoldOffsets, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        if not 1 <= len(request.member) <= MEMBER_MAX:
            raise InvalidRequest(f"member: 1 to {MEMBER_MAX} characters, not {len(request.member)}")
        if not 1 <= request.lease_ms <= LEASE_MS_MAX:
            raise InvalidRequest(f"lease_ms: 1 to {LEASE_MS_MAX}, not {request.lease_ms}")
        if not request.spans:
            runtime.submit(EvictMember(request.group, request.member), b"", respond)
            return
        lease, end = self._new_lease(), runtime.end_offset
        hold = HoldRun(request.group, request.member, lease, request.spans, end, request.lease_ms)
        runtime.submit(hold, b"", respond)

    def _republish(self, request: Republish, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        if crc32c(body) != request.crc:
            raise InvalidRequest("crc: the body does not match its checksum; it was damaged on the way")
        most = HEADER_BYTES_MAX + MARK_BYTES_MAX
        keyed = runtime.options.key_index
        view, _ = batch.open_body(body, request.columns, want_keys=keyed, header_bytes_max=most)
        view = msgspec.structs.replace(view, header_bytes_max=min(view.header_bytes_max, HEADER_BYTES_MAX))
        publish = Publish(request.topic, request.partition, request.columns, request.crc)
        runtime.submit(publish_batch(publish, view, body), body, runtime.surely(respond))

    def _surely(self, request: Reopen | SettleOffsets, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        runtime.submit(request, b"", runtime.surely(respond))
