"""The options of the data source: their names, defaults and meaning, and what they become once checked.

Spark hands options over as strings with lower-case names. Each is checked here, on the driver, before
anything runs: an error names the option and says what it wants.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tailrace.client.rpc.broker_url import BrokerUrl, parse_url, shown
from tailrace.client.rpc.credentials import GivenAccess, check_given
from tailrace.connect import DEFAULT_URL
from tailrace.core.model.commands import EARLIEST, LATEST
from tailrace.errors import InvalidRequest
from tailrace.format.tabular import POSITIONED

BATCH, STREAM, WRITE = "batch read", "stream read", "write"
MODES = ("broker", "segments", "archive")
VIEWS = ("messages", "lifecycle", "groups")
TIMEOUT_S = 30.0
ROWS_MAX = 1 << 62

Point = int | datetime | dict[str, dict[int, int]]
"""A place in topics: EARLIEST, LATEST or an offset of every partition, a time, or offsets by topic and
partition."""


class Option(NamedTuple):
    """One row of the table of options."""

    name: str
    uses: tuple[str, ...]
    default: str
    meaning: str


OPTIONS = (
    Option(
        "url",
        (BATCH, STREAM, WRITE),
        "TAILRACE_URL",
        "where the broker is: tailrace://host:port[,host:port…], tailraces:// or unix:PATH",
    ),
    Option("token", (BATCH, STREAM, WRITE), "TAILRACE_TOKEN", "a token that proves who reads or writes"),
    Option("ca", (BATCH, STREAM, WRITE), "TAILRACE_CA", "tailraces://: a file with trusted authorities"),
    Option("cert", (BATCH, STREAM, WRITE), "TAILRACE_CERT", "tailraces://: a client certificate, a file"),
    Option("key", (BATCH, STREAM, WRITE), "TAILRACE_KEY", "the key that belongs to `cert`, a file"),
    Option("timeout_s", (BATCH, STREAM, WRITE), "30", "how long a call may take before it is an error"),
    Option(
        "topic", (BATCH, STREAM, WRITE), "", "a topic, or several with commas between; `path` means the same"
    ),
    Option("topic_pattern", (BATCH, STREAM), "", "a regular expression that whole names of topics match"),
    Option("mode", (BATCH,), "broker", "where messages come from: broker, segments (its files) or archive"),
    Option(
        "view", (BATCH,), "messages", "messages, lifecycle (what happened to them) or groups (lag, positions)"
    ),
    Option("data", (BATCH,), "", "mode segments: the broker's data folder, or a copy of it"),
    Option("archive", (BATCH,), "", "mode archive: the folder of the archive"),
    Option("start", (BATCH, STREAM), "earliest", "earliest, latest, an offset, a time, or JSON of offsets"),
    Option("end", (BATCH,), "latest", "as start; the first that is not read any more"),
    Option("columns", (BATCH, STREAM), "", "which columns, with commas between; all when empty"),
    Option(
        "rows_per_partition", (BATCH, STREAM), "0", "messages for one task at most; 0: a task per partition"
    ),
    Option("skip_expired", (BATCH, STREAM), "false", "leave out messages that have outlived their TTL"),
    Option(
        "filters",
        (BATCH,),
        "false",
        "push filters down where the session allows it; only for a DataFrame that a single query uses",
    ),
    Option(
        "fail_on_data_loss", (BATCH, STREAM), "true", "whether messages that are gone already are an error"
    ),
    Option("max_rows_per_trigger", (STREAM,), "0", "messages of one micro-batch at most; 0: all there are"),
    Option("group", (STREAM,), "", "a group of mode stream that the positions are committed to"),
    Option("txn_app_id", (WRITE,), "", "batch writes: who writes; with txn_version a rerun changes nothing"),
    Option("txn_version", (WRITE,), "", "batch writes: a number that grows from write to write"),
    Option(
        "keep_partition", (WRITE,), "false", "take the column `partition` as the target, also of read rows"
    ),
)
"""Every option there is; docs/spark.md has the same table."""

_FOREIGN = frozenset(("path", "paths", "checkpointlocation", "queryname", "header"))
"""What Spark itself puts among the options."""


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a read, checked; `url` holds the token, too, and shows no secret."""

    url: BrokerUrl
    timeout_s: float = TIMEOUT_S
    topics: list[str] = []
    pattern: str = ""
    mode: str = "broker"
    view: str = "messages"
    data: str = ""
    archive: str = ""
    start: Point = EARLIEST
    end: Point = LATEST
    columns: list[str] = []
    """All of the view's when empty."""
    rows_per_partition: int = 0
    skip_expired: bool = False
    filters: bool = False
    fail_on_data_loss: bool = True
    max_rows_per_trigger: int = 0
    group: str = ""


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a write, checked; `url` is as in a read."""

    url: BrokerUrl
    timeout_s: float = TIMEOUT_S
    topic: str = ""
    """Of rows that name none; "": every row has to."""
    txn_app_id: str = ""
    txn_version: int | None = None
    keep_partition: bool = False


def read_options(given: Mapping[str, str], *, streaming: bool = False) -> ReadOptions:
    """Options of a batch or stream read; raises `InvalidRequest`."""
    texts = _known(given, STREAM if streaming else BATCH)
    view = _one_of(texts, "view", VIEWS)
    topics, pattern = _names(texts.get("topic", "")), texts.get("topic_pattern", "")
    if view == "messages" and topics and pattern:
        raise InvalidRequest("topic: topic and topic_pattern are both given; leave one of them out")
    if view == "messages" and not topics and not pattern:
        raise InvalidRequest("topic: either topic or topic_pattern is needed")
    if pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidRequest(f"topic_pattern: {pattern!r} is no regular expression: {error}") from None
    mode = _one_of(texts, "mode", MODES)
    for needs, name in (("segments", "data"), ("archive", "archive")):
        if mode == needs and not texts.get(name):
            raise InvalidRequest(f"{name}: mode {mode} needs the folder")
    columns = _names(texts.get("columns", ""))
    unknown = [name for name in columns if name not in POSITIONED.names]
    if view == "messages" and (unknown or len(set(columns)) != len(columns)):
        raise InvalidRequest(
            f"columns: each once, of {', '.join(POSITIONED.names)}; not {', '.join(columns)}"
        )
    return ReadOptions(
        url=_url(texts),
        timeout_s=_seconds(texts),
        topics=topics,
        pattern=pattern,
        mode=mode,
        view=view,
        data=texts.get("data", ""),
        archive=texts.get("archive", ""),
        start=point_of(texts.get("start", "earliest"), "start"),
        end=point_of(texts.get("end", "latest"), "end"),
        columns=columns,
        rows_per_partition=_count(texts, "rows_per_partition"),
        skip_expired=_flag(texts, "skip_expired", False),
        filters=_flag(texts, "filters", False),
        fail_on_data_loss=_flag(texts, "fail_on_data_loss", True),
        max_rows_per_trigger=_count(texts, "max_rows_per_trigger"),
        group=texts.get("group", ""),
    )


def write_options(given: Mapping[str, str], *, streaming: bool = False) -> WriteOptions:
    """Options of a batch or stream write; raises `InvalidRequest`."""
    texts = _known(given, WRITE)
    topics = _names(texts.get("topic", ""))
    if len(topics) > 1:
        raise InvalidRequest("topic: one; rows for several name theirs in a column `topic`")
    app, version = texts.get("txn_app_id", ""), texts.get("txn_version", "")
    if streaming and (app or version):
        raise InvalidRequest("txn_app_id: only for batch writes; a stream has its query and batch for that")
    if bool(app) != bool(version):
        raise InvalidRequest("txn_app_id: goes together with txn_version")
    return WriteOptions(
        url=_url(texts),
        timeout_s=_seconds(texts),
        topic=topics[0] if topics else "",
        txn_app_id=app,
        txn_version=_number(version, "txn_version") if version else None,
        keep_partition=_flag(texts, "keep_partition", False),
    )


def point_of(text: str, name: str) -> Point:
    """A place in topics as people write it; raises `InvalidRequest` with the name of the option."""
    text = text.strip()
    if text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    if text.isdecimal():
        return int(text)
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, dict[int, int]], strict=False)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f'{name}: offsets look like {{"topic": {{"0": 17}}}}: {error}') from None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        text = (
            f"earliest, latest, an offset, a time with its zone (2026-01-31T12:00:00Z) or JSON, not {text!r}"
        )
        raise InvalidRequest(f"{name}: {text}")
    return time


def _known(given: Mapping[str, str], use: str) -> dict[str, str]:
    """The options that are given, with `path` for the topic; raises for those that this use does not have."""
    texts = {name.lower(): str(value) for name, value in given.items()}
    path = texts.get("path", "")
    if path and texts.setdefault("topic", path) != path:
        raise InvalidRequest(f"topic: {texts['topic']!r}, but load/save was called with {path!r}")
    uses = {option.name: option.uses for option in OPTIONS}
    for name in texts:
        if name in _FOREIGN or name.startswith("spark."):
            continue
        if name not in uses:
            raise InvalidRequest(f"{name}: no such option; there are {', '.join(sorted(uses))}")
        if use not in uses[name]:
            raise InvalidRequest(f"{name}: an option for {' and '.join(uses[name])} only, this is a {use}")
    return {name: text.strip() for name, text in texts.items() if name in uses}


def _url(texts: Mapping[str, str]) -> BrokerUrl:
    text = texts.get("url") or os.environ.get("TAILRACE_URL") or DEFAULT_URL
    url = parse_url(text)
    if not url.network:
        raise InvalidRequest(
            f"url: tailrace://host:port is needed, because Spark has many processes; not {shown(text)!r}"
        )
    given = {name: texts[name] for name in ("token", "ca", "cert", "key") if texts.get(name)}
    check_given(GivenAccess(**given), url)
    if "token" in given:
        given |= {"user": "", "password": ""}
    if "cert" in given:
        given.setdefault("key", "")
    return msgspec.structs.replace(url, **given)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _one_of(texts: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    text = texts.get(name, choices[0]).lower()
    if text not in choices:
        raise InvalidRequest(f"{name}: one of {', '.join(choices)}, not {text!r}")
    return text


def _flag(texts: Mapping[str, str], name: str, default: bool) -> bool:
    text = texts.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name}: true or false, not {text!r}")
    return text == "true"


def _count(texts: Mapping[str, str], name: str) -> int:
    return _number(texts.get(name, "0"), name)


def _number(text: str, name: str) -> int:
    return int(
        _checked(text, name, "a whole number, 0 or more", lambda: int(text), lambda n: 0 <= n <= ROWS_MAX)
    )


def _seconds(texts: Mapping[str, str]) -> float:
    text = texts.get("timeout_s", str(TIMEOUT_S))
    return float(
        _checked(text, "timeout_s", "seconds, above 0", lambda: float(text), lambda s: 0 < s < float("inf"))
    )


def _checked(
    text: str, name: str, wanted: str, convert: Callable[[], Any], holds: Callable[[Any], bool]
) -> Any:
    try:
        value = convert()
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise InvalidRequest(f"{name}: {wanted}, not {text!r}")
    return value
