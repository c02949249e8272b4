"""Requests that wait for credit: the process of credit says who is woken, and the next turn wakes them."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from tailrace.broker.runtime.pump import Pump
from tailrace.core.process.credit_process import CreditProcess


class CreditWaiter(Protocol):
    """A request that had no credit left."""

    def credit_freed(self) -> None:
        """Ask again; the request does not wait for credit any more."""
        ...


class CreditWaiters:
    """The process of credit of a node, and its turns."""

    def __init__(self, pump: Pump) -> None:
        self.process: CreditProcess[CreditWaiter] = CreditProcess(partial(pump.ready, self))

    def turn(self, now_us: int, wall_us: int) -> None:
        """Wake the requests that there is credit for."""
        for waiter in self.process.wakes():
            waiter.credit_freed()
