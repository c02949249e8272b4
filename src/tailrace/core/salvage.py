"""Facts replayed behind a gap: which of them can be believed although facts before them are lost.

No message that is there may be lost, so in doubt a message is delivered again:

- Appended messages count, and so do facts that settled messages (acknowledged, dead-lettered, expired).
- Leases, failures and messages on their way to the dead letters do not: these messages are available again,
  and their attempts are counted anew.
- Facts of a group that is unknown because its enlisting is lost are left out; its coordinator enlists it
  again, from where its policy says.
- The position of a producer is taken from its next batch.
- A staged attempt of which a batch is lost is dropped as a whole.
- Delayed messages whose release is lost are released once more.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.core.collections.span_map import flat, pairs
from tailrace.core.log_head import LogHead
from tailrace.core.model import facts
from tailrace.core.publish.producers import Producers
from tailrace.core.queue.group_queues import GroupQueues
from tailrace.core.staged.staged_batches import StagedBatches

_UNDER_WAY = (
    facts.Leased,
    facts.LeaseExtended,
    facts.LeaseExpired,
    facts.Nacked,
    facts.GivenBack,
    facts.Dying,
)
_SETTLING = facts.Acked | facts.Buried | facts.Lapsed | facts.OffsetsSettled | facts.Reopened
_OF_GROUPS = (facts.Delisted, facts.Granted, facts.CursorMoved, facts.GroupReset, facts.GroupPaused)


def salvage(
    fact: Any, head: LogHead, producers: Producers, staging: StagedBatches, queues: GroupQueues
) -> Any | None:
    """Return the part of a fact that can be believed, to be applied as usual; None if there is none.

    Settlements are carried out here, because the leases that they name may be lost.
    """
    kind = type(fact)
    if kind in _UNDER_WAY:
        return None
    if isinstance(fact, facts.Appended | facts.Delayed):
        if fact.producer_id:
            producers.resume(fact.producer_id, fact.producer_epoch, fact.producer_sequence)
        time_us = max(fact.append_time_us, head.append_time_us)
        # It is uncertain whether earlier delayed or staged rows are still known: the rows count as new.
        return msgspec.structs.replace(fact, append_time_us=time_us, released=False)
    if isinstance(fact, facts.Staged):
        if staging.follows(fact):
            return fact
        known = staging.known([fact.attempt])
        return facts.StageDropped(known, fact.append_time_us) if known else None
    if isinstance(fact, facts.StageApplied | facts.StageDropped):
        return msgspec.structs.replace(fact, attempts=staging.known(fact.attempts))
    if isinstance(fact, facts.ProducerAdvanced):
        producers.resume(fact.producer_id, fact.epoch, fact.sequence)
        return fact
    if isinstance(fact, facts.Trimmed):
        return facts.Trimmed(min(fact.offset, head.end_offset))
    if isinstance(fact, facts.MessagesLost):
        return msgspec.structs.replace(fact, spans=_here(head, fact.spans))
    if kind in _OF_GROUPS:
        return None if queues.find(fact.group) is None else fact
    return _settled(fact, head, queues) if isinstance(fact, _SETTLING) else fact


def _settled(fact: Any, head: LogHead, queues: GroupQueues) -> Any | None:
    """Apply a fact that settled or redrove messages of a group; return whether it was one."""
    ledger = queues.find(fact.group)
    if ledger is None:
        return None
    head.pass_time(fact.time_us)
    counters = ledger.counters
    if isinstance(fact, facts.Acked):
        spans = flat(sorted(span for _, some in fact.leases for span in pairs(some)))
        counters.settled_by_ack(ledger.settled_anyhow(_here(head, spans), fact.time_us))
        return None
    spans = _here(head, fact.spans)
    many = ledger.settled_anyhow(spans, fact.time_us)
    if isinstance(fact, facts.Buried):
        counters.buried(many)
    elif isinstance(fact, facts.Lapsed):
        counters.expired(many)
    elif isinstance(fact, facts.OffsetsSettled):
        counters.settled_by_hand(many)
    elif spans == fact.spans:
        return fact
    return None


def _here(head: LogHead, spans: list[int]) -> list[int]:
    end = head.end_offset
    return flat((first, min(stop, end)) for first, stop in pairs(spans) if first < end)
