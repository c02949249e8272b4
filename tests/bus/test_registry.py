"""Types on the bus: names, versions, codecs, and what counts as poison.

Also covers `bus/payloads.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tailrace.bus.registry import TypeRegistry, Undecodable
from tailrace.errors import InvalidRequest


class Placed(msgspec.Struct):
    order: int
    items: list[str] = []


@dataclass
class Shipped:
    order: int


class Paid(BaseModel):
    order: int
    amount: float


class Row(TypedDict):
    order: int


def make() -> TypeRegistry:
    registry = TypeRegistry()
    registry.add(Placed, "order.placed", 1, "events", "order")
    registry.add(Shipped, "Shipped", 1, "events", None)
    registry.add(Paid, "Paid", 1, "events", lambda paid: f"pay-{paid.order}")
    registry.add(bytes, "raw", 1, "events", None)
    return registry


@given(st.integers(-(2**53), 2**53), st.lists(st.text()))
def test_values_come_back_as_their_type(order: int, items: list[str]) -> None:
    registry = make()
    for value in (Placed(order, items), Shipped(order), Paid(order=order, amount=1.5), b"\x00raw"):
        entry, body, headers = registry.encode(value)
        name, version, back = registry.decode(body, headers)
        assert (name, version, back) == (entry.name, 1, value)
        assert type(back) is type(value)


def test_keys_come_from_a_field_or_a_function() -> None:
    registry = make()
    assert registry.of_value(Placed(7)).key(Placed(7)) == b"7"
    assert registry.of_value(Paid(order=7, amount=1)).key(Paid(order=7, amount=1)) == b"pay-7"
    assert registry.of_value(Shipped(7)).key(Shipped(7)) is None


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{}", []),
        (b"not json", [("tailrace-type", b"order.placed")]),
        (b'{"order": "seven"}', [("tailrace-type", b"order.placed")]),
        (b'{"order": "x", "amount": 1}', [("tailrace-type", b"Paid")]),
        (None, [("tailrace-type", b"order.placed")]),
        (b"{}", [("tailrace-type", b"order.placed"), ("tailrace-version", b"-1")]),
        (b"{}", [("tailrace-type", b"order.placed"), ("tailrace-content", b"pickle")]),
        (b'{"order": 1}', [("tailrace-type", b"order.placed"), ("tailrace-version", b"9")]),
        (b"\xff", [("tailrace-type", b"never.heard.of")]),
    ],
)
def test_what_cannot_be_read_is_poison(body: bytes | None, headers: list[tuple[str, bytes]]) -> None:
    with pytest.raises(Undecodable):
        make().decode(body, headers)


def test_an_unknown_name_gives_plain_data() -> None:
    assert make().decode(b'{"a": 1}', [("tailrace-type", b"other")]) == ("other", 1, {"a": 1})


def test_old_versions_are_raised_step_by_step() -> None:
    registry = TypeRegistry()
    registry.add(Placed, "order.placed", 3, "events", None)

    def to_2(data: dict[str, Any]) -> dict[str, Any]:
        return {"order": data["number"]}

    def to_3(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "items": ["from 2"]}

    registry.upcast("order.placed", 1, to_2)
    registry.upcast("order.placed", 2, to_3)
    headers = [("tailrace-type", b"order.placed"), ("tailrace-version", b"1")]
    assert registry.decode(b'{"number": 5}', headers)[1:] == (3, Placed(5, ["from 2"]))
    with pytest.raises(Undecodable, match="KeyError"):
        registry.decode(b"{}", headers)
    bare = TypeRegistry()
    bare.add(Placed, "order.placed", 2, "events", None)
    with pytest.raises(Undecodable, match="no upcaster"):
        bare.decode(b"{}", headers)


def test_unions_and_names_choose_types() -> None:
    registry = make()
    assert registry.names_of([Placed | Shipped, "Paid", "foreign"]) == [
        ("order.placed", "events"),
        ("Shipped", "events"),
        ("Paid", "events"),
        ("foreign", None),
    ]


def test_mistakes_are_told_at_once() -> None:
    registry = make()
    with pytest.raises(InvalidRequest, match="registered already"):
        registry.add(int, "Paid", 1, "events", None)
    with pytest.raises(InvalidRequest, match="not on this bus"):
        registry.encode(object())
    with pytest.raises(InvalidRequest, match="version"):
        registry.add(dict, "d", 0, "events", None)
    registry.upcast("Paid", 1, dict)
    with pytest.raises(InvalidRequest, match="already"):
        registry.upcast("Paid", 1, dict)
    with pytest.raises(InvalidRequest, match="version: a whole number"):
        registry.add(dict, "d", "2", "events", None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="key: the name of a field"):
        registry.add(dict, "d", 1, "events", 5)
    for kind in (Row, list[int], int | str):
        with pytest.raises(InvalidRequest, match="do not tell that they are of it"):
            registry.add(kind, "d", 1, "events", None)
