"""The life of a message drawn as a timeline in text: one line per event, with the times between them.

orders/2@1042  0198c2a4-…  key=cart-7  mixed
  2026-03-01 12:00:00.000000  ●   published
                  +0.000413   ●   appended
                  +0.012002   ├─ billing     delivered   worker-1, attempt 1
                  +1.204417   ├─ billing     nacked      worker-1, attempt 1: no connection
                  +3.020115   └─ billing     acked       worker-2
  billing: settled   mails: free
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from tailrace.cli.output import printable, printable_bytes
from tailrace.client.admin.trace_client import Life, LifeEvent

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_WIDTH = 26
_COLOURS = {
    "acked": "green",
    "committed": "green",
    "nacked": "yellow",
    "expired": "yellow",
    "lapsed": "yellow",
    "given_back": "cyan",
    "redriven": "cyan",
    "dying": "red",
    "dead_lettered": "red",
    "cancelled": "red",
    "collected": "red",
}


def draw(life: Life) -> str:
    """The timeline as plain text, without control characters."""
    return "\n".join(text for text, _ in _lines(life))


def draw_rich(life: Life) -> Any:
    """The same for a terminal: a `rich.text.Text` with colours."""
    from rich.text import Text

    lines = [Text(text, style=style) for text, style in _lines(life)]
    return Text("\n").join(lines)


def _lines(life: Life) -> Iterator[tuple[str, str]]:
    """Each line with its colour."""
    yield _heading(life), "bold"
    if life.traceparent is not None:
        yield f"  traceparent {printable(life.traceparent)}", "dim"
    if life.origin:
        place = "/".join(printable(life.origin.get(name, "?")) for name in ("topic", "partition"))
        yield f"  dead letter of {place}@{printable(life.origin.get('offset', '?'))}", "dim"
    width = max((len(printable(event.group or "")) for event in life.events), default=0)
    name_width = max((len(event.event) for event in life.events), default=0)
    last = {event.group: number for number, event in enumerate(life.events)}
    start_us = life.events[0].time_us if life.events else 0
    for number, event in enumerate(life.events):
        if event.group is None:
            mark = "●"
        else:
            mark = "└─" if last[event.group] == number else "├─"
        group = printable(event.group or "").ljust(width)
        when = _absolute(event.time_us) if number == 0 else _since(event.time_us - start_us)
        text = f"  {when:>{_TIME_WIDTH}}  {mark:<2} {group}  {event.event:<{name_width}}  {_rest(event)}"
        yield text.rstrip(), _COLOURS.get(event.event, "")
    if life.groups:
        states = (f"{printable(name)}: {status}" for name, status in sorted(life.groups.items()))
        yield "  " + "   ".join(states), "bold"


def _heading(life: Life) -> str:
    offset = "" if life.offset is None else f"@{life.offset}"
    key = "" if life.key is None else f"  key={printable_bytes(life.key)}"
    return f"{printable(life.topic)}/{life.partition}{offset}  {life.id}{key}  {life.status}"


def _rest(event: LifeEvent) -> str:
    """What belongs to an event, in words."""
    parts = [] if event.member is None else [printable(event.member)]
    if event.attempt is not None:
        parts.append(f"attempt {event.attempt}")
    details = dict(event.details)
    delivery = details.pop("delivery", None)
    if delivery is not None and delivery != event.attempt:
        parts.append(f"delivery {delivery}")
    if event.event == "dead_lettered" and "topic" in details:
        place = f"{printable(str(details.pop('topic')))}/{details.pop('partition', '?')}"
        parts.append(f"to {place}@{details.pop('offset', '?')}")
    error, reason = details.pop("error", None), details.pop("reason", None)
    for name, value in details.items():
        parts.append(_detail(name, value, event.time_us))
    if reason is not None:
        parts.append(printable(str(reason)))
    text = ", ".join(parts)
    return text if error is None else f"{text}: {printable(str(error))}"


def _detail(name: str, value: Any, time_us: int) -> str:
    if name in ("deadline_us", "deliver_at_us") and isinstance(value, int):
        what = "until" if name == "deadline_us" else "due"
        return f"{what} {_since(value - time_us)}"
    if name == "delay_us" and isinstance(value, int):
        return f"after {value / 1e6:g} s"
    if isinstance(value, list):
        value = ", ".join(str(item) for item in value)
    return f"{name.replace('_', ' ')} {printable(str(value))}"


def _absolute(time_us: int) -> str:
    try:
        return (_EPOCH + timedelta(microseconds=time_us)).strftime("%Y-%m-%d %H:%M:%S.%f")
    except OverflowError:
        return str(time_us)


def _since(passed_us: int) -> str:
    """How much later; days and hours where they say more than seconds."""
    sign, rest = ("-", -passed_us) if passed_us < 0 else ("+", passed_us)
    if rest < 3_600_000_000:
        return f"{sign}{rest / 1e6:.6f}"
    days, rest = divmod(rest, 86_400_000_000)
    hours, rest = divmod(rest, 3_600_000_000)
    minutes, rest = divmod(rest, 60_000_000)
    clock = f"{hours:02d}:{minutes:02d}:{rest / 1e6:06.3f}"
    return f"{sign}{days}d {clock}" if days else f"{sign}{clock}"
