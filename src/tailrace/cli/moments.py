"""Points in a log and spans of time as people type them: earliest, 1500, 2026-01-31T12:00, -1h."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from tailrace.errors import InvalidRequest

UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_SPAN = re.compile(r"([0-9]{1,9})(ms|s|m|h|d|w)")

Point = str | int | datetime
"""Where reading starts or ends: "earliest", "latest", an offset or a time."""


def parse_span(text: str, option: str) -> timedelta:
    """A span such as 500ms, 30s, 15m, 1h, 7d or 2w."""
    match = _SPAN.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"{option}: {text!r} is not a span of time such as 500ms, 30s, 15m, 1h, 7d or 2w"
        )
    try:
        return int(match.group(1)) * UNITS[match.group(2)]
    except OverflowError:
        raise InvalidRequest(f"{option}: {text!r} is too long a span") from None


def parse_lifetime(text: str, option: str) -> timedelta:
    """A span that is not empty."""
    span = parse_span(text, option)
    if not span:
        raise InvalidRequest(f"{option}: more than 0, not {text!r}")
    return span


def parse_moment(text: str, now: datetime, option: str) -> datetime:
    """A time: ISO 8601 (UTC unless it names a zone), now, or a span before now such as -1h."""
    if text == "now":
        return now
    if text.startswith("-"):
        try:
            return now - parse_span(text[1:], option)
        except OverflowError:
            raise InvalidRequest(f"{option}: {text!r} lies before the year 1") from None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{option}: {text!r} is not a time: "
            "write it like 2026-01-31T12:00:00Z, now, or -1h for an hour ago"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def parse_point(text: str, now: datetime, option: str) -> Point:
    """earliest, latest, an offset, or a time as `parse_moment` takes it."""
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    try:
        return parse_moment(text, now, option)
    except InvalidRequest:
        raise InvalidRequest(
            f"{option}: {text!r} is none of earliest, latest, an offset, a time (2026-01-31T12:00:00Z) or -1h"
        ) from None


def check_order(first: Point | None, last: Point | None, options: tuple[str, str]) -> None:
    """Refuse a range that ends before it begins, where both ends are of one kind: nothing can be in it."""
    if isinstance(first, datetime) and isinstance(last, datetime):
        wrong = last < first
        first, last = iso(first), iso(last)
    else:
        wrong = isinstance(first, int) and isinstance(last, int) and last < first
    if wrong:
        raise InvalidRequest(f"{options[1]}: {last} lies before {options[0]}, {first}")


def iso(moment: datetime) -> str:
    """A time as Tailrace prints it: UTC with microseconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
