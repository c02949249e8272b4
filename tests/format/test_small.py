"""The short check of small bodies agrees with the long one on everything, sound or hostile."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model.identifiers import HAS_KEY, BatchView
from tailrace.errors import TailraceError
from tailrace.format import batch, small
from tests.format.hostile import mutate


def encoded(
    values: list[bytes], keys: list[bytes] | None, time_us: int = 1_700_000_000_000_000
) -> tuple[int, bytes]:
    ids = batch.make_ids(len(values), 1_700_000_000_000, 7, 7)
    columns, body = batch.encode(values, ids=ids, timestamps=1_700_000_000_000_000, keys=keys)
    return columns, bytes(body)


def shown(view: BatchView) -> tuple[int, ...]:
    return (
        view.count,
        view.columns,
        view.nbytes,
        view.timestamp_max_us,
        view.key_bytes_max,
        view.header_bytes_max,
        view.value_bytes_max,
    )


def outcome(body: bytes, columns: int, *, quick: bool) -> tuple[int, ...] | type[TailraceError]:
    try:
        view = small.measure(body, columns) if quick else batch.open_body(body, columns)[0]
    except TailraceError as error:
        return type(error)
    return shown(view)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=12), st.booleans())
def test_sound_bodies_measure_the_same(values: list[bytes], keyed: bool) -> None:
    columns, body = encoded(values, values if keyed else None)
    assert outcome(body, columns, quick=True) == outcome(body, columns, quick=False)
    quick = small._quick(body, columns)
    assert (quick is not None) == (len(values) <= small.ROWS_MAX)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=12), st.booleans())
def test_plain_rows_have_the_values_of_the_opened_batch(values: list[bytes], keyed: bool) -> None:
    columns, body = encoded(values, values if keyed else None)
    rows = small.plain_rows(memoryview(body), columns)
    assert (rows is not None) == (len(values) <= small.ROWS_MAX)
    assert rows is None or rows.values == values == batch.decode(body, columns).column("value").to_pylist()


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bodies_have_the_rows_of_the_opened_batch_or_none(seed: int) -> None:
    rng = random.Random(seed)
    plain = 0
    for _ in range(1500):
        values = [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 6))]
        columns, body = encoded(values, values if rng.random() < 0.5 else None)
        damaged = mutate(rng, body)
        rows = small.plain_rows(damaged, columns)
        if rows is not None:
            plain += 1
            assert rows.values == batch.decode(damaged, columns).column("value").to_pylist()
    assert plain > 50


@pytest.mark.parametrize("seed", range(4))
def test_hostile_bodies_get_the_same_answer(seed: int) -> None:
    rng = random.Random(seed)
    accepted = 0
    for _ in range(1500):
        values = [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 6))]
        columns, body = encoded(values, values if rng.random() < 0.5 else None)
        damaged = mutate(rng, body)
        quick = outcome(damaged, columns, quick=True)
        assert quick == outcome(damaged, columns, quick=False), damaged.hex()
        accepted += isinstance(quick, tuple)
    assert accepted, "some mutations touch nothing but payload, and those bodies are sound"


@given(st.integers(-5, 5), st.integers(-5, 70), st.booleans())
def test_moved_offsets(first: int, last: int, keyed: bool) -> None:
    columns, body = encoded([b"0123456789" * 3, b"abc"], [b"key-1", b"k2"] if keyed else None)
    message = small.inspect(body, columns)
    at = message.start + message.buffers[2 * (8 if columns & HAS_KEY else 3)]
    forged = bytearray(body)
    forged[at : at + 4] = first.to_bytes(4, "little", signed=True)
    forged[at + 8 : at + 12] = last.to_bytes(4, "little", signed=True)
    assert outcome(bytes(forged), columns, quick=True) == outcome(bytes(forged), columns, quick=False)


@given(st.one_of(st.binary(max_size=200), st.integers(0, 70_000).map(bytes)), st.integers(0, 2**52))
def test_one_plain_message_is_encoded_as_in_any_batch(value: bytes, time_us: int) -> None:
    message_id = batch.make_ids(1, time_us // 1000, 7, 3)
    assert batch.encode_one(value, message_id, time_us) == bytes(
        batch.encode([value], ids=message_id, timestamps=time_us)[1]
    )
