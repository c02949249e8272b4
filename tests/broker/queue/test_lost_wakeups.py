"""Any history of a group, many requests a turn: nobody waits while there is something for it to have."""

import random
from typing import Any

import pytest

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model import internal_commands as inner
from tailrace.core.model.commands import Publish
from tailrace.core.model.queue_commands import Ack, GiveBack, Lease, Leases, Nack, RejectMessages
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.selection.lanes import LANES
from tailrace.format import batch as arrow
from tailrace.format import frame
from tests.broker.queue.test_fetch_request import Valve
from tests.broker.queue_engine import QueueEngine

MEMBERS = "abcde"
LONG_MS = 60_000


class World:
    """Members that ask, settle and vanish, without waiting for each other."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.broker = QueueEngine()
        self.partitions = self.chance.choice([1, 3])
        # With the smallest of tails most frames have to be read from the log.
        small = {"ring_buffer_bytes": 0} if self.chance.random() < 0.5 else {}
        self.broker.create(partitions=self.partitions, **small)
        self.broker.enlist(
            assignment="shared",
            ordering=self.chance.choice(["none", "key", "key"]),
            priority_mode=self.chance.choice(["weighted", "strict"]),
            in_flight_max=self.chance.choice([3, 8]),
            group_in_flight_max=self.chance.choice([8, 100_000]),
            lease_ms=5_000,
            backoff_ms=500,
            max_attempts=4,
            max_deliveries=self.chance.choice([4, 20]),
        )
        self.gates: dict[str, Any] = {name: self.chance.choice([OpenGate, Valve])() for name in MEMBERS}
        self.held: list[tuple[str, int, int, int]] = []
        """Member, partition, lease, offset."""

    def submit(self, request: Any, member: str) -> None:
        def answered(reply: Any, parts: Any) -> None:
            if isinstance(reply, Leases):
                for grant in reply.grants:
                    for first, many, _, _ in grant.runs:
                        self.held += [
                            (member, grant.partition, grant.lease, o) for o in range(first, first + many)
                        ]

        self.broker.engine.gateway.submit(request, b"", answered, gate=self.gates[member])

    def ask(self) -> None:
        chance, member = self.chance, self.chance.choice(MEMBERS)
        places = []
        for number in range(self.partitions):
            _, generation = self.broker.runtime("t", number).state.queues.grant("g") or ("", 0)
            places.append((number, generation))
        fields = {"count_max": chance.choice([1, 2, 20]), "wait_ms": chance.choice([0, LONG_MS, LONG_MS])}
        if chance.random() < 0.25:
            fields["above"] = chance.choice([1, 2, 3])
        self.submit(Lease("t", "g", member, chance.sample(places, len(places)), **fields), member)

    def settle_some(self) -> None:
        if not self.held:
            return
        chance = self.chance
        member, number, lease, offset = self.held.pop(chance.randrange(len(self.held)))
        span = [offset, offset + 1]
        kind = chance.randrange(8)
        if kind < 4:
            request: Any = Ack("t", number, "g", [(lease, span)])
        elif kind == 4:
            request = Nack("t", number, "g", lease, span, delay_ms=chance.choice([0, None]))
        elif kind < 7:
            request = GiveBack("t", number, "g", [(lease, span)])
        else:
            request = RejectMessages("t", number, "g", lease, span)
        self.submit(request, member)

    def publish(self) -> None:
        many = self.chance.choice([1, 1, 2, 6])
        keys = [self.chance.choice([None, b"k", b"l", b"m"]) for _ in range(many)]
        lanes = [self.chance.choice([2, 2, 2, 0, 1, 4]) for _ in range(many)]
        number = self.chance.randrange(self.partitions)
        now_us = self.broker.clock.now_us()
        ids = arrow.make_ids(many, now_us // 1000, 7, 7)
        bits, body = arrow.encode([b"x"] * many, ids=ids, timestamps=now_us, keys=keys, priorities=lanes)
        request = Publish("t", number, bits, frame.crc32c(body))
        self.broker.engine.gateway.submit(request, body, lambda reply, parts: None)

    def disturb(self) -> None:
        runtime = self.broker.runtime("t", self.chance.randrange(self.partitions))
        kind = self.chance.randrange(8)
        if kind in (0, 6, 7):
            command: Any = inner.EvictMember("g", self.chance.choice(MEMBERS))
        elif kind == 1:
            command = inner.PauseLeases("g", self.chance.choice([True, False, False]))
        elif kind == 2 and self.chance.random() < 0.2:
            command = inner.ResetTo("g", 0)
        elif kind == 3:
            self.broker.pass_s(self.chance.choice([0.02, 0.6, 6]))
            return
        else:
            for gate in self.gates.values():
                if isinstance(gate, Valve):
                    if gate.shut:
                        gate.open()
                    else:
                        gate.shut = self.chance.random() < 0.3
            return
        runtime.submit(command, b"", lambda reply, parts: None)

    def step(self) -> None:
        """Some things that happen in one turn, in any order."""
        things = [self.ask, self.ask, self.settle_some, self.settle_some, self.publish, self.disturb]
        threads, turn = self.broker.threads, self.broker.engine.pump.turn
        threads.holding = self.chance.random() < 0.5
        for _ in range(self.chance.randrange(1, 8)):
            self.chance.choice(things)()
            if self.chance.random() < 0.3:
                turn()
            if self.chance.random() < 0.3:
                threads.run_held(1)
                self.broker.engine.pump.drain()
        threads.holding = False
        threads.run_held()
        self.broker.settle()
        self.broker.pass_s(0.1)  # Who was answered just now is made to wait a moment for more.

    def check(self) -> None:
        """Of every request that waits and could ask: ask its partitions what it would be given."""
        book = self.broker.engine.leasing.book
        for job in book.jobs:
            if not job._begun or job._parked or job._pace is not None:
                continue
            for part in job._parts:
                queues = part.runtime.state.queues
                policy = queues.policy("g")
                assert policy is not None
                credit = book.credit.left("g", part.member, policy.in_flight_max, policy.group_in_flight_max)
                if credit <= 0:
                    continue
                for alone in (False, True):
                    if not alone or (part.above == LANES and not book.credit.held("g", part.member)):
                        self.assert_nothing(part, alone)

    def assert_nothing(self, part: Any, alone: bool) -> None:
        runtime = part.runtime
        asked = "g", part.member, part.generation, 1, 1, 1 << 20, runtime.end_offset
        command = inner.LeaseRun(*asked, above=part.above, alone=alone)
        wall_us = self.broker.clock.wall_us()
        turn = TurnInput(runtime.time_us(), wall_us, 0, runtime.cache)
        while (decision := runtime.state.decide(command, turn)).missing is not None:
            runtime.cache.load(decision.missing, lambda error: None)
            self.broker.settle()
        assert not isinstance(decision.reply, inner.RunLeased), (
            f"{part.member} (above {part.above}, alone {alone}) waits on {part.partition}, and there is "
            f"{decision.reply}"
        )


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_while_there_is_something_for_it(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.step()
        world.check()
