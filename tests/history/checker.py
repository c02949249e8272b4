"""The checker: finds in a history what a broker must never do.

No search is needed: values are unique and offsets are told.

I1  no acknowledged message is lost (prefix, middle and postfix are counted apart)
I2  no message that nobody sent, and none that was changed
I3  a send that failed for certain is never seen
I4  an offset means one message, for every reader and for the acknowledgement, at any time
I5  each reader goes up by one offset at a time, from the start of the partition or from where it began
I6  one producer's messages are in the order sent within a partition, and none is there twice
I7  of two sends, the one acknowledged before the other was called has the lower offset
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from tests.history.record import History, Read, Sent, Value

Place = tuple[str, int]


class Violation(msgspec.Struct, frozen=True):
    """One broken invariant."""

    invariant: str
    text: str


class Report(msgspec.Struct, frozen=True):
    """What the checker found and how much it looked at."""

    violations: list[Violation]
    acknowledged: int
    unknown: int
    recovered: int
    """Sends with an unknown outcome that are there."""
    seen: int
    lost: Counter[str]

    def expect_clean(self) -> Report:
        """Raise when anything is wrong."""
        kinds = Counter(violation.invariant for violation in self.violations)
        first = "\n".join(f"  {item.invariant}: {item.text}" for item in self.violations[:20])
        assert not self.violations, f"{dict(kinds)}, lost: {dict(self.lost)}\n{first}"
        return self


def check(history: History) -> Report:
    """Everything that is wrong with a history."""
    return _Checker(history).report()


class _Checker:
    def __init__(self, history: History) -> None:
        self.sends = history.sends
        self.reads = history.reads
        self.by_value = {send.value: send for send in self.sends}
        assert len(self.by_value) == len(self.sends), "a history has unique values"
        self.drained = {(row.topic, row.partition): row for row in history.drains}
        self.content: dict[Place, dict[int, Value | None]] = defaultdict(dict)
        for read in self.reads:
            self.content[read.topic, read.partition].setdefault(read.offset, read.value)
        self.places: dict[Value, set[tuple[str, int, int]]] = defaultdict(set)
        for read in self.reads:
            if read.value is not None:
                self.places[read.value].add((read.topic, read.partition, read.offset))

    def report(self) -> Report:
        lost: Counter[str] = Counter()
        found = [
            *self._lost(lost),
            *self._strange(),
            *self._failed(),
            *self._function(),
            *self._steps(),
            *self._producers(),
            *self._real_time(),
        ]
        unknown = [send for send in self.sends if send.outcome == "unknown"]
        return Report(
            found,
            sum(send.outcome == "ok" for send in self.sends),
            len(unknown),
            sum(send.value in self.places for send in unknown),
            len(self.places),
            lost,
        )

    def _lost(self, lost: Counter[str]) -> Iterator[Violation]:
        """All that was acknowledged, or, where nobody drained, what lies below the highest offset read."""
        for send in self.sends:
            if send.outcome != "ok":
                continue
            assert send.partition is not None, "an acknowledgement has a place"
            assert send.offset is not None, "an acknowledgement has a place"
            place = (send.topic, send.partition)
            content, drain = self.content.get(place, {}), self.drained.get(place)
            if drain is not None and send.offset < drain.start:
                continue  # It was trimmed.
            if send.offset in content or (drain is None and send.offset > max(content, default=-1)):
                continue  # What is there instead, if anything, is a matter of I4.
            part = "middle"
            if not content or send.offset < min(content):
                part = "prefix"
            elif send.offset > max(content):
                part = "postfix"
            lost[part] += 1
            yield Violation("I1", f"{part}: {_name(send)} was acknowledged at {place}@{send.offset}")

    def _strange(self) -> Iterator[Violation]:
        for read in self.reads:
            where = f"{read.topic}/{read.partition}@{read.offset}, read by {read.reader}"
            if read.value is None:
                yield Violation("I2", f"{where}: the payload is damaged")
            elif read.value not in self.by_value:
                yield Violation("I2", f"{where}: nobody sent {read.value}")
            elif self.by_value[read.value].topic != read.topic:
                yield Violation("I2", f"{where}: {read.value} was sent to {self.by_value[read.value].topic}")

    def _failed(self) -> Iterator[Violation]:
        for send in self.sends:
            if send.outcome == "fail" and send.value in self.places:
                yield Violation(
                    "I3", f"{_name(send)} failed, and stands at {sorted(self.places[send.value])}"
                )

    def _function(self) -> Iterator[Violation]:
        told: dict[tuple[str, int, int], tuple[Value | None, str]] = {}
        for send in self.sends:
            if send.outcome != "ok" or send.partition is None or send.offset is None:
                continue
            where = (send.topic, send.partition, send.offset)
            other = told.setdefault(where, (send.value, "its sender"))
            if other[0] != send.value:
                yield Violation("I4", f"{where}: acknowledged as {other[0]} and as {send.value}")
        for read in self.reads:
            where = (read.topic, read.partition, read.offset)
            other = told.setdefault(where, (read.value, read.reader))
            if other[0] != read.value:
                yield Violation("I4", f"{where}: {other[0]} for {other[1]}, {read.value} for {read.reader}")

    def _steps(self) -> Iterator[Violation]:
        last: dict[tuple[str, Place], int] = {}
        for read in self.reads:
            key = (read.reader, (read.topic, read.partition))
            before = last.get(key)
            if before is not None and read.offset != before + 1:
                what = "went back" if read.offset <= before else "skipped"
                yield Violation("I5", f"{key}: {what} from {before} to {read.offset}")
            last[key] = read.offset
        for place, drain in self.drained.items():
            content = self.content.get(place, {})
            missing = [offset for offset in range(drain.start, drain.end) if offset not in content]
            if missing:
                yield Violation(
                    "I5", f"{place}: {len(missing)} offsets are empty, first {missing[0]} of {drain.end}"
                )

    def _producers(self) -> Iterator[Violation]:
        for value, places in self.places.items():
            if len(places) > 1:
                yield Violation("I6", f"{value} is there {len(places)} times: {sorted(places)[:4]}")
        for place, content in self.content.items():
            last: dict[str, Value] = {}
            for _, value in sorted(content.items()):
                if value is None:
                    continue
                before = last.get(value.process)
                if before is not None and value.counter < before.counter:
                    yield Violation("I6", f"{place}: {value} stands behind {before}")
                last[value.process] = value

    def _real_time(self) -> Iterator[Violation]:
        by_place: dict[Place, list[Sent]] = defaultdict(list)
        for send in self.sends:
            if send.outcome == "ok" and send.partition is not None and send.return_ns:
                by_place[send.topic, send.partition].append(send)
        for place, sends in by_place.items():
            latest: Sent | None = None
            for send in sorted(sends, key=lambda item: item.offset or 0):
                if latest is not None and latest.call_ns > send.return_ns:
                    text = f"{place}: {_name(send)} was acknowledged before {_name(latest)} was called"
                    yield Violation("I7", f"{text}, and stands behind it")
                if latest is None or send.call_ns > latest.call_ns:
                    latest = send


def _name(send: Sent) -> str:
    return f"{send.value.process}-{send.value.counter}"


def delivered(reads: list[Read]) -> dict[Place, list[int]]:
    """The offsets that were read, by partition, in the order read."""
    found: dict[Place, list[int]] = defaultdict(list)
    for read in reads:
        found[read.topic, read.partition].append(read.offset)
    return found
