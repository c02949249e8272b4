"""What a consumer has in hand: leased rows that no handler has got yet, in the order of handing out.

Rows come in the order that the broker chose, by partition. Under `strict` they are handed out by lane; under
`weighted` in the broker's order, which follows the weights, but for messages that were asked for because they
are more urgent than what is in hand: those go first. A key never overtakes itself: a message goes no earlier
than those of its key that are in hand. Nor is a message overtaken that has waited for `starvation_ms`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from tailrace.client.queue.delivery import LeasedMessage, LeasedRows
from tailrace.client.queue.held_leases import HeldLease, Unstarted
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import PRIORITY_DEFAULT
from tailrace.core.selection.lanes import LANES

Chosen = Callable[[LeasedRows], Sequence[int]]
"""Rows that are chosen among some."""
_STARVED = -1
_IN_TURN = 9
"""The rank of rows that keep the order in which the broker chose them."""


class Hand:
    """The rows in hand; `count` of them."""

    def __init__(self) -> None:
        self._rows: deque[LeasedRows] = deque()
        self._lanes = [0] * (LANES + 1)
        """How many of the rows have this as their most urgent lane."""
        self.count = 0
        self.held_back = False
        """Whether more urgent rows may wait behind others of their key."""

    def __iter__(self) -> Iterator[LeasedRows]:
        return iter(self._rows)

    def pop(self) -> LeasedRows:
        """The next rows."""
        rows = self._rows.popleft()
        self.count -= len(rows)
        self._lanes[rows.lane()] -= 1
        return rows

    def put_back(self, rows: LeasedRows | None) -> None:
        """These are next, after all."""
        if rows is not None:
            self._rows.appendleft(rows)
            self.count += len(rows)
            self._lanes[rows.lane()] += 1

    def clear(self) -> None:
        """Nothing is in hand."""
        self._rows.clear()
        self.count = 0
        self._count_lanes()

    def take_out(self, chosen: Chosen, keep: int = 0) -> Unstarted:
        """Take chosen rows out, but for the first `keep` in hand."""
        taken = Unstarted()
        kept: deque[LeasedRows] = deque()
        for rows in self._rows:
            out = [row for row in chosen(rows) if row >= keep]
            keep = max(0, keep - len(rows))
            if out:
                offsets, keys, gone = rows.offsets(), rows.values("key"), set(out)
                for row in out:
                    taken.add(rows.lease, offsets[row], None if keys is None else keys[row])
                rows.keep([row for row in range(len(rows)) if row not in gone])
                self.count -= len(out)
            if len(rows):
                kept.append(rows)
        self._rows = kept
        self._count_lanes()
        return taken

    def _count_lanes(self) -> None:
        self._lanes = [0] * (LANES + 1)
        for rows in self._rows:
            self._lanes[rows.lane()] += 1

    def rank(self) -> int | None:
        """The rank of the next rows; None: there are none."""
        return self._rows[0].rank if self._rows else None

    def lane(self) -> int:
        """The most urgent lane of what is in hand."""
        for lane, many in enumerate(self._lanes):
            if many:
                return lane
        return LANES

    def short_of(self, count: int, others: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The least urgent rank before which there are fewer than `count` messages, and by how many fewer; of
        those in hand, and of others: rank, and how many may be started."""
        before, short = 0, (0, 0)
        ranks = [(rows.rank, len(rows)) for rows in self._rows]
        for rank, many in sorted([*ranks, *others]):
            if before >= count:
                break
            if rank > short[0]:
                short = rank, count - before
            before += many
        return short

    # -- order

    def rank_anew(self, policy: GroupPolicy, now_us: int) -> None:
        """Those before them of their key may be gone: rows that were held back have their own rank again."""
        rows, self._rows = self._rows, deque()
        self.count, self.held_back = 0, False
        self._count_lanes()
        for part in rows:
            self.add(part, policy, now_us, urgent=False)

    def add(self, rows: LeasedRows, policy: GroupPolicy, now_us: int, *, urgent: bool) -> None:
        """Rows have come; `urgent`: they were asked for as such."""
        self.count += len(rows)
        strict = policy.priority_mode == "strict"
        rows.rank = _IN_TURN
        if not _by_lane(policy, urgent=urgent):
            self._rows.append(rows)
            self._lanes[rows.lane()] += 1
            return
        starved_us = now_us - policy.starvation_ms * 1000
        lanes = rows.lanes()
        if strict and rows.header.append_time_us <= starved_us:
            lanes = [_STARVED] * len(rows)
        if lanes is None:
            lanes = [PRIORITY_DEFAULT] * len(rows)
        if policy.ordering == "key":
            own, lanes = lanes, self._behind_their_keys(rows, lanes)
            self.held_back = self.held_back or (strict and lanes is not own and list(lanes) != list(own))
        ranks = sorted(set(lanes))
        for rank in ranks:
            part = rows
            if len(ranks) > 1:
                part = rows.part([row for row, lane in enumerate(lanes) if lane == rank])
            part.rank = rank
            self._insert(part, starved_us)

    def _insert(self, part: LeasedRows, starved_us: int) -> None:
        at = len(self._rows)
        while at and self._rows[at - 1].rank > part.rank:
            if self._rows[at - 1].header.append_time_us <= starved_us:
                break
            at -= 1
        self._rows.insert(at, part)
        self._lanes[part.lane()] += 1

    def _behind_their_keys(self, rows: LeasedRows, lanes: Sequence[int]) -> Sequence[int]:
        """Ranks that let no message overtake one of its key."""
        keys = rows.values("key")
        if keys is None:
            return lanes
        least, place = min(lanes), rows.lease.place
        ranks: dict[bytes, int] = {}
        for other in self._rows:
            if other.rank > least and other.lease.place == place:
                for key in _given(other.values("key")):
                    ranks[key] = max(other.rank, ranks.get(key, _STARVED))
        if not ranks and max(lanes) == least:
            return lanes
        found = []
        for key, lane in zip(keys, lanes, strict=True):
            if key is not None:
                lane = ranks[key] = max(lane, ranks.get(key, _STARVED))
            found.append(lane)
        return found


