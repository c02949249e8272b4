"""`tailrace worker module:bus`: run the handlers of an application until a signal says stop."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.broker_wait import WAIT_S
from tailrace.cli.output import Output
from tailrace.cli.parameters import Json, Timeout, Url
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace.bus import Bus

EXIT_FORCED = 1

working = typer.Typer()


@working.command()
def worker(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:BUS", help="Where the bus is, as in shop.app:bus.")
    ],
    *,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Messages handled at a time, for each group.")
    ] = 1,
    groups: Annotated[
        list[str] | None, typer.Option("--group", help="Run only this group; may be repeated.")
    ] = None,
    url: Url = None,
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Run the handlers of a bus. SIGTERM or Ctrl-C finishes what is under way; a second one stops at once."""
    import asyncio

    bus = load_bus(target)
    asyncio.run(_work(bus, Output(as_json=json), concurrency, groups, (url, timeout)))


def load_bus(target: str) -> Bus:
    """The bus that MODULE:NAME names; the folder of the caller is searched, too."""
    from tailrace.bus import Bus
    from tailrace.sync import Bus as BlockingBus

    module_name, colon, name = target.partition(":")
    # A module by its full name: there is no package here that `.app` could be relative to.
    if "" in module_name.split(".") or not colon or not name:
        raise InvalidRequest(f"{target!r}: write it as MODULE:BUS, as in shop.app:bus")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # Something that the application itself needs is missing: its traceback says what.
        raise InvalidRequest(f"{module_name!r}: there is no such module here") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidRequest(f"{target!r}: there is no {part!r}")
        found = getattr(found, part)
    if isinstance(found, BlockingBus):
        found = found.inner
    if not isinstance(found, Bus):
        raise InvalidRequest(f"{target!r} is not a Bus but {type(found).__name__}")
    return found


async def _work(
    bus: Bus, output: Output, concurrency: int, groups: list[str] | None, where: tuple[str | None, float]
) -> None:
    import asyncio
    import signal

    from tailrace import connect

    loop = asyncio.get_running_loop()
    signals = 0

    def signalled() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            # Leases that are held come back to the group by themselves.
            os._exit(EXIT_FORCED)
        bus.stop()

    async with connect(where[0], timeout=where[1], wait=WAIT_S.get()) as client, bus.attach(client):
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled)
        output.note(f"working on {bus.name!r}: {concurrency} at a time; Ctrl-C finishes what is under way")
        await bus.run(concurrency=concurrency, groups=groups)
        output.note("stopped: nothing is left under way")
