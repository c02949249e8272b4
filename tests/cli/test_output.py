"""What is printed: escapes, tables, spans of time and JSON records.

Also covers `cli/moments.py` and `cli/records.py`.
"""

import contextlib
import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cli.moments import iso, parse_moment, parse_point, parse_span
from tailrace.cli.output import Output, printable, printable_bytes
from tailrace.cli.records import bytes_field, parse_headers, parse_line, parse_settings
from tailrace.errors import InvalidRequest

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"plain", "plain"),
        ("größe 日本 😀".encode(), "größe 日本 😀"),
        (b"a\tb\nc\rd\\e", "a\\tb\\nc\\rd\\\\e"),
        (b"\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        (b"\x00\x7f", "\\x00\\x7f"),
        (b"\xff\xfe ok", "\\xff\\xfe ok"),
        ("\u202eevil\u2028\x9b31m".encode(), "\\u202eevil\\u2028\\x9b31m"),
        (b"\xed\xb2\x80", "\\xed\\xb2\\x80"),
        ("\U000e0001".encode(), "\\U000e0001"),
    ],
)
def test_escapes(data: bytes, shown: str) -> None:
    assert printable_bytes(data) == shown


@given(st.binary(max_size=60))
def test_no_bytes_can_steer_a_terminal_and_none_look_alike(data: bytes) -> None:
    shown = printable_bytes(data)
    assert shown.isprintable()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return
    # The escapes are Python's own, so reading them back gives the text: no two texts look the same.
    assert shown.encode("latin-1", "backslashreplace").decode("unicode_escape") == text


def test_plain_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).table(["name", "count"], [["a", 5], ["long\nname", 1234], [None, None]])
    assert (
        capsys.readouterr().out
        == "NAME        COUNT\na               5\nlong\\nname   1234\n-               -\n"
    )


def test_empty_table_has_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).table(["name", "count"], [])
    assert capsys.readouterr().out == "NAME  COUNT\n"


def test_rich_table_shows_markup_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=False)
    output.terminal = True
    output.table(["name"], [["[red]x[/red]"]])
    assert "[red]x[/red]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("30s", timedelta(seconds=30)),
        ("15m", timedelta(minutes=15)),
        ("1h", timedelta(hours=1)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(weeks=2)),
    ],
)
def test_spans(text: str, expected: timedelta) -> None:
    assert parse_span(text, "--ttl") == expected
    assert parse_moment("-" + text, NOW, "--from") == NOW - expected


@pytest.mark.parametrize("text", ["", "5", "h", "1.5h", "1h30m", "-1h", "1 h", "٣s", "999999999w"])
def test_spans_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--ttl"):
        parse_span(text, "--ttl")


def test_points() -> None:
    assert parse_point("earliest", NOW, "--from") == "earliest"
    assert parse_point("latest", NOW, "--from") == "latest"
    assert parse_point("1500", NOW, "--from") == 1500
    assert parse_point("2026-01-31", NOW, "--from") == datetime(2026, 1, 31, tzinfo=UTC)
    assert parse_point("2026-01-31T12:00:00Z", NOW, "--from") == NOW
    assert parse_point("2026-01-31T13:00:00+01:00", NOW, "--from") == NOW
    for text in ("", "first", "-5", "1e3", "-99999999w", "2026-13-01"):
        with pytest.raises(InvalidRequest, match="--from"):
            parse_point(text, NOW, "--from")


def test_times_are_printed_in_utc() -> None:
    local = datetime(2026, 1, 31, 13, 0, 0, 5, tzinfo=timezone(timedelta(hours=1)))
    assert iso(local) == "2026-01-31T12:00:00.000005Z"


@given(
    st.binary(max_size=40),
    st.none() | st.binary(max_size=10),
    st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5))),
)
def test_records_keep_every_byte(value: bytes, key: bytes | None, headers: list[tuple[str, bytes]]) -> None:
    record = {
        **bytes_field("value", value),
        **bytes_field("key", key),
        "headers": [{"name": name, **bytes_field("value", data)} for name, data in headers],
    }
    fields = parse_line(json.dumps(record).encode())
    assert fields["value"] == value
    assert fields.get("key") == key
    assert fields.get("headers", []) == headers


def test_every_field_of_a_line() -> None:
    line = (
        b'{"value": "v", "key_base64": "/w==", "headers": {"a": "b"}, "timestamp": "2026-01-31T12:00:00Z",'
        b' "priority": 1, "partition": 2, "dedup_id": "d", "expires_at": 1769860800000001,'
        b' "topic": "old", "offset": 9, "sequence": 10, "id": "x", "append_time": "y"}'
    )
    assert parse_line(line) == {
        "value": b"v",
        "key": b"\xff",
        "headers": [("a", b"b")],
        "timestamp": NOW,
        "priority": 1,
        "partition": 2,
        "dedup_id": b"d",
        "expires_at": NOW + timedelta(microseconds=1),
    }


def test_null_is_a_tombstone() -> None:
    assert parse_line(b'{"key": "k", "value": null}') == {"key": b"k", "value": None}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "not a message"),
        (b"plain", "not a message"),
        (b'"text"', "not a message"),
        (b"{}", "neither"),
        (b'{"value": "a", "value_base64": "YQ=="}', "both"),
        (b'{"value_base64": "%%"}', "not base64"),
        (b'{"value": 5}', r"\$\.value"),
        (b'{"value": "a", "prority": 1}', "prority"),
        (b'{"value": "a", "priority": "high"}', "priority"),
        (b'{"value": "a", "timestamp": "yesterday"}', "timestamp"),
        (b'{"value": "a", "timestamp": 99999999999999999999}', "timestamp"),
        (b'{"value": "a", "headers": [{"value": "b"}]}', "name"),
        (b'{"value": "\xff"}', "not a message"),
    ],
)
def test_lines_that_are_refused(line: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_line(line)


@given(st.binary(max_size=80))
def test_any_line_is_a_message_or_refused(line: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert "value" in parse_line(line)


def test_settings_and_headers() -> None:
    texts = ["retention-ms=1000", "durability=interval", "key_index=true", "retention_bytes=null", "x=a=b"]
    assert parse_settings(texts) == {
        "retention_ms": 1000,
        "durability": "interval",
        "key_index": True,
        "retention_bytes": None,
        "x": "a=b",
    }
    assert parse_headers(["a=1", "a=", "b=x=y"]) == [("a", b"1"), ("a", b""), ("b", b"x=y")]
    with pytest.raises(InvalidRequest, match="timeout"):
        parse_settings(["timeout=5"])
    for wrong in ("a", "=b"):
        with pytest.raises(InvalidRequest, match="--header"):
            parse_headers([wrong])
        with pytest.raises(InvalidRequest, match="--option"):
            parse_settings([wrong])


def test_printable_leaves_ordinary_text_alone() -> None:
    assert printable("orders/eu-1.dlq") == "orders/eu-1.dlq"
