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

from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.core.collections.span_map import flat, pairs
from tailrace.core.model import facts

if TYPE_CHECKING:
    from tailrace.core.partition import Partition

_UNDER_WAY = (
    facts.Leased,
    facts.LeaseExtended,
    facts.LeaseExpired,
    facts.Nacked,
    facts.GivenBack,
    facts.Dying,
)
_OF_GROUPS = (facts.Delisted, facts.Granted, facts.CursorMoved, facts.GroupReset, facts.GroupPaused)


def salvage(partition: Partition, fact: Any) -> None:
    """Apply the part of a fact that can be believed."""
    kind = type(fact)
    if kind in _UNDER_WAY:
        return
    if isinstance(fact, facts.Appended | facts.Delayed):
        _stored(partition, fact)
    elif isinstance(fact, facts.Staged):
        if partition.staging.follows(fact):
            partition.apply(fact)
        elif partition.staging.known([fact.attempt]):
            partition.apply(facts.StageDropped([fact.attempt], fact.append_time_us))
    elif isinstance(fact, facts.StageApplied | facts.StageDropped):
        partition.apply(msgspec.structs.replace(fact, attempts=partition.staging.known(fact.attempts)))
    elif isinstance(fact, facts.ProducerAdvanced):
        partition.producers.resume(fact.producer_id, fact.epoch, fact.sequence)
        partition.apply(fact)
    elif isinstance(fact, facts.Trimmed):
        partition.apply(facts.Trimmed(min(fact.offset, partition.end_offset)))
    elif isinstance(fact, facts.MessagesLost):
        partition.apply(msgspec.structs.replace(fact, spans=_here(partition, fact.spans)))
    elif kind in _OF_GROUPS:
        if partition.queues.find(fact.group) is not None:
            partition.apply(fact)
    elif not _settled(partition, fact):
        partition.apply(fact)


def _stored(partition: Partition, fact: facts.Appended | facts.Delayed) -> None:
    time_us = max(fact.append_time_us, partition.append_time_us)
    # It is uncertain whether earlier delayed or staged rows are still known: the rows count as new.
    fact = msgspec.structs.replace(fact, append_time_us=time_us, released=False)
    if fact.producer_id:
        partition.producers.resume(fact.producer_id, fact.producer_epoch, fact.producer_sequence)
    partition.apply(fact)


def _settled(partition: Partition, fact: Any) -> bool:
    """Apply a fact that settled or redrove messages of a group; return whether it was one."""
    if not isinstance(
        fact, facts.Acked | facts.Buried | facts.Lapsed | facts.OffsetsSettled | facts.Reopened
    ):
        return False
    ledger = partition.queues.find(fact.group)
    if ledger is None:
        return True
    partition.append_time_us = max(partition.append_time_us, fact.time_us)
    counters = ledger.counters
    if isinstance(fact, facts.Acked):
        spans = flat(sorted(span for _, some in fact.leases for span in pairs(some)))
        counters.acked += ledger.settled_anyhow(_here(partition, spans), fact.time_us)
        return True
    spans = _here(partition, fact.spans)
    many = ledger.settled_anyhow(spans, fact.time_us)
    if isinstance(fact, facts.Buried):
        counters.dead_lettered += many
    elif isinstance(fact, facts.Lapsed):
        counters.lapsed += many
    elif isinstance(fact, facts.OffsetsSettled):
        counters.purged += many
    elif spans == fact.spans:
        partition.apply(fact)
    return True


def _here(partition: Partition, spans: list[int]) -> list[int]:
    end = partition.end_offset
    return flat((first, min(stop, end)) for first, stop in pairs(spans) if first < end)
