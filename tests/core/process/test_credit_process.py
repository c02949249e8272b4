"""Credit as a process: a play, a seeded model with planted bugs, and the work of an ack, counted."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest

from tailrace.core.process.credit_process import CreditProcess, GroupCredit
from tailrace.core.queue.in_flight import InFlight
from tests.core.process.process_model import Broken, require
from tests.core.process.process_plays import FOLDER

SEEDS = range(200)


# --------------------------------------------------------------------------------------------------- play


class CreditPlay:
    """One group, `g`. Its partitions have names, and so have its requests: `ann1` is one of ann's."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.credit = CreditProcess[str](lambda: self.out.append("a turn is wanted"))
        self.parts: dict[str, InFlight] = {}

    def line(self, line: str) -> None:
        match line.split():
            case [part, "begins"]:
                self.credit.count_in("g", self.parts.setdefault(part, InFlight()))
            case [part, "ends"]:
                self.credit.count_out("g", self.parts[part])
            case [part, "of", member, change]:
                self.parts.setdefault(part, InFlight()).add(member, int(change))
            case [member, "of", member_max, "and", group_max]:
                left = self.credit.left("g", member, int(member_max), int(group_max))
                self.out.append(f"{left} more")
            case [waiter, "waits", "of", member_max, "and", group_max]:
                self.credit.wait("g", waiter[:-1], waiter, int(member_max), int(group_max))
            case [waiter, "waits", "for", "less"]:
                self.credit.wait_for_less("g", waiter[:-1], waiter)
            case [waiter, "leaves"]:
                self.credit.leave("g", waiter[:-1], waiter)
            case [_, "passes", "on"]:
                self.credit.pass_on("g")
            case ["limits", "changed"]:
                self.credit.changed("g")
            case ["turn"]:
                self.out.append(f"wake {' '.join(self.credit.wakes()) or 'nobody'}")
            case _:
                raise ValueError(line)

    def run(self, text: str) -> str:
        lines = []
        for line in text.splitlines():
            if line.startswith(" "):
                continue
            lines.append(line)
            if line and not line.startswith("#"):
                self.out.clear()
                self.line(line)
                lines += [f"    {told}" for told in self.out]
        return "\n".join(lines) + "\n"


def test_play() -> None:
    path = FOLDER / "credit.txt"
    text = path.read_text(encoding="utf-8")
    played = CreditPlay().run(text)
    if os.environ.get("REWRITE_SCENARIOS") == "1":
        path.write_text(played, encoding="utf-8")
    else:
        assert played == text


# -------------------------------------------------------------------------------------------------- model


