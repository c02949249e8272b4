"""An asyncio loop on virtual time: when nothing is left to do, it jumps to its next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Never waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes only in jumps."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self.problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.problems.append(context))

    def time(self) -> float:
        return self._jump.now_s


class LoopClock:
    """See `ClientClock`: the time of the running loop."""

    def wall_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e9)

    def elapsed_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run to the end; what fails in a callback fails the test."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(scenario)
        assert not loop.problems, loop.problems
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()


async def rounds(count: int = 5) -> None:
    """Let everybody else have some turns; no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)
