"""Simulated members of groups: they join, lease, settle, are late, forget, pause, leave and vanish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Reply, Request
from tailrace.core.model.identifiers import HAS_OFFSET_DELTA, Refusal
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.sim.actors.surroundings import GroupWorld
from tailrace.sim.delivery_history import Given, HistoryAct, require
from tailrace.sim.network import SimulatedLink

Spans = list[int]


def rows_of(data: memoryview) -> dict[int, bytes]:
    """The values in frames of a delivery, by offset."""
    values: dict[int, bytes] = {}
    for header, body in frame.walk(data):
        table = arrow.decode(body, header.columns)
        offsets = range(header.base_offset, header.base_offset + table.num_rows)
        if header.columns & HAS_OFFSET_DELTA:
            deltas = np.asarray(table.column("offset_delta"))
            offsets = [header.base_offset + int(delta) for delta in deltas]  # type: ignore[assignment]
        values |= dict(zip(offsets, table.column("value").to_pylist(), strict=True))
    return values


class SimMember:
    """One member. It asks for one thing at a time on each of its two errands: heartbeats and leases."""

    def __init__(self, world: GroupWorld, group: str, name: str) -> None:
        self.world, self.group, self.name = world, group, name
        self.line = SimulatedLink(world)
        self.version = 0
        self.owned: dict[int, int] = {}
        self.released: list[tuple[str, int]] = []
        self.alive = True
        self.joined = False
        self.lease_ms = world.random.choice((1_000, 3_000, 8_000))
        self._paused_until_us = 0
        self._before: list[tuple[int, int]] = []
        """Partitions that it ever owned, with their generations."""
        self._asked: dict[int, int] = {}
        """Partitions and generations of the request for messages that is under way."""
        self._unheard = False
        """An answer was lost: something may have been leased that it never heard of."""
        self._granted: list[int] = []
        """All leases that it has heard of."""
        self._held: dict[int, list[Given]] = {}
        """What it was given and has not settled, by lease."""
        self._join()
        self._lease()

    # ------------------------------------------------------------------------------------------ membership

    def _ask(self, request: Request, then: Any) -> None:
        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            if self.alive:
                then(reply, parts)

        self.line.submit(request, b"", answered)

    def _soon(self, action: Any) -> None:
        pause_us = max(0, self._paused_until_us - self.world.clock.now_us())
        delay_us = self.world.random.choice((1_000, 100_000, 300_000))
        self.world.later(pause_us + delay_us, lambda: action() if self.alive else None)

    def _doubt(self) -> None:
        self.world.history.doubts[self.group, self.name].append(self.world.clock.now_us())

    def _join(self) -> None:
        if self.version:  # Before it was first told anything it has nothing to lose.
            self._doubt()
        options = self.world.options[self.group]
        self._ask(groups.JoinGroup(self.group, self.name, [self.world.topic], options), self._told)

    def _told(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        """An answer to a join or a heartbeat."""
        if not isinstance(reply, groups.Membership):
            self._doubt()
            gone = isinstance(reply, Refusal) and reply.code in ("fenced", "not_found")
            self.joined = self.joined and not gone
            self._soon(self._beat if self.joined else self._join)
            return
        self.joined, self.version = True, reply.version
        owned = {number: generation for _, number, generation in reply.owned}
        revoking = {number for _, number in reply.revoking}
        kept = self.world.history.rules[self.group].assignment == "auto"
        if (set(self.owned) - set(owned) or revoking) and not kept:
            self._doubt()
        self._before += [pair for pair in self.owned.items() if pair not in self._before]
        self.world.seen["partition revoked"] += bool(revoking)
        self.owned = {number: owned[number] for number in owned if number not in revoking}
        for number in revoking:
            self._let_go(number)
        self._soon(self._beat)

    def _let_go(self, partition: int) -> None:
        """Finish with a partition; some forget to say so, and lose it by force."""
        if self.world.chance(self.world.careless):
            self.world.seen["revoked by force"] += 1
            return
        for lease, given in list(self._held.items()):
            if given[0].place[0] == partition:
                del self._held[lease]
                self._nack(given, failure=False)
        self.released.append((self.world.topic, partition))

    def _beat(self) -> None:
        if self.world.clock.now_us() < self._paused_until_us:
            self._doubt()
            self._soon(self._beat)
            return
        released, self.released = self.released, []
        wait_ms = self.world.random.choice((0, 300, 800))
        self._ask(groups.Heartbeat(self.group, self.name, self.version, released, wait_ms), self._told)

    def leave(self) -> None:
        """Say good-bye."""
        self._doubt()
        self.world.seen["left"] += 1
        self._ask(groups.LeaveGroup(self.group, self.name), lambda reply, parts: None)
        self.alive = False

    def vanish(self) -> None:
        """End without a word; the broker may see that the connection is closed."""
        self._doubt()
        self.world.seen["vanished"] += 1
        self.alive = False
        if self.world.chance(0.5):
            self.line.drop(False)

    def pause(self) -> None:
        """Stand still for longer than a lease, then go on as if nothing had been."""
        self._doubt()
        self.world.seen["paused past a lease"] += 1
        self._paused_until_us = self.world.clock.now_us() + int(1500 * self.lease_ms)

    # --------------------------------------------------------------------------------------------- leasing

    def _lease(self) -> None:
        random = self.world.random
        if not self.joined or not self.owned or self.world.clock.now_us() < self._paused_until_us:
            self._soon(self._lease)
            return
        pairs = list(self.owned.items())
        lost = [pair for pair in self._before if pair not in pairs]
        if lost and self.world.chance(self.world.careless):
            self.world.seen["leased with what was lost"] += 1
            pairs = [random.choice(lost)]
        random.shuffle(pairs)
        self._asked = dict(pairs)
        request = wire.Lease(
            self.world.topic,
            self.group,
            self.name,
            pairs,
            random.choice((1, 2, 5, 50)),
            random.choice((1, 500, 100_000)),
            random.choice((0, 200, 2_000)),
            self.lease_ms,
            list(self._granted) if self._unheard else None,
        )
        self._unheard = False
        self._ask(request, self._leased)

    def _leased(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        if not isinstance(reply, wire.Leases):
            self._unheard = True
            self._soon(self._lease)
            return
        data, at = memoryview(b"".join(parts)), 0
        for grant in reply.grants:
            self._take(grant, data[at : at + grant.nbytes])
            at += grant.nbytes
        require(at == len(data), "a delivery has more bytes than its leases")
        delay_us = self.world.random.choice((0, 1_000, 100_000))
        self.world.later(delay_us, lambda: self._lease() if self.alive else None)

    def _take(self, grant: wire.Grant, data: memoryview) -> None:
        world = self.world
        values = {at: world.known_as(value, grant.partition, at) for at, value in rows_of(data).items()}
        decided_us = world.true_us(grant.partition, grant.deadline_us - self.lease_ms * 1000)
        deadline_us = world.true_us(grant.partition, grant.deadline_us)
        given: list[Given] = []
        for first, count, deliveries, failures in grant.runs:
            for offset in range(first, first + count):
                require(offset in values, f"{offset} was leased, and did not come along")
                require(values[offset] in world.history.messages, f"nobody sent {values[offset]!r}")
                given.append(
                    Given(
                        self.group,
                        self.name,
                        (grant.partition, offset),
                        values[offset],
                        grant.lease,
                        decided_us,
                        deadline_us,
                        deliveries,
                        failures,
                        self._asked[grant.partition],
                        len(world.history.given) + len(given),
                    )
                )
        world.history.given.extend(given)
        world.seen["delivered again"] += any(item.deliveries > 1 for item in given)
        self._held[grant.lease] = given
        self._granted.append(grant.lease)
        busy_us = 0 if world.healed else world.random.choice((0, 1_000, 50_000, 400_000, 2_000_000))
        world.later(busy_us, lambda: self._handle(grant.lease))

    def _handle(self, lease: int) -> None:
        """Do something with what is left of a lease."""
        world, given = self.world, self._held.get(lease)
        if not self.alive or not given:
            return
        now_us = world.clock.now_us()
        if now_us < self._paused_until_us:
            world.later(self._paused_until_us - now_us, lambda: self._handle(lease))
            return
        if any(world.kills(item.value) for item in given):
            self.leave() if lease % 2 else self.vanish()
            world.killed(self.group)
            return
        kinds = ("ack", "ack", "ack", "some", "nack", "nack", "back", "reject", "extend", "late", "forget")
        kind = "ack" if world.healed or world.chance(world.obedience) else world.random.choice(kinds)
        if kind == "late":
            world.seen["settled too late"] += 1
            world.later(self.lease_ms * 1200, lambda: self._handle(lease))
            return
        if kind == "extend":
            self._extend(lease, given)
            return
        share = given if kind in ("ack", "forget") else given[: world.random.randint(1, len(given))]
        left = given[len(share) :]
        self._held[lease] = left
        if not left:
            del self._held[lease]
        if kind in ("ack", "some"):
            self._ack(share)
        elif kind == "nack":
            self._nack(share, world.random.choice((None, None, 0, 700)))
        elif kind == "back":
            self._nack(share, failure=False)
        elif kind == "reject":
            self._reject(share)
        else:
            world.seen["forgotten"] += 1
        if left:
            world.later(world.random.choice((0, 10_000, 500_000)), lambda: self._handle(lease))

    # ------------------------------------------------------------------------------------------ settlement

    def _send(self, request: Request, given: list[Given], kind: str, wait_ms: int | None = None) -> None:
        """Ask, and note for each message what became of it. An ack is sent twice now and then: either of them
        may be the one that is taken."""
        world = self.world
        self._send_once(request, given, kind, wait_ms)
        if kind == "ack" and not world.healed and world.chance(0.1):
            world.seen["acked twice"] += 1
            self._send_once(request, given, kind, wait_ms)

    def _send_once(self, request: Request, given: list[Given], kind: str, wait_ms: int | None) -> None:
        world = self.world
        notes = []
        for item in given:
            act = HistoryAct(kind, world.clock.now_us(), wait_ms)
            item.acts.append(act)
            notes.append((item.place[1], act))

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            lost = set()
            if isinstance(reply, wire.Settled):
                for _, spans in reply.lost:
                    for first, end in zip(spans[::2], spans[1::2], strict=True):
                        lost |= set(range(first, end))
                world.seen["receipt lost"] += bool(lost)
            for offset, act in notes:
                act.replied_us = world.clock.now_us()
                if isinstance(reply, Refusal):
                    act.result = "none" if reply.outcome == "none" else "unknown"
                    act.replied_us = act.replied_us if reply.outcome == "none" else 1 << 62
                else:
                    act.result = "lost" if offset in lost else "ok"

        self.line.submit(request, b"", answered)

    def _spans(self, given: list[Given]) -> Spans:
        offsets = sorted(item.place[1] for item in given)
        spans: Spans = []
        for offset in offsets:
            if spans and spans[-1] == offset:
                spans[-1] += 1
            else:
                spans += [offset, offset + 1]
        return spans

    def _ack(self, given: list[Given]) -> None:
        lease, partition = given[0].lease, given[0].place[0]
        request = wire.Ack(self.world.topic, partition, self.group, [(lease, self._spans(given))])
        self._send(request, given, "ack")

    def _nack(self, given: list[Given], delay_ms: int | None = None, *, failure: bool = True) -> None:
        lease, partition = given[0].lease, given[0].place[0]
        request = wire.Nack(
            self.world.topic, partition, self.group, lease, self._spans(given), delay_ms, "no", failure
        )
        self._send(request, given, "nack" if failure else "give back", delay_ms)

    def _reject(self, given: list[Given]) -> None:
        lease, partition = given[0].lease, given[0].place[0]
        request = wire.RejectMessages(self.world.topic, partition, self.group, lease, self._spans(given))
        self._send(request, given, "reject")

    def _extend(self, lease: int, given: list[Given]) -> None:
        world = self.world
        request = wire.Extend(world.topic, given[0].place[0], self.group, [lease], self.lease_ms)

        def extended(reply: Reply, parts: Sequence[Buffer]) -> None:
            if isinstance(reply, wire.Extended) and lease not in reply.lost:
                world.seen["extended"] += 1
                deadline_us = world.true_us(given[0].place[0], reply.deadline_us)
                for item in given:
                    item.deadline_us = max(item.deadline_us, deadline_us)
            world.later(self.lease_ms * 500, lambda: self._handle(lease))

        self._ask(request, extended)
