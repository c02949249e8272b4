"""A partition with groups, and beside it a model of each group that checks every reply.

Frames are at hand or not as the test wishes. A crash loses the newest soft facts, and the models go back
with them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Done, Publish, Published, TrimTopic
from tailrace.core.model.decision import Decision
from tailrace.core.model.facts import Appended, Delayed, Staged
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import (
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_KEY,
    HAS_PRIORITY,
    BatchView,
    Columns,
    Refusal,
    key_hash,
)
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tests.core.delay_model import RELEASED, DelayModel
from tests.core.delivery_model import DYING, FREE, LEASED, DeliveryModel, Letter
from tests.core.turns import at

T0 = 1_700_000_000_000_000
ROW_BYTES = 100
ROUNDS_MAX = 100


class Shelf:
    """See `AtHand`: frames as they were published, some of them out of reach."""

    def __init__(self) -> None:
        self.frames: list[Columns] = []
        self.away: set[int] = set()

    def add(self, letters: list[Letter], base: int, append_us: int) -> int:
        """A new frame; returns the columns that it has."""
        keys = any(letter.key is not None for letter in letters)
        lanes = any(letter.priority != 2 for letter in letters)
        ends = any(letter.expires_us for letter in letters)
        hashes = [0 if letter.key is None else key_hash(letter.key.encode()) for letter in letters]
        self.frames.append(
            Columns(
                base,
                base + len(letters),
                append_us,
                priorities=np.array([letter.priority for letter in letters], np.uint8) if lanes else None,
                key_hashes=np.array(hashes, np.uint64) if keys else None,
                expires_us=np.array([letter.expires_us for letter in letters], np.int64) if ends else None,
                nbytes=ROW_BYTES * len(letters),
            )
        )
        return HAS_KEY * keys | HAS_PRIORITY * lanes | HAS_EXPIRES_AT * ends

    def columns(self, offset: int) -> Columns | None:
        for frame in self.frames:
            if frame.base_offset <= offset < frame.end_offset:
                return None if frame.base_offset in self.away else frame
        return None

    def reach(self, offset: int, bytes_max: int) -> int:
        at, size = offset, 0
        while (frame := self.columns(at)) is not None:
            size += ROW_BYTES * (frame.end_offset - frame.base_offset)
            if at > offset and size > bytes_max:
                break
            at = frame.end_offset
        return at

    def load(self, offset: int) -> None:
        """The frame that was missing comes."""
        for frame in self.frames:
            if frame.base_offset <= offset < frame.end_offset:
                assert frame.base_offset in self.away, f"{offset} is at hand, but was missing"
                self.away.remove(frame.base_offset)
                return
        raise AssertionError(f"{offset} is missing, and there is no such frame")


class ModelledPartition:
    """Commands go through here: decided, applied, written down, and checked."""

    def __init__(self, options: TopicOptions | None = None, kind: type[Partition] = Partition) -> None:
        self.options = options or TopicOptions()
        self.kind = kind
        self.partition = kind(self.options)
        self.shelf = Shelf()
        self.now_us = T0
        self.log: list[Letter] = []
        self.groups: dict[str, DeliveryModel] = {}
        self.facts: list[Any] = []
        self.last_hard = 0
        self.earlier: list[tuple[int, dict[str, DeliveryModel]]] = []
        """After each soft decision since the last hard one: how many facts there were, and the models."""
        self.lease_count = self._checks = self._versions = 0
        self.delays = DelayModel()
        self._keep(soft=False)

    # ------------------------------------------------------------------------------------------- deciding

    def decide(self, command: Any) -> Decision:
        """Decide, load what is missing, apply; choices of the partition's own go to the models."""
        turn = at(self.now_us, self.shelf, next_entry=self._entries())
        for _ in range(ROUNDS_MAX):
            decision = self.partition.decide(command, turn)
            if decision.missing is None:
                break
            self.shelf.load(decision.missing)
        else:
            raise AssertionError("frames are missing for ever")
        soft = ("Leased", "LeaseExtended", "LeaseExpired", "GivenBack")
        hard = [fact for fact in decision.facts if type(fact).__name__ not in soft]
        assert not (decision.soft and hard), f"said to be soft: {hard}"
        numbers = {state: name for name, state in self._numbers().items()}
        for fact in decision.facts:
            self.partition.apply(fact)
            name = numbers.get(getattr(fact, "group", None))
            if name in self.groups:
                self.groups[name].found(fact, self.now_us)
        self.facts += decision.facts
        # A fact may be a moment later than the clock; nothing is decided before it any more.
        self.now_us = max(self.now_us, self.partition.append_time_us)
        return decision

    def _numbers(self) -> dict[str, int]:
        """The number of each group, as the facts told it."""
        return {fact.name: fact.group for fact in self.facts if type(fact).__name__ == "Enlisted"}

    def after(self, decision: Decision) -> Decision:
        """Everything of a step is done."""
        if decision.facts:
            self._keep(decision.soft)
        self.check()
        return decision

    def _keep(self, soft: bool) -> None:
        if not soft:
            self.earlier.clear()
        self.earlier.append((len(self.facts), {name: model.copy() for name, model in self.groups.items()}))

    def check(self) -> None:
        """What can be asked of the partition is what the models say."""
        self._checks += 1
        if self._checks % 4 == 0:  # it takes longer than all the rest
            self.partition.check()
        self.delays.check(self.partition.timetable)
        queues = self.partition.queues
        dues = []
        for name, model in self.groups.items():
            figures = queues.figures(name)
            assert queues.committed(name) == model.committed(), name
            assert figures["committed"] == model.committed(), name
            assert figures["in_flight"] == len(model.offsets(LEASED)), f"{name}: {figures}"
            assert figures["dying"] == len(model.offsets(DYING)), f"{name}: {figures}"
            assert [item.offset for item in queues.dying(name, 1000)] == model.offsets(DYING), name
            dues.append(model.next_due_us(self.now_us))
        wanted = min((due for due in dues if due is not None), default=None)
        due_us = queues.next_due_us()
        if wanted is not None:
            assert due_us is not None, "somebody waits, and nobody will look"
            assert due_us <= wanted, f"the next look is {due_us - wanted} us late"

    # ------------------------------------------------------------------------------------------- commands

    def publish(self, letters: list[Letter]) -> None:
        base, now_us = len(self.log), self.now_us
        dated = [Letter(item.key, item.priority, item.expires_us, now_us) for item in letters]
        columns = self.shelf.add(dated, base, now_us)
        lanes = self.shelf.frames[-1].priorities
        view = BatchView(len(letters), columns, ROW_BYTES * len(letters), now_us, priorities=lanes)
        decision = self.decide(inner.PublishBatch(Publish("t", 0, columns, 0), view))
        assert getattr(decision.reply, "base_offset", None) == base, decision.reply
        self.log += dated
        for model in self.groups.values():
            model.appended()
        self.after(decision)

    def schedule(self, letters: list[Letter], delays_us: list[int]) -> None:
        """Publish with a time each; what is due already is ordinary."""
        times = [self.now_us + delay_us for delay_us in delays_us]
        ids, halves = self.delays.halves(len(letters))
        view = BatchView(
            len(letters), HAS_DELIVER_AT, ROW_BYTES * len(letters), self.now_us,
            deliver_at_us=np.array(times, np.int64), ids=halves,
        )  # fmt: skip
        late = [row for row, time_us in enumerate(times) if time_us > self.now_us]
        decision = self.decide(inner.PublishBatch(Publish("t", 0, HAS_DELIVER_AT, 0), view))
        assert isinstance(decision.reply, Published), decision.reply
        assert (decision.reply.scheduled or []) == late
        for fact in decision.facts:
            if isinstance(fact, Delayed):
                self.delays.schedule(
                    fact,
                    [letters[row] for row in late],
                    [ids[row] for row in late],
                    [times[row] for row in late],
                )
            else:
                self._grow([letters[row] for row in range(len(letters)) if row not in late])
        self.after(decision)

    def stage(self, letters: list[Letter], delays_us: list[int], pause_us: int) -> None:
        """A writer's version with a time for each message, applied after a pause; what is due is ordinary."""
        times = [self.now_us + delay_us for delay_us in delays_us]
        ids, halves = self.delays.halves(len(letters))
        view = BatchView(
            len(letters), HAS_DELIVER_AT, ROW_BYTES * len(letters), self.now_us,
            deliver_at_us=np.array(times, np.int64), ids=halves,
        )  # fmt: skip
        self._versions += 1
        attempt, entry = f"try-{self._versions}", self._entries()
        staged = self.decide(inner.StageBatch("w", attempt, view, 0))
        assert staged.reply == Done(), staged.reply
        self.after(staged)
        self.pass_time(pause_us, look=True)
        late = [row for row, time_us in enumerate(times) if time_us > self.now_us]
        due = [row for row in range(len(letters)) if row not in late]
        parts = [view.take(np.array(rows, np.int64)) for rows in (late, due) if rows]
        none = [b""] * len(parts)
        command = inner.ApplyStaged("w", self._versions, [attempt], [entry], parts, [0] * len(parts), none)
        decision = self.decide(command)
        assert decision.reply == Done(), decision.reply
        for fact in decision.facts:
            if isinstance(fact, Delayed):
                assert fact.entry == self._entries() - len(parts)
                rows = [(letters[row], ids[row], times[row]) for row in late]
                self.delays.schedule(fact, *(list(column) for column in zip(*rows, strict=True)))
            elif isinstance(fact, Appended):
                self._grow([letters[row] for row in due])
        self.after(decision)
        assert not self.decide(command).facts, "applied twice"

    def _entries(self) -> int:
        """How many frames with a body there are."""
        return sum(isinstance(fact, Appended | Delayed | Staged) for fact in self.facts)

    def _grow(self, letters: list[Letter]) -> None:
        """Messages were appended that are not on the shelf yet."""
        dated = [Letter(item.key, 2, 0, self.now_us) for item in letters]
        self.shelf.add(dated, len(self.log), self.now_us)
        self.log += dated
        for model in self.groups.values():
            model.appended()

    def release(self, limit: int, *, cancel_between: bool = False) -> None:
        """What the shell does when something is due."""
        timetable = self.partition.timetable
        rows, until_us, until_ref = self.delays.due(timetable, self.now_us, limit)
        if not rows:
            return
        if cancel_between:
            self.cancel([rows[0].id], [0])
        view = BatchView(len(rows), HAS_KEY * any(row.letter.key for row in rows), 100, self.now_us)
        refs = np.array([row.ref for row in rows], np.int64)
        decision = self.decide(inner.ReleaseDue(view, 0, until_us, until_ref, refs))
        if cancel_between:
            assert not decision.facts, "a cancelled message was released"
        else:
            assert isinstance(decision.reply, Published), decision.reply
            assert decision.reply.base_offset == len(self.log)
            for row in rows:
                row.state = RELEASED
            self._grow([row.letter for row in rows])
        self.after(decision)

    def cancel(self, ids: list[bytes], times: list[int]) -> None:
        command = wire.CancelScheduled("t", 0, ids, times)
        decision = self.decide(command)
        self.delays.cancel(command, decision.reply, self.now_us)
        self.after(decision)

    def enlist(self, name: str, policy: GroupPolicy) -> None:
        decision = self.decide(inner.Enlist(name, policy))
        start = len(self.log) if policy.start == "latest" else self.partition.start_offset
        self.groups[name] = DeliveryModel(policy, self.log, start)
        self.groups[name].trimmed = self.partition.start_offset
        self.after(decision)

    def delist(self, name: str) -> None:
        decision = self.decide(inner.Delist(name))
        del self.groups[name]
        self.after(decision)
        refused = self.partition.decide(self.run_for(name, "m", 0), at(self.now_us, self.shelf)).reply
        assert isinstance(refused, Refusal), "a group that is gone leases"
        assert refused.code == "not_found"

    def run_for(
        self, group: str, member: str, generation: int, count: int = 100, size: int = 1 << 20,
        lease_ms: int | None = None,
    ) -> inner.LeaseRun:  # fmt: skip
        self.lease_count += 1
        number = self.lease_count * 1_000_003
        return inner.LeaseRun(group, member, generation, number, count, size, len(self.log), lease_ms)

    def lease(
        self, group: str, member: str, count: int = 100, size: int = 1 << 20, *, stale: int = 0,
        lease_ms: int | None = None, alone: bool = False,
    ) -> int | None:  # fmt: skip
        """Lease for a member, asked again while the answer was that something else happened."""
        model = self.groups[group]
        command = self.run_for(group, member, model.holder[1] - stale, count, size, lease_ms)
        command = msgspec.structs.replace(command, alone=alone)
        for _ in range(ROUNDS_MAX):
            decision = self.decide(command)
            certain = not decision.facts
            model.lease(command, decision.reply, self._here, self.now_us, certain)
            self.after(decision)
            if isinstance(decision.reply, inner.RunLeased):
                return command.lease
            if certain:
                return None
        raise AssertionError("something happens for ever, and nothing is leased")

    def _here(self, offset: int) -> bool:
        return self.shelf.columns(offset) is not None

    def ack(self, group: str, lease: int, spans: list[int]) -> None:
        command = wire.Ack("t", 0, group, [(lease, spans)])
        decision = self.decide(command)
        self.groups[group].ack(command, decision.reply, self.now_us)
        self.after(decision)

    def nack(
        self, group: str, lease: int, spans: list[int], delay_ms: int | None = None, *, failure: bool = True,
        started: tuple[int, list[int]] | None = None,
    ) -> None:  # fmt: skip
        behind = [] if started is None else [started]
        command = wire.Nack("t", 0, group, lease, spans, delay_ms, "no", failure, behind)
        decision = self.decide(command)
        self.groups[group].nack(command, decision.reply, self.now_us)
        self.after(decision)

    def give_back(self, group: str, lease: int, spans: list[int]) -> None:
        command = wire.GiveBack("t", 0, group, [(lease, spans)])
        decision = self.decide(command)
        self.groups[group].give_back(command, decision.reply, self.now_us)
        self.after(decision)

    def reject(self, group: str, lease: int, spans: list[int]) -> None:
        command = wire.RejectMessages("t", 0, group, lease, spans)
        decision = self.decide(command)
        self.groups[group].reject(command, decision.reply, self.now_us)
        self.after(decision)

    def extend(self, group: str, lease: int, lease_ms: int) -> None:
        command = wire.Extend("t", 0, group, [lease], lease_ms)
        decision = self.decide(command)
        self.groups[group].extend(command, decision.reply, self.now_us)
        self.after(decision)

    def pass_time(self, us: int, *, look: bool) -> None:
        """Time passes; with `look` the shell's timer is in time."""
        self.now_us += us
        if look:
            decision = self.decide(inner.ExpireLeases())
            for model in self.groups.values():
                model.looked(self.now_us)
            self.after(decision)

    def grant(self, group: str, member: str) -> None:
        model = self.groups[group]
        generation = model.holder[1] + (member != model.holder[0])
        decision = self.decide(inner.GrantTo(group, member, generation))
        assert isinstance(decision.reply, Done), decision.reply
        model.grant(member, generation, self.now_us)
        self.after(decision)

    def evict(self, group: str, member: str) -> None:
        decision = self.decide(inner.EvictMember(group, member))
        self.groups[group].evict(member, self.now_us)
        self.after(decision)

    def pause(self, group: str, paused: bool) -> None:
        decision = self.decide(inner.PauseLeases(group, paused))
        self.groups[group].paused = paused
        self.after(decision)

    def reset(self, group: str, offset: int) -> None:
        decision = self.decide(inner.ResetTo(group, offset))
        self.groups[group].reset(offset)
        self.after(decision)

    def reopen(self, group: str, spans: list[int]) -> None:
        command = wire.Reopen("t", 0, group, spans)
        decision = self.decide(command)
        self.groups[group].reopen(command, decision.reply, self.now_us)
        self.after(decision)

    def settle_offsets(self, group: str, spans: list[int]) -> None:
        decision = self.decide(wire.SettleOffsets("t", 0, group, spans))
        self.groups[group].settle_offsets(spans)
        self.after(decision)

    def bury(self, group: str, spans: list[int]) -> None:
        places = [0] * (sum(spans[1::2]) - sum(spans[::2])) * 2
        decision = self.decide(inner.BuryDone(group, spans, "t.dlq", places))
        self.groups[group].bury(spans)
        self.after(decision)

    def trim(self, offset: int) -> None:
        decision = self.decide(TrimTopic("t", 0, offset))
        for model in self.groups.values():
            model.trim(offset)
        self.after(decision)

    # ------------------------------------------------------------------------------------------- restarts

    def restart(self) -> None:
        """From a snapshot; replaying every fact gives the same, byte for byte."""
        before = _bytes(self.partition)
        replayed = Partition(self.options)
        for fact in self.facts:
            replayed.apply(fact)
        assert _bytes(replayed) == before, "a replay of the facts gives another state"
        self.partition = self.kind.restore(self.options, [before])
        assert _bytes(self.partition) == before, "a snapshot gives another state"
        self.check()

    def crash(self, choice: int) -> None:
        """The newest soft facts are lost, as many as the choice says."""
        count, models = self.earlier[choice % len(self.earlier)]
        del self.facts[count:]
        del self.earlier[choice % len(self.earlier) + 1 :]
        self.groups = {name: model.copy() for name, model in models.items()}
        for model in self.groups.values():
            model.appended()
        self.partition = self.kind(self.options)
        for fact in self.facts:
            self.partition.apply(fact)
        self.check()

    def drain(self, group: str, member: str) -> None:
        """Everything that is not settled gets settled, if only time passes: nothing was lost."""
        model = self.groups[group]
        self.pause(group, False)
        if model.policy.assignment != "shared":
            self.grant(group, member)
        for _ in range(ROUNDS_MAX):
            for offset in model.offsets(DYING):
                self.bury(group, [offset, offset + 1])
            if not model.unsettled():
                return
            self.pass_time(3_600_000_000 + 1, look=True)
            if (lease := self.lease(group, member)) is not None:
                spans = [bound for offset in sorted(model.of_lease(lease)) for bound in (offset, offset + 1)]
                self.ack(group, lease, spans)
        raise AssertionError(f"{model.offsets(FREE, LEASED, DYING)} are never delivered")


def _bytes(partition: Partition) -> bytes:
    return b"".join(bytes(chunk) for chunk in partition.snapshot())