class CreditModel:
    """Members of one group on three partitions. What is in flight, who waits and whom to wake is said a
    second time, the simplest way. Requests that are woken act some steps later: they lease, wait again or
    pass on."""

    MEMBERS = "abcd"
    PARTS = range(3)

    def __init__(self, seed: int, make: Callable[[Callable[[], None]], CreditProcess[int]]) -> None:
        self.random = Random(seed)
        self.limits = (3, 5)
        self.wanted = False
        self.credit = make(self._want)
        self.parts = [InFlight() for _ in self.PARTS]
        self.here: set[int] = set()
        """The partitions that are counted in."""
        self.requests: dict[int, str] = {}
        """All requests that are not over, and their members."""
        self.own: dict[int, None] = {}
        """Those that wait for their member's credit, in order of arrival."""
        self.line: dict[int, int] = {}
        """Those that wait for the group's credit, in order of arrival, and the limit of each."""
        self.woken: list[int] = []
        """Those that were woken and have not acted yet."""
        self.freed: set[str] = set()
        """Members that had less in flight since the last turn, while a request of theirs waited."""
        self.changed = False
        """Whether the limits were changed since the last turn, while some request waited."""

    def _want(self) -> None:
        require(not self.wanted, "a turn is wanted twice")
        self.wanted = True

    def sums(self) -> Counter[str]:
        """What is in flight, counted anew."""
        found: Counter[str] = Counter()
        for part in self.here:
            found.update(self.parts[part])
        return found

    def to_wake(self) -> tuple[set[int], list[int]]:
        """Who is to be woken: for their member's credit, and from the line in order of arrival."""
        if self.changed:
            return set(self.own), list(self.line)
        free, line = self.sums().total(), []
        for request, group_max in self.line.items():
            if free >= group_max:
                break
            line.append(request)
            free += 1
        return {request for request in self.own if self.requests[request] in self.freed}, line

    def check(self) -> None:
        found, sums = self.credit.find("g"), self.sums()
        if found is None:
            require(not (self.here or self.own or self.line), "the group is forgotten")
            self.freed, self.changed = set(), False
        else:
            require(found.by_member == dict(sums), f"{found.by_member} instead of {dict(sums)}")
            require(found.total == sums.total(), f"{found.total} instead of {sums.total()}")
        if not self.wanted:
            own, line = self.to_wake()
            require(not own and (not line or bool(self.woken)), f"{own} and {line} wait for ever")

    # -- what happens

    def run(self) -> None:
        self._begin_or_end()
        often = [self._ask, self._settle, self._settle, self._act, self._turn]
        seldom = [self._leave, self._begin_or_end, self._evict, self._change]
        for _ in range(150):
            self.random.choice(often if self.random.random() < 0.85 else seldom)()
            self.check()
        for request in list(self.requests):
            self._over(request)
        for part in list(self.here):
            self._end(part)
        self._turn()
        require(self.credit.find("g") is None, "something is left of the group")

    def _ask(self) -> None:
        request = max(self.requests, default=0) + 1
        self.requests[request] = self.random.choice(self.MEMBERS)
        self._try(request)

    def _try(self, request: int) -> None:
        """A request leases if it has credit; then it is over. Otherwise it waits."""
        member, sums, (member_max, group_max) = self.requests[request], self.sums(), self.limits
        left = self.credit.left("g", member, member_max, group_max)
        require(left == min(member_max - sums[member], group_max - sums.total()), f"a credit of {left}")
        if left > 0:
            if self.here and self.random.random() < 0.9:
                part = self.parts[self.random.choice(sorted(self.here))]
                part.add(member, self.random.randint(1, left))
            self._over(request)
            return
        if sums[member] >= member_max:
            self.own[request] = None
        else:
            self.line[request] = group_max
        self.credit.wait("g", member, request, member_max, group_max)

    def _act(self) -> None:
        """A woken request tries to lease, waits for less, or is over."""
        if self.woken:
            request = self.woken.pop(self.random.randrange(len(self.woken)))
            member, chance = self.requests[request], self.random.random()
            if chance < 0.7:
                self._try(request)
            elif chance < 0.85 and self.sums()[member]:
                self.own[request] = None
                self.credit.wait_for_less("g", member, request)
                self.credit.pass_on("g")
            else:
                self._over(request)

    def _over(self, request: int) -> None:
        self.own.pop(request, None)
        self.line.pop(request, None)
        if request in self.woken:
            self.woken.remove(request)
        self.credit.leave("g", self.requests.pop(request), request)
        self.credit.pass_on("g")

    def _leave(self) -> None:
        if self.requests:
            self._over(self.random.choice(list(self.requests)))

    def _less(self, part: int, member: str, many: int) -> None:
        if part in self.here:
            self._fewer(member)
        self.parts[part].add(member, -many)

    def _fewer(self, member: str) -> None:
        if any(self.requests[request] == member for request in self.own):
            self.freed.add(member)

    def _settle(self) -> None:
        held = [(part, member) for part in self.PARTS for member in self.parts[part]]
        if held:
            part, member = self.random.choice(held)
            self._less(part, member, self.random.randint(1, self.parts[part][member]))

    def _evict(self) -> None:
        """A member is gone: its messages are available again on all partitions."""
        member = self.random.choice(self.MEMBERS)
        for part in self.PARTS:
            if member in self.parts[part]:
                self._less(part, member, self.parts[part][member])
        for request in [request for request, of in self.requests.items() if of == member]:
            self._over(request)

    def _begin_or_end(self) -> None:
        part = self.random.choice(self.PARTS)
        if part in self.here:
            self._end(part)
        else:
            self.here.add(part)
            self.credit.count_in("g", self.parts[part])

    def _end(self, part: int) -> None:
        for member in self.parts[part]:
            self._fewer(member)
        self.here.remove(part)
        self.credit.count_out("g", self.parts[part])
        if self.random.random() < 0.5:
            self.parts[part] = InFlight()

    def _change(self) -> None:
        self.limits = self.random.randint(1, 4), self.random.randint(1, 8)
        self.changed = self.changed or bool(self.own or self.line)
        self.credit.changed("g")

    def _turn(self) -> None:
        if not self.wanted:
            return
        self.wanted = False
        own, line = self.to_wake()
        woken = self.credit.wakes()
        require(set(woken[: len(own)]) == own, f"{woken} instead of {own} first")
        require(woken[len(own) :] == line, f"{woken} instead of {line} in the end")
        for request in woken:
            self.own.pop(request, None)
            self.line.pop(request, None)
        self.woken += woken
        self.freed, self.changed = set(), False


