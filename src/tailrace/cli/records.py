"""Messages and results as JSON records, both ways.

A field F that holds bytes is written as `"F": text` when it is valid UTF-8, as `"F_base64": base64` when it
is not, and as `"F": null` when there is none. Times are ISO 8601 in UTC with microseconds. What `read
--json` prints, `publish --jsonl` takes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.cli.moments import iso, parse_moment
from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from tailrace import Message, Result


RESERVED = frozenset({"if_missing", "name", "timeout"})
"""Parameters of the SDK's calls for topics, which stand beside a topic's options."""
GROUP_RESERVED = frozenset({"group", "if_missing", "timeout", "topics"})
"""The same of those for groups."""
CONSUMER_RESERVED = GROUP_RESERVED | {
    "auto_commit_ms",
    "batch_size",
    "fetch_bytes_max",
    "member",
    "mode",
    "on_assigned",
    "on_revoked",
    "prefetch",
    "skip_expired",
    "wait",
}
"""The same of consumers; the mode has an option of its own."""


def bytes_field(name: str, data: bytes | None) -> dict[str, str | None]:
    """The one entry of a record that holds these bytes."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode("ascii")}


def message_record(message: Message) -> dict[str, Any]:
    """A message as `read --json` prints it."""
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "sequence": message.sequence,
        "id": str(message.id),
        "timestamp": iso(message.timestamp),
        "append_time": iso(message.append_time),
        **bytes_field("key", message.key),
        **bytes_field("value", message.value),
        "headers": [{"name": name, **bytes_field("value", value)} for name, value in message.headers],
        "priority": message.priority,
        "deliver_at": None if message.deliver_at is None else iso(message.deliver_at),
        "expires_at": None if message.expires_at is None else iso(message.expires_at),
        **bytes_field("dedup_id", message.dedup_id),
    }


def result_record(result: Result) -> dict[str, Any]:
    """The result of one published message as `publish --json` prints it."""
    return {
        "topic": result.topic,
        "partition": result.partition,
        "offset": result.offset,
        "sequence": result.sequence,
        "id": str(result.id),
        "append_time": iso(result.append_time),
        "duplicate": result.duplicate,
        "scheduled": result.scheduled,
        "deliver_at": None if result.deliver_at is None else iso(result.deliver_at),
    }


class _HeaderLine(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    value: str | None = None
    value_base64: str | None = None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of `publish --jsonl`. The last five fields are what `read --json` prints besides; they are
    not taken over.
    """

    value: str | msgspec.UnsetType | None = msgspec.UNSET
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str] | list[_HeaderLine] = {}
    timestamp: str | int | None = None
    priority: int | None = None
    partition: int | None = None
    dedup_id: str | None = None
    dedup_id_base64: str | None = None
    deliver_at: str | int | None = None
    expires_at: str | int | None = None
    topic: Any = None
    offset: Any = None
    sequence: Any = None
    id: Any = None
    append_time: Any = None


_decoder = msgspec.json.Decoder(_Line)


def parse_line(line: bytes) -> dict[str, Any]:
    """The arguments of `send` from one JSON line; InvalidRequest says which field is wrong."""
    try:
        found = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not a message: {error}") from None
    text = None if found.value is msgspec.UNSET else found.value
    value = _either("value", text, found.value_base64)
    if value is None and found.value is msgspec.UNSET:
        raise InvalidRequest('neither "value" nor "value_base64" is there')
    fields: dict[str, Any] = {
        "key": _either("key", found.key, found.key_base64),
        "headers": _headers(found.headers) or None,
        "timestamp": _time("timestamp", found.timestamp),
        "priority": found.priority,
        "partition": found.partition,
        "dedup_id": _either("dedup_id", found.dedup_id, found.dedup_id_base64),
        "deliver_at": _future("deliver_at", found.deliver_at),
        "expires_at": _time("expires_at", found.expires_at),
    }
    # A value that is null is a tombstone; of everything else, null means that it is not there.
    return {"value": value, **{name: field for name, field in fields.items() if field is not None}}


def parse_headers(texts: list[str]) -> list[tuple[str, bytes]]:
    """The values of --header name=value."""
    headers = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"--header: {text!r} is not NAME=VALUE")
        headers.append((name, value.encode("utf-8", "surrogateescape")))
    return headers


def parse_settings(
    texts: list[str] | None, reserved: frozenset[str] = RESERVED, of: str = "topics"
) -> dict[str, Any]:
    """The values of --option key=value."""
    from tailrace.config import option_value

    settings = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"--option: {text!r} is not KEY=VALUE")
        key = key.replace("-", "_")
        if key in reserved:
            raise InvalidRequest(f"--option: {key!r} is not an option of {of}")
        settings[key] = option_value(value)
    return settings


def _either(name: str, text: str | None, encoded: str | None) -> bytes | None:
    if encoded is None:
        return None if text is None else text.encode("utf-8")
    if text is not None:
        raise InvalidRequest(f'both "{name}" and "{name}_base64" are there')
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f'"{name}_base64" is not base64: {error}') from None


def _headers(given: Mapping[str, str] | list[_HeaderLine]) -> list[tuple[str, bytes]]:
    if isinstance(given, Mapping):
        return [(name, value.encode("utf-8")) for name, value in given.items()]
    return [(header.name, _either("value", header.value, header.value_base64) or b"") for header in given]


def _future(name: str, given: str | int | None) -> datetime | None:
    """A time that is still to come. One that has passed means now, and messages which go at once go together:
    a copy of a topic keeps its order."""
    moment = _time(name, given)
    return None if moment is None or moment <= datetime.now(UTC) else moment


def _time(name: str, given: str | int | None) -> datetime | None:
    """ISO 8601 text, or microseconds since 1970."""
    if given is None:
        return None
    if isinstance(given, str):
        return parse_moment(given, datetime.now(UTC), f'"{name}"')
    try:
        return datetime.fromtimestamp(given // 1_000_000, UTC).replace(microsecond=given % 1_000_000)
    except (OverflowError, ValueError, OSError):
        raise InvalidRequest(f'"{name}" is no time that can be represented: {given}') from None