def rank_of(message: LeasedMessage) -> int:
    """The rank of a message that is the first of its key."""
    rank = message.rows.rank
    return rank if rank == _IN_TURN else min(rank, message.priority)


def _by_lane(policy: GroupPolicy, *, urgent: bool) -> bool:
    return policy.ordering != "partition" and (urgent or policy.priority_mode == "strict")


def overtakes(rows: LeasedRows, others: LeasedRows, policy: GroupPolicy, *, urgent: bool) -> bool:
    """Whether rows that have come may go before some of others."""
    if not _by_lane(policy, urgent=urgent):
        return False
    lanes = rows.lanes()
    return others.rank > (PRIORITY_DEFAULT if lanes is None else min(lanes))


def _given(keys: Iterable[bytes | None] | None) -> Iterable[bytes]:
    return (key for key in keys or () if key is not None)


def all_of(places: set[Place]) -> Chosen:
    """Rows of some partitions."""
    return lambda rows: range(len(rows)) if rows.lease.place in places else ()


def fit_for_others(places: set[Place], keep: int, held: set[object], ordering: str) -> Chosen:
    """Rows of some partitions behind the first `keep` in hand, but for those that no other member may have:
    they keep their order with what is held, or with some of those first ones."""
    left = keep

    def chosen(rows: LeasedRows) -> Sequence[int]:
        nonlocal left
        kept, left = min(left, len(rows)), max(0, left - len(rows))
        if rows.lease.place not in places:
            return ()
        orders = rows.orders(ordering)
        held.update(order for order in orders[:kept] if order is not None)
        return [row for row in range(kept, len(rows)) if orders[row] not in held]

    return chosen


def of_lease(lease: HeldLease, offsets: set[int]) -> Chosen:
    """Some rows of a lease."""

    def chosen(rows: LeasedRows) -> Sequence[int]:
        if rows.lease is not lease:
            return ()
        return [row for row, offset in enumerate(rows.offsets()) if offset in offsets]

    return chosen


def behind(place: Place, offset: int, key: bytes | None, fresh: int | None = None) -> Chosen:
    """Rows behind an offset, of a key or all; of leases before number `fresh`."""

    def chosen(rows: LeasedRows) -> Sequence[int]:
        if rows.lease.place != place or (fresh is not None and rows.lease.number >= fresh):
            return ()
        offsets = rows.offsets()
        if key is None:
            return [row for row, other in enumerate(offsets) if other > offset]
        keys = rows.values("key") or ()
        return [row for row, other in enumerate(keys) if other == key and offsets[row] > offset]

    return chosen
