"""What worlds have in common whose broker is killed, closed and started again, over storage that fails."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tailrace.sim.network import SimulatedLink
from tailrace.sim.virtual_time import SECOND_US, BrokerRun, VirtualTime


class BrokerWorld(VirtualTime, ABC):
    """One seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.healed = False
        """Whether the trouble is over."""
        self.overload = 0.0
        self._full = self._sync_fails = 0.0
        """How likely storage fails, until the trouble is over."""
        self._restart_skew_s: int | None = None
        """How the clock is put when the broker stops; None: by chance."""
        self._value_count = 0

    def value(self) -> bytes:
        """A value that nobody else has."""
        self._value_count += 1
        return b"%d" % self._value_count

    def serving(self) -> BrokerRun | None:
        """See `Surroundings.serving`."""
        return self.life

    def hung_up(self) -> None:
        """See `Surroundings.hung_up`."""

    @abstractmethod
    def _lines(self) -> list[SimulatedLink]:
        """The connections of all clients."""

    def _start(self) -> None:
        self.life = BrokerRun(self)
        if not self.healed:
            self._fail_in(self.life)

    def _fail_in(self, life: BrokerRun) -> None:
        """Let storage fail by chance from now on."""
        life.threads.full, life.threads.sync_fails = self._full, self._sync_fails

    def _stop(self, power_loss: bool, away_us: int | None = None) -> None:
        life = self.life
        if life is None:
            return
        life.alive = False
        self.life = None
        if power_loss:
            life.threads.half_done()
            self._cut_power()
        else:
            self.seen["broker killed"] += 1
            self.store.close()
        for line in self._lines():
            line.drop(True)
        self.put_clock(self._restart_skew_s)
        self.later(away_us or self.random.choice((1_000, 100_000, SECOND_US)), self._start)

    def _cut_power(self) -> None:
        """What was not synced is gone."""
        self.store.lose_power(self.random)

    def _close_gracefully(self) -> None:
        life = self.life
        if life is None:
            return

        def over() -> None:
            if life.alive:
                self.seen["broker closed and opened"] += 1
                self._stop(False)

        life.engine.close(over)
