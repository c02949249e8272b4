"""One suite for every `Clock` of brokers and every `ClientClock`: the docstrings of the ports as tests.

Covers `broker/runtime/clock.py` and `client/rpc/machine_clock.py`.
"""

import time

import pytest

from tailrace.broker.runtime.clock import ManualClock, SystemClock
from tailrace.client.rpc.machine_clock import MachineClock
from tailrace.ports import ClientClock, Clock
from tailrace.testing.local_broker import LocalBroker

CENTURY_US = 100 * 365 * 86_400 * 1_000_000


@pytest.fixture(params=["system", "manual", "virtual"])
def clock(request: pytest.FixtureRequest) -> Clock:
    if request.param == "system":
        return SystemClock()
    return ManualClock() if request.param == "manual" else LocalBroker().clock


@pytest.fixture(params=["machine", "virtual"])
def client_clock(request: pytest.FixtureRequest) -> ClientClock:
    return MachineClock() if request.param == "machine" else LocalBroker().clock


def test_steady_time_never_goes_back(clock: Clock) -> None:
    times = [clock.now_us() for _ in range(20_000)]
    assert times == sorted(times)
    assert all(type(at) is int for at in times)


def test_both_readings_are_microseconds_since_1970(clock: Clock) -> None:
    for read in (clock.now_us, clock.wall_us):
        assert 10 * CENTURY_US // 20 < read() < CENTURY_US
    assert abs(clock.now_us() - clock.wall_us()) < 60_000_000


def test_steady_time_does_not_follow_a_wall_clock_that_jumps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_us, hour_us = clock.now_us(), 3_600_000_000
    if isinstance(clock, ManualClock):
        clock.skew_us = -hour_us
    else:
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() - hour_us * 1000)
    assert clock.wall_us() < before_us - hour_us // 2
    assert before_us <= clock.now_us() < before_us + hour_us // 2


def test_elapsed_time_never_goes_back(client_clock: ClientClock) -> None:
    times = [client_clock.elapsed_ms() for _ in range(20_000)]
    assert times == sorted(times)


def test_a_clients_wall_time_is_nanoseconds_since_1970(client_clock: ClientClock) -> None:
    assert type(client_clock.wall_ns()) is int
    assert abs(client_clock.wall_ns() - time.time_ns()) < 60 * 10**9


def test_time_that_passes_passes_on_both_clocks() -> None:
    """A client's times are those of its broker: virtual ones together, real ones together."""
    broker = LocalBroker()
    wall_ns, elapsed_ms = broker.clock.wall_ns(), broker.clock.elapsed_ms()
    broker.clock.advance(3600)
    assert broker.clock.wall_ns() - wall_ns == 3600 * 10**9
    assert broker.clock.elapsed_ms() - elapsed_ms == pytest.approx(3600 * 1000)