def caught(make: Callable[[Callable[[], None]], CreditProcess[int]]) -> str:
    """The first thing that does not hold."""
    for seed in SEEDS:
        try:
            CreditModel(seed, make).run()
        except (Broken, AssertionError) as broken:
            return str(broken)
    return ""


def test_every_seed_holds() -> None:
    assert caught(CreditProcess) == ""


class Planted(CreditProcess[int]):
    """The process with another kind of group."""

    KIND: type[GroupCredit[int]]

    def _group(self, name: str) -> GroupCredit[int]:
        return self._groups.get(name) or self._groups.setdefault(name, self.KIND(name, self._touch))


class MoreWokenThanFreed(GroupCredit[int]):
    def take(self, woken: list[int]) -> None:
        first = next(iter(self._line.values()), 0)
        self._all = self._all or self.total < first
        super().take(woken)


class MembersForgotten(GroupCredit[int]):
    def add(self, member: str, many: int) -> None:
        own, self._own = self._own, {}
        super().add(member, many)
        self._own = own


class LastOfTheLineForgotten(GroupCredit[int]):
    def take(self, woken: list[int]) -> None:
        super().take(woken)
        if len(self._line) > 1:
            self._line.popitem()


class NothingPassedOn(GroupCredit[int]):
    def pass_on(self) -> None:
        if self._freed:
            super().pass_on()


class LastComesFirst(GroupCredit[int]):
    def wait(self, member: str, waiter: int, member_max: int, group_max: int) -> None:
        super().wait(member, waiter, member_max, group_max)
        if waiter in self._line:
            self._line.move_to_end(waiter, last=False)


class StillInLine(GroupCredit[int]):
    def leave(self, member: str, waiter: int) -> None:
        waits = dict(self._line)
        super().leave(member, waiter)
        self._line.update(waits)


class MembersStayCounted(GroupCredit[int]):
    def add(self, member: str, many: int) -> None:
        if many > 0 or self.partitions > 1:
            super().add(member, many)


class LimitsUnheard(GroupCredit[int]):
    def change(self) -> None:
        self.pass_on()


@pytest.mark.parametrize(
    "kind",
    [
        MoreWokenThanFreed,
        MembersForgotten,
        LastOfTheLineForgotten,
        NothingPassedOn,
        LastComesFirst,
        StillInLine,
        MembersStayCounted,
        LimitsUnheard,
    ],
)
def test_planted_bug_is_caught(kind: type[GroupCredit[int]]) -> None:
    assert caught(type("", (Planted,), {"KIND": kind})) != ""


# --------------------------------------------------------------------------------------------------- work


def operations(work: Callable[[], None]) -> int:
    """The number of Python's instructions that some work takes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def acks(kind: type[GroupCredit[int]], crowd: int) -> int:
    """The work of 50 acks of one member, in one turn, while a crowd of members holds messages and waits."""
    credit = type("", (Planted,), {"KIND": kind})(lambda: None)
    part = InFlight()
    credit.count_in("g", part)
    part.add("busy", 100)
    for number in range(crowd):
        part.add(f"m{number}", 1)
        credit.wait("g", f"m{number}", number, 1 if number % 2 else 2, 10)
    credit.wakes()

    def work() -> None:
        for _ in range(50):
            part.add("busy", -1)
        assert credit.wakes() == []

    return operations(work)


def handing_on(kind: type[GroupCredit[int]], crowd: int) -> int:
    """The work until a whole crowd has had a turn each, with credit for one at a time."""
    credit = type("", (Planted,), {"KIND": kind})(lambda: None)
    for number in range(crowd):
        credit.wait("g", f"m{number}", number, 1, 1)

    def work() -> None:
        for number in range(crowd):
            assert credit.wakes() == [number]
            credit.leave("g", f"m{number}", number)
            credit.pass_on("g")

    return operations(work)


class Recounting(GroupCredit[int]):
    def add(self, member: str, many: int) -> None:
        super().add(member, many)
        self.total = 0
        for number in self.by_member.values():
            self.total += number


class LineWalked(GroupCredit[int]):
    def take(self, woken: list[int]) -> None:
        for waiter in self._line:
            assert waiter not in self._own
        super().take(woken)


def test_an_ack_costs_the_same_whatever_the_crowd() -> None:
    assert acks(GroupCredit, 20) == acks(GroupCredit, 500)
    assert acks(Recounting, 20) < acks(Recounting, 500)


def test_each_wake_up_costs_the_same_whatever_the_crowd() -> None:
    assert handing_on(GroupCredit, 200) == pytest.approx(10 * handing_on(GroupCredit, 20), rel=0.02)
    assert handing_on(LineWalked, 200) > 15 * handing_on(LineWalked, 20)
