"""The doorway without sockets: places and slots are fair by address, deadlines, lines for handshakes.

Places are compared with a model; what arrives at a TLS port is tested in `test_tls.py`.
"""

import asyncio
import random
from collections.abc import Callable

import pytest

from tailrace.broker.runtime.clock import ManualClock
from tailrace.core.model.access import Origin
from tailrace.protocols.doorway import Doorway, FairPlaces, Guest, neighbourhood, plain_host
from tailrace.protocols.edge_tuning import GREETING_US, REMARK_US


def guest_of(address: str) -> Guest:
    return Guest(Origin(address), lambda: None, lambda guest: None, 0)


class Model:
    """Places, written plainly: guests in the order of their coming."""

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.guests: list[Guest] = []

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for guest in self.guests:
            found[guest.address] = found.get(guest.address, 0) + 1
        return found

    def oldest(self, address: str) -> Guest:
        return next(guest for guest in self.guests if guest.address == address)


@pytest.mark.parametrize("seed", range(20))
def test_places_give_way_fairly(seed: int) -> None:
    rng = random.Random(seed)
    model, places = Model(rng.randrange(1, 12)), FairPlaces(0)
    places.count_max = model.count_max
    for _ in range(400):
        if rng.random() < 0.6:
            guest = guest_of(f"10.0.0.{rng.randrange(5)}")
            counts = model.counts()
            loser = places.take(guest)
            assert (loser is None) == (len(model.guests) < model.count_max)
            if loser is not None:
                assert counts[loser.address] == max(counts.values())
                assert loser is model.oldest(loser.address)
                model.guests.remove(loser)
            model.guests.append(guest)
        elif model.guests:
            guest = model.guests.pop(rng.randrange(len(model.guests)))
            assert places.release(guest)
            assert not places.release(guest)
        counts = model.counts()
        assert places.count == len(model.guests)
        assert places.most == max(counts.values(), default=0)
        assert all(places.held(address) == count for address, count in counts.items())


@pytest.mark.parametrize(
    ("shown", "plain"),
    [("::ffff:10.1.2.3", "10.1.2.3"), ("fe80::1%eth0", "fe80::1"), ("127.0.0.1", "127.0.0.1")],
)
def test_addresses_are_written_in_one_way(shown: str, plain: str) -> None:
    assert plain_host(shown) == plain


def test_a_whole_network_of_ipv6_counts_as_one_address() -> None:
    near = [neighbourhood(Origin(address)) for address in ("2001:db8::1", "2001:db8::ffff:1:2:3")]
    assert near[0] == near[1] != neighbourhood(Origin("2001:db8:0:1::1"))
    assert neighbourhood(Origin("", uid=7)) != neighbourhood(Origin("", uid=8))


class Door:
    """A doorway with virtual time; tells who was turned out and whose handshake began."""

    def __init__(self, **bounds: int) -> None:
        self.clock = ManualClock()
        self.doorway = Doorway(self.clock, **bounds)
        self.out: list[str] = []
        self.begun: list[str] = []

    def enter(self, name: str, address: str = "10.0.0.1") -> Guest:
        return self.doorway.enter(Origin(address), lambda: self.out.append(name))

    def shake(self, name: str, address: str = "10.0.0.1") -> Guest:
        guest = self.enter(name, address)
        self.doorway.line_up(guest, lambda: self.begun.append(name))
        return guest


def test_the_oldest_of_the_greediest_address_is_turned_out() -> None:
    door = Door(guests_max=4)
    door.enter("other", "10.0.0.2")
    for number in range(6):
        door.enter(f"greedy {number}")
    assert door.out == ["greedy 0", "greedy 1", "greedy 2"]
    assert door.doorway.guests == 4


def test_those_who_are_late_are_turned_out_and_credentials_get_time_of_their_own() -> None:
    door = Door()
    door.enter("silent")
    slow = door.enter("slow")
    door.clock.set_us(door.clock.now_us() + GREETING_US)
    door.doorway.renew(slow)
    door.enter("new")
    door.clock.set_us(door.clock.now_us() + 1)
    door.doorway.sweep()
    assert door.out == ["silent"]
    door.clock.set_us(door.clock.now_us() + GREETING_US)
    door.doorway.sweep()
    assert door.out == ["silent", "slow", "new"]
    assert door.doorway.guests == 0


def run(scenario: Callable[[], None], then: Callable[[], None]) -> None:
    async def play() -> None:
        scenario()
        for _ in range(50):
            await asyncio.sleep(0)
        then()

    asyncio.run(play())


def test_handshakes_wait_for_slots_and_each_begins_in_a_round_of_its_own() -> None:
    door = Door(handshakes_max=2)
    guests: list[Guest] = []

    async def play() -> None:
        guests.extend(door.shake(str(number)) for number in range(4))
        await asyncio.sleep(0)
        assert door.begun == ["0"]
        for _ in range(20):
            await asyncio.sleep(0)
        assert door.begun == ["0", "1"]
        guests[2].leave()  # Gone while it waited in line.
        guests[0].leave()
        for _ in range(20):
            await asyncio.sleep(0)
        assert door.begun == ["0", "1", "3"]
        assert (door.doorway.guests, door.doorway.handshakes) == (2, 2)

    asyncio.run(play())
    assert door.out == []


def test_an_address_with_many_handshakes_does_not_keep_others_out() -> None:
    door = Door(handshakes_max=3)

    def crowd() -> None:
        for number in range(30):
            door.shake(f"greedy {number}")

    def others() -> None:
        assert door.begun == ["greedy 0", "greedy 1", "greedy 2"]

    run(crowd, others)
    run(lambda: (door.shake("other", "10.0.0.2"), None)[1], lambda: None)
    assert door.begun[-1] == "other"
    assert door.out == ["greedy 0"]


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tailrace.doorway")
    door = Door()
    for _ in range(1000):
        door.doorway.remark("speaks nonsense", "10.0.0.1")
    assert len(caplog.records) == 1
    door.clock.set_us(door.clock.now_us() + REMARK_US)
    door.doorway.remark("speaks nonsense", "10.0.0.2")
    assert caplog.records[-1].message == "10.0.0.2: speaks nonsense (and 999 more since the last such line)"


def test_closing_ends_everybody() -> None:
    door = Door()
    door.enter("one")
    door.enter("two", "10.0.0.2")
    door.doorway.close()
    assert sorted(door.out) == ["one", "two"]
    assert door.doorway.guests == 0
