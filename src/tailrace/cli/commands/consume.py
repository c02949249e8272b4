"""`tailrace consume`: take messages as a member of a group, print them or run a command for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tailrace.cli.broker_wait import WAIT_S
from tailrace.cli.execution import with_client
from tailrace.cli.output import Output, printable
from tailrace.cli.parameters import GroupSettings, Json, MessagesMax, Timeout, Url
from tailrace.errors import InvalidRequest, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace import Client
    from tailrace.client.queue.delivery import Delivery

ACKS = ("after", "first", "never")
EXIT_REJECT = 65
"""Exit status of a command that finds its message hopeless (EX_DATAERR)."""
EXEC_BATCH = 10
"""Messages that are held for a command: as many as it may get through before anybody would miss them."""
LOG_MODES = ("stream", "broadcast")

Patience = Annotated[
    float | None,
    typer.Option(
        "--wait",
        metavar="SECONDS",
        min=0.1,
        help="Stop when nothing came for so long; also wait so long for a broker to be there.",
    ),
]

consuming = typer.Typer()


class Taking(msgspec.Struct, frozen=True, kw_only=True):
    """What to consume and what to do with it."""

    topics: list[str]
    group: str | None
    mode: str
    ack: str
    command: str | None
    count: int | None
    wait: float | None
    standby: bool
    options: dict[str, Any]
    url: str | None


@consuming.command()
def consume(
    topic: Annotated[list[str], typer.Argument(help="Topics to consume.", show_default=False)],
    *,
    group: Annotated[str | None, typer.Option("--group", "-g", help="The group to work for.")] = None,
    mode: Annotated[str, typer.Option("--mode", help="queue, exclusive, stream or broadcast.")] = "queue",
    ack: Annotated[
        str, typer.Option("--ack", help="after (it was printed or handled), first, or never: give it back.")
    ] = "after",
    exec_: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            help="Run this in a shell for each message: value on its input, TAILRACE_* in its environment. "
            "Exit status 0 acknowledges, 65 rejects, any other one gives it back as a failure.",
        ),
    ] = None,
    max_: MessagesMax = None,
    wait: Patience = None,
    no_standby: Annotated[
        bool, typer.Option("--no-standby", help="exclusive: fail when another consumer is active.")
    ] = False,
    option: GroupSettings = None,
    json: Json = False,
    url: Url = None,
    timeout: Timeout = 30.0,
) -> None:
    """Consume messages until Ctrl-C or SIGTERM, settling each for the group."""
    from tailrace.cli.records import CONSUMER_RESERVED, parse_settings

    output = Output(as_json=json)
    taking = Taking(
        topics=topic,
        group=group,
        mode=mode,
        ack=ack,
        command=exec_,
        count=max_,
        wait=wait,
        standby=not no_standby,
        options=parse_settings(option, CONSUMER_RESERVED, "groups"),
        url=url,
    )
    _check(taking)
    WAIT_S.set(wait or 0.0)

    async def work(client: Client) -> None:
        if mode in LOG_MODES:
            await _follow(client, taking, output)
        else:
            await _take(client, taking, output)

    with_client(url, timeout, work, {"mode": "--mode"})


def _check(taking: Taking) -> None:
    """What does not go together is told before anybody is connected."""
    mode, group, ack = taking.mode, taking.group, taking.ack
    if ack not in ACKS:
        raise InvalidRequest(f"--ack: {', '.join(ACKS)}, not {ack!r}")
    if taking.command is not None and ack == "never":
        raise InvalidRequest("--exec settles by the exit status: --ack never does not go with it")
    if mode in LOG_MODES and (taking.command is not None or ack != "after"):
        raise InvalidRequest(f"--mode {mode} settles nothing: --exec and --ack do not go with it")
    if not taking.standby and mode != "exclusive":
        raise InvalidRequest("--no-standby goes with --mode exclusive")
    if group is None and mode != "broadcast":
        raise InvalidRequest(
            "--group is missing", hint="--mode broadcast, or `tailrace read --follow`, needs no group"
        )
    if group is not None and mode == "broadcast":
        raise InvalidRequest("--mode broadcast has no group: leave --group out")


async def _next(messages: Any, wait: float | None) -> Any:
    """The next message; None when none came in time or there are no more."""
    import asyncio

    try:
        async with asyncio.timeout(wait):
            return await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        return None


def _on_terminate(stop: Callable[[], None]) -> None:
    """A service manager says stop: the message under way is finished, the rest goes back at once."""
    import asyncio
    import signal

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)


async def _follow(client: Client, taking: Taking, output: Output) -> None:
    from tailrace.cli.commands.read import print_message

    shown = 0
    async with client.consumer(taking.topics, taking.group, mode=taking.mode, **taking.options) as consumer:
        _on_terminate(consumer.stop)
        while taking.count is None or shown < taking.count:
            message = await _next(consumer, taking.wait)
            if message is None:
                return
            print_message(output, message)
            shown += 1
        if taking.group is not None:
            # Nobody asks for the next message, which would have said that the last one is finished.
            await consumer.commit()


async def _take(client: Client, taking: Taking, output: Output) -> None:
    # With a count, or a command that takes its time, little is leased: others could handle it meanwhile.
    size = 500 if taking.command is None else EXEC_BATCH
    slow = taking.command is not None or taking.count is not None
    ahead = {"prefetch": 0, "batch_size": min(size, taking.count or size)} if slow else {}
    taken = 0
    async with client.consumer(
        taking.topics,
        taking.group,
        mode=taking.mode,
        wait=taking.standby,
        **ahead,
        **taking.options,
    ) as consumer:
        _on_terminate(consumer.stop)
        while taking.count is None or taken < taking.count:
            delivery = await _next(consumer, taking.wait)
            if delivery is None:
                return
            await _handle(delivery, taking, output)
            taken += 1


async def _handle(delivery: Delivery, taking: Taking, output: Output) -> None:
    from tailrace.cli.commands.read import print_message

    if taking.ack == "first":
        await delivery.ack()
    status = 0
    if taking.command is None:
        print_message(output, delivery, more={"attempt": delivery.attempt, "deliveries": delivery.deliveries})
    else:
        status = await _execute(taking.command, delivery, taking.url)
    place = f"{printable(delivery.topic)}/{delivery.partition}@{delivery.offset}"
    if taking.ack != "after":
        if status:
            output.note(f"{place}: exit status {status}, and it is acknowledged already")
        return
    try:
        if status == 0:
            await delivery.ack()
        elif status == EXIT_REJECT:
            await delivery.reject(f"exit status {status}")
            output.note(f"{place}: exit status {status}, to the dead letters")
        else:
            await delivery.nack(error=f"exit status {status}")
            output.note(f"{place}: exit status {status}, attempt {delivery.attempt} failed")
    except LeaseLost as error:
        output.note(f"{place}: {printable(error.message)}")


async def _execute(command: str, delivery: Delivery, url: str | None) -> int:
    """Run a command with the message; its own output goes where ours goes."""
    import asyncio
    import os
    import signal

    environment = {
        **os.environb,
        b"TAILRACE_TOPIC": delivery.topic.encode(),
        b"TAILRACE_PARTITION": str(delivery.partition).encode(),
        b"TAILRACE_OFFSET": str(delivery.offset).encode(),
        b"TAILRACE_ID": str(delivery.id).encode(),
        b"TAILRACE_GROUP": delivery.group.encode(),
        b"TAILRACE_ATTEMPT": str(delivery.attempt).encode(),
    }
    if url is not None:
        environment[b"TAILRACE_URL"] = url.encode("utf-8", "surrogateescape")
    environment.pop(b"TAILRACE_MESSAGE_KEY", None)
    if delivery.key is not None and b"\0" not in delivery.key:
        # TAILRACE_KEY names the file of a private key: that is not for who publishes to choose.
        environment[b"TAILRACE_MESSAGE_KEY"] = delivery.key
    # A session of its own: Ctrl-C is for us, and what the shell has started can be ended with it. The start
    # is not interrupted, so that there is always somebody to end.
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.PIPE, env=environment, start_new_session=True
        )
    )
    try:
        process = await asyncio.shield(starting)
        await process.communicate(delivery.value or b"")
    except BaseException:
        process = await starting
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode
