"""Whatever a peer sends and however it is cut is a message, the beginning of one, or refused with a code.

Covers the way of bytes through `format/wire.py` and `format/codec.py` together, before anybody is known.
"""

import itertools
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core.model.commands import Reply, Request
from tailrace.errors import InvalidRequest, TooLarge
from tailrace.format import codec
from tailrace.format.wire import (
    GREETING_BYTES_MAX,
    HEADER_BYTES_MAX,
    PREAMBLE,
    PREFIX,
    PREFIX_BYTES,
    SCRATCH_BYTES,
    Credentials,
    Hello,
    WireReader,
    prefix,
)

BODY_MAX = 256 * 1024
decode_hello = codec.decoder_of(Hello, "hello")

HELLOS = st.builds(
    Hello,
    st.lists(st.integers(0, 5), max_size=3),
    st.text(max_size=20),
    st.none() | st.builds(Credentials, st.text(max_size=20), st.text(max_size=20), st.text(max_size=20)),
).map(msgspec.msgpack.encode)
TAGS = [kind.__struct_config__.tag for kind in (*get_args(Request), *get_args(Reply))]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
HEADERS = (
    st.tuples(st.sampled_from(TAGS), st.lists(VALUES, max_size=8))
    .map(lambda made: msgspec.msgpack.encode([made[0], *made[1]]))
    .flatmap(lambda header: st.just(header) | changed(header))
)


def changed(data: bytes) -> st.SearchStrategy[bytes]:
    """The same with a byte of it exchanged, or without its end."""
    places = st.integers(0, max(0, len(data) - 1))
    exchanged = st.tuples(places, st.integers(0, 255)).map(
        lambda change: data[: change[0]] + bytes([change[1]]) + data[change[0] + 1 :]
    )
    return exchanged | places.map(lambda end: data[:end])


MESSAGES = st.builds(
    lambda header, body, number: prefix(header, len(body), number) + body,
    HEADERS | HELLOS,
    st.binary(max_size=50),
    st.integers(0, 2**64 - 1),
)
LENGTHS = st.sampled_from([0, 1, 20, 4096, 4097, 1 << 20, (1 << 20) + 1, 100 << 20, (1 << 32) - 1])
STREAMS = st.lists(
    MESSAGES
    | st.binary(max_size=60)
    | st.just(PREAMBLE)
    | st.builds(PREFIX.pack, LENGTHS, LENGTHS, st.integers(0, 2**64 - 1)),
    max_size=6,
).map(b"".join)


def outcome(data: bytes, cuts: list[int], *, greeted: bool) -> list[Any]:
    """What a listener makes of the bytes: requests and refusals, in order."""
    reader = WireReader(
        BODY_MAX if greeted else 0,
        preamble=b"" if greeted else PREAMBLE,
        header_bytes_max=HEADER_BYTES_MAX if greeted else GREETING_BYTES_MAX,
    )
    decode = codec.decode_request if greeted else decode_hello
    said: list[Any] = []
    position, sizes = 0, itertools.cycle(cuts)
    while position < len(data):
        window = reader.window()
        assert len(window) > 0
        count = min(next(sizes), len(window), len(data) - position)
        window[:count] = data[position : position + count]
        position += count
        try:
            for number, header, body in reader.filled(count):
                said.append((number, len(body), decoded(decode, header)))
        except (InvalidRequest, TooLarge) as error:
            return [*said, (error.code, error.message)]
        assert reader.expected_bytes <= (BODY_MAX if greeted else 0)
        assert len(reader._scratch) <= PREFIX_BYTES + max(SCRATCH_BYTES, HEADER_BYTES_MAX if greeted else 0)
    return said


def decoded(decode: Any, header: bytes) -> Any:
    try:
        return decode(header)
    except InvalidRequest as error:
        return error.message or "nothing"


@settings(max_examples=150)
@given(STREAMS, st.lists(st.integers(1, 70), min_size=1, max_size=5), st.booleans())
def test_any_stream_however_it_is_cut(data: bytes, cuts: list[int], greeted: bool) -> None:
    data = data if greeted else PREAMBLE + data
    whole = outcome(data, [len(data) + 1], greeted=greeted)
    assert repr(outcome(data, cuts, greeted=greeted)) == repr(whole)


@settings(max_examples=150)
@given(HEADERS | st.binary(max_size=80))
def test_any_header_is_decoded_or_refused(header: bytes) -> None:
    for decode in (codec.decode_request, codec.decode_reply, decode_hello):
        decoded(decode, header)


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    for decode in (codec.decode_request, codec.decode_reply, decode_hello):
        assert isinstance(said := decoded(decode, b"\x91" * depth + b"\x90"), str)
        assert said != "nothing"


def test_what_a_caller_shows_is_in_no_repr_and_in_no_refusal() -> None:
    """Also when the greeting is wrong in another place."""
    secret = "a-secret-that-nobody-else-has"
    hello = Hello([1], "client", Credentials("anna", secret, secret))
    assert secret not in repr(hello)
    raw = msgspec.to_builtins(hello)
    for place in range(1, len(raw)):
        for wrong in (7, {}, [secret], {secret: secret}):
            wrong_hello = [*raw[:place], wrong, *raw[place + 1 :]]
            said = decoded(decode_hello, msgspec.msgpack.encode(wrong_hello))
            assert not isinstance(said, str) or secret not in said, wrong_hello
