"""Long polls of a consumer of a queue: when to ask for messages, and for how many.

One `Lease` for each topic is under way while the prefetch window has room (see `client.queue.pace`).
While enough is in hand, a poll for more urgent messages takes its place. A newer poll replaces an older one
at the broker; the older one is still answered, but not repeated. So it is when the partitions that may be
asked change, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.delivery import LeasedMessage
from tailrace.client.queue.hand import Hand, rank_of
from tailrace.client.queue.held_leases import FirstOfKeys
from tailrace.client.queue.pace import Pace
from tailrace.client.rpc.calls import error_of, told_wait_s
from tailrace.client.rpc.retries import Retries
from tailrace.client.rpc.waiters import Waiters
from tailrace.client.sdk_tuning import HELD_MAX, MODEST_MS, PAUSE_S_MAX, PAUSE_S_MIN, SOON_MS, WAIT_MS
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_commands import JoinGroup, Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Lease, Leases
from tailrace.core.selection.lanes import LANES
from tailrace.errors import Fenced, NotFound, TailraceError
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

_REFILL = 3
"""More is asked for when so many quarters of what may be in hand are gone: the last one is for the way."""
_WASTE_SHARE = 0.02
_WASTE_SPARE = 4
_WASTE_WINDOW = 2_000
_FIRST_MAX = _FIRST_WINDOW = 128
"""So many are in hand at most in the beginning, and twice as many each time when so many more were started
without waste: a failure in front of a thousand messages of some keys sends dozens back, the next one, too."""


class Taker(Protocol):
    """Who takes what comes."""

    def is_open(self) -> bool:
        """Whether messages are wanted at all."""
        ...

    def is_waiting(self) -> bool:
        """Whether somebody waits for a message."""
        ...

    def out_of_hand(self) -> int:
        """How many messages are being handed out that would not be started soon."""
        ...

    def started(self) -> int:
        """How many messages were handed out so far."""
        ...

    def parked(self) -> list[tuple[LeasedMessage, bool]]:
        """The first of each key of those that were handed out and not started, and whether it may start."""
        ...

    def policy(self) -> GroupPolicy:
        """The options of the group."""
        ...

    def held(self, topic: str) -> list[int]:
        """The leases of a topic."""
        ...

    def arrived(self, answer: Answer) -> None:
        """Leases were granted."""
        ...

    def go_on(self) -> None:
        """What `may_bring_before` spoke of has come, or does not come."""
        ...

    def fenced(self) -> None:
        """The broker does not know this member any more, or not with these partitions."""
        ...

    def failed(self, error: BaseException) -> None:
        """Something went wrong that the application has to know."""
        ...


class Answer(NamedTuple):
    """Leases that were granted, at that time or later and for so long, for the generations that were asked
    for; `urgent`: as more urgent ones than what was in hand."""

    topic: str
    generations: dict[int, int]
    reply: Leases
    parts: Sequence[Buffer]
    granted_ms: float
    lease_ms: int
    urgent: bool
    asked: int
    """The number of the poll."""


class _Poll(NamedTuple):
    """A poll, and what it may bring messages of; `above` 0: of any lane; `at_once`: it does not wait for a
    message, so it tells soon if there is one."""

    number: int
    above: int
    at_once: bool
    places: set[Place]


class LeasePolls:
    """The polls of one consumer. `ready` has the generation of every partition that may be asked."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        request: JoinGroup,
        options: ConsumerOptions,
        taker: Taker,
        hand: Hand,
        pace: Pace,
    ) -> None:
        self._verbs = verbs
        self._request = request
        self._options = options
        self._taker = taker
        self._hand = hand
        self._pace = pace
        self._now_ms: Callable[[], float] = verbs.clock.elapsed_ms
        self._loop = asyncio.get_running_loop()
        self.ready: dict[str, dict[int, int]] = {}
        self.paused: set[Place] = set()
        self._count = 0
        self._unanswered: dict[int, _Poll] = {}
        self._brief = 0
        """How many of them do not wait for a message."""
        self._waiters = Waiters()
        self._going_back: dict[Place, list[tuple[int, FirstOfKeys]]] = {}
        """What went back, and the last poll that was sent before: what that or an earlier one brings may have
        been granted before, and be stale."""
        self._under_way: dict[str, _Poll] = {}
        self._doubtful: set[str] = set()
        """Topics of which an answer was lost: it may have granted leases that nobody here knows. The next
        poll says what is held, and until it is answered no other goes out."""
        self._clearing: set[str] = set()
        self._making_way: Counter[str] = Counter()
        """By topic: how many times messages of it are on their way to others."""
        self._retries = Retries(self.ask)
        self._modest_ms = 0.0
        self._modest_count = 0
        self._cap_max = options.prefetch or options.batch_size
        self._cap, self._window = min(_FIRST_MAX, self._cap_max), _FIRST_WINDOW
        """So many are in hand at most: fewer when many of them go back behind failures, and twice as many
        when the window has passed without."""
        self._wasted = 0
        self._since = 0
        self._seen: int | None = None
        """How many messages were handed out when it was last said that what is in hand is started soon."""
        self._none_below: dict[str, int] = {}
        """By topic: of lanes below this one, fewer messages came than were asked for, and a poll has waited
        since. When there are some again, it brings them. Without a poll nothing is known of what comes."""

    def wasted(self, count: int) -> None:
        """Messages went back unstarted, because one of their key failed: that may happen to a small share of
        what is started, so less is leased ahead."""
        self._wasted += count
        started = self._taker.started()
        if self._wasted > _WASTE_SPARE + _WASTE_SHARE * (started - self._since):
            self._cap = max(1, min(self._cap, self._hand.count + count) // 4)
            self._wasted, self._since, self._window = 0, started, _WASTE_WINDOW

    def renew(self) -> None:
        """What is asked for has changed: polls under way are still answered, but not repeated."""
        self._under_way.clear()
        self._retries.at_once()
        self.ask()

    def pause(self, places: set[Place]) -> None:
        """Ask for nothing of these partitions."""
        self.paused |= places
        self.renew()

    def resume(self, places: set[Place]) -> None:
        """Ask for messages of these again, or of all."""
        self.paused -= places or set(self.paused)
        self.renew()

    def close(self) -> None:
        """Ask for nothing more."""
        self._retries.at_once()

    def be_modest(self, count: int) -> None:
        """Others are hungry: lease no more ahead than `count` for a while."""
        self._modest_ms, self._modest_count = self._now_ms() + MODEST_MS, count

    def withdraw(self, topics: set[str] | None = None) -> None:
        """A poll that waits must not get what is about to be given back."""
        asked = (topic for poll in self._unanswered.values() for topic, _ in poll.places)
        for topic in dict.fromkeys([*self._under_way, *asked]):
            if topics is None or topic in topics:
                self._under_way.pop(topic, None)
                wanted = list(self.ready.get(topic, {}).items())
                if wanted and topic not in self._clearing:
                    self._submit(topic, wanted, 0)

    def make_way(self, topics: set[str]) -> Callable[[], None]:
        """What is about to be given back is for others: withdraw the polls, and ask again when they have
        arrived. A poll that the broker takes in the same turn would get it before those who wait."""
        self.withdraw(topics)
        self._making_way.update(topics)
        return partial(self._way_made, topics)

    def _way_made(self, topics: set[str]) -> None:
        self._making_way.subtract(topics)
        self.ask()

    def going_back(self, place: Place, first: FirstOfKeys) -> None:
        """A request leaves that gives messages back."""
        if any(place in poll.places for poll in self._unanswered.values()):
            self._going_back.setdefault(place, []).append((self._count, first))

    def went_back_since(self, place: Place, asked: int) -> list[FirstOfKeys]:
        """What went back since a poll was sent."""
        return [first for last, first in self._going_back.get(place, ()) if last >= asked]

    async def answered(self, places: set[Place], seconds: float) -> None:
        """Wait until nothing of these partitions can come any more, so long at most."""
        until_s = self._loop.time() + seconds
        while any(places & poll.places for poll in self._unanswered.values()) and self._loop.time() < until_s:
            await asyncio.wait([self._waiters.join()], timeout=until_s - self._loop.time())

    def _answered(self, number: int) -> None:
        self._brief -= self._unanswered.pop(number).at_once
        self._waiters.wake()
        for place, entries in list(self._going_back.items()):
            polls = (number for number, poll in self._unanswered.items() if place in poll.places)
            oldest = next(polls, self._count + 1)
            left = [entry for entry in entries if entry[0] >= oldest]
            if left:
                self._going_back[place] = left
            else:
                del self._going_back[place]

    # -- asking

    def ask(self, stuck: bool = False) -> None:
        """Lease ahead: one poll for each topic while there is room, or for more urgent messages. `stuck`:
        what is in hand is not started as soon as it seemed."""
        if not self._taker.is_open():
            return
        room = self._room()
        above, many = (0, room) if room > 0 else self._above(stuck)
        many = min(many, self._options.batch_size)
        if room < 0 and self._under_way:
            self._take_back(above)
        if room <= 0 and not above:
            return
        for topic, partitions in self.ready.items():
            waits = self._under_way.get(topic)
            if waits is not None and not 0 < waits.above < (above or LANES):
                continue
            if topic in self._clearing or self._retries.waits(topic) or (above and topic in self._doubtful):
                continue
            if self._making_way[topic] > 0:
                continue
            wanted = [(p, g) for p, g in partitions.items() if (topic, p) not in self.paused]
            if wanted:
                self._submit(topic, wanted, many, above)

    def _room(self) -> int:
        """How many messages to ask for; none when enough are in hand, and -1 when that is true even for what
        was asked for already: of another topic, or when the handler was faster."""
        options, count = self._options, self._hand.count
        if self._cap < self._cap_max and self._taker.started() - self._since > self._window:
            self._cap = min(self._cap_max, self._cap * 2)
            self._wasted, self._since = 0, self._taker.started()
        if not count and self._taker.is_waiting():
            return min(self._pace.wanted(), options.batch_size, self._cap)
        limit = min(self._cap, self._pace.ahead()) if options.prefetch else 0
        if self._modest_ms and limit > self._modest_count:
            if self._now_ms() < self._modest_ms:
                limit = self._modest_count
            else:
                self._modest_ms = 0.0
        room = limit - count - self._taker.out_of_hand()
        if room >= min(options.batch_size, max(1, limit * _REFILL // 4)):
            return room
        return -1 if room <= 0 and self._pace.message_ms >= SOON_MS else 0

    def _above(self, stuck: bool) -> tuple[int, int]:
        """Some messages of lanes below this one are wanted although enough is in hand; 0: none are."""
        hand, pace, policy = self._hand, self._pace, self._taker.policy()
        if policy.ordering == "partition" or not self._options.prefetch:
            return 0, 0
        parked = self._taker.parked()
        waiting = hand.count + len(parked)
        if not waiting:
            return 0, 0
        if waiting * pace.message_ms < 2 * SOON_MS and not stuck:
            self._look_again()
            return 0, 0
        if policy.priority_mode != "strict":
            lane = hand.lane()
            if parked:
                lane = min(lane, *(message.priority for message, _ in parked))
            return lane, pace.wanted()
        enough = max(1, pace.ahead())
        return hand.short_of(enough, [(rank_of(message), int(free)) for message, free in parked])

    def may_bring_before(self, rank: int) -> bool:
        """Whether what is answered in a moment may be more urgent than this; strictly, that goes first."""
        if not self._brief:
            return False
        return any(poll.at_once and poll.above <= rank for poll in self._unanswered.values())

    def _note_urgent(self, topic: str, above: int, reply: Leases, count_max: int) -> None:
        count = sum(run[1] for grant in reply.grants for run in grant.runs)
        if count < count_max:
            self._none_below[topic] = max(above, self._none_below.get(topic, 0))
        else:
            self._none_below.pop(topic, None)

    def _ask_on(self, topic: str) -> None:
        """A poll was answered: go on, or know nothing of what comes from now on."""
        self.ask()
        if topic not in self._under_way:
            self._none_below.pop(topic, None)

    def _look_again(self) -> None:
        """What is in hand is started soon, unless a handler takes longer than those before."""
        if self._seen is None:
            self._seen = self._taker.started()
            self._loop.call_later(2 * SOON_MS / 1000, self._see_again)

    def _see_again(self) -> None:
        seen, self._seen = self._seen, None
        self.ask(stuck=self._taker.started() == seen)

    def _take_back(self, above: int) -> None:
        """Enough is in hand: polls that wait for any message are withdrawn, or replaced by `above` ones."""
        for topic, waits in list(self._under_way.items()):
            if not waits.above:
                if above:
                    del self._under_way[topic]
                else:
                    self.withdraw({topic})

    def _submit(self, topic: str, wanted: list[tuple[int, int]], count_max: int, above: int = 0) -> None:
        self._count += 1
        strict = self._taker.policy().priority_mode == "strict"
        at_once = strict and above > self._none_below.get(topic, 0)
        generations = dict(wanted)
        places = {(topic, partition) for partition in generations}
        poll, sent_ms = _Poll(self._count, above, at_once, places), self._now_ms()
        lease_ms = self._taker.policy().lease_ms  # It may be changed before the answer comes.
        held = self._held(topic) if topic in self._doubtful else None
        if held is not None:
            self._clearing.add(topic)
        if count_max:
            self._under_way[topic] = poll
        self._unanswered[poll.number] = poll
        self._brief += at_once

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            answered(reply, parts)
            self._answered(poll.number)
            if at_once:
                self._taker.go_on()

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            current = self._under_way.get(topic) is poll
            if current:
                del self._under_way[topic]
            if held is not None:
                self._clearing.discard(topic)
            if isinstance(reply, Refusal):
                self._none_below.pop(topic, None)
                if reply.outcome != "none":
                    self._doubtful.add(topic)
                if current or held is not None:
                    self._refused(topic, error_of(reply))
                return
            if held is not None:
                self._doubtful.discard(topic)
            assert isinstance(reply, Leases)
            self._retries.served(topic)
            if above:
                self._note_urgent(topic, above, reply, count_max)
            if not (current or reply.grants) and topic in self._under_way:
                return  # It brings nothing, and the poll that took its place asks for what there is room for.
            granted_ms = sent_ms + reply.waited_ms
            asked = (above > 0, poll.number)
            self._taker.arrived(Answer(topic, generations, reply, parts, granted_ms, lease_ms, *asked))
            # Later, not now: a broker in this process may answer from within `submit`.
            self._loop.call_soon(self._ask_on, topic)

        group, member, size = self._request.group, self._request.member, self._options.fetch_bytes_max
        wait_ms = WAIT_MS if held is None and count_max and not at_once else 0
        lanes = above or None
        request = Lease(topic, group, member, wanted, count_max, size, wait_ms, lease_ms, held, lanes)
        self._verbs.submit(request, b"", respond)

    def _held(self, topic: str) -> list[int] | None:
        """The leases of a topic; None when they are too many for a request: then unknown ones end by
        themselves."""
        held = self._taker.held(topic)
        return held if len(held) <= HELD_MAX else None

    def _refused(self, topic: str, error: TailraceError) -> None:
        if not self._taker.is_open():
            return
        if isinstance(error, Fenced | NotFound):
            self._retries.refused(topic)
            self._taker.fenced()
        elif error.retriable:
            self._retries.refused(topic, max(PAUSE_S_MIN, told_wait_s(error)))
        else:
            self._retries.refused(topic, PAUSE_S_MAX)
            self._taker.failed(error)
