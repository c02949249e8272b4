"""Frames: round trip, every flipped bit and every missing byte is noticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import Corrupt
from tailrace.format import frame

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def frames(draw: st.DrawFn) -> frame.Frame:
    body = draw(st.binary(max_size=200))
    header = frame.Header(
        kind=draw(st.sampled_from(sorted(frame.KINDS))),
        flags=draw(st.integers(0, 2**16 - 1)),
        length=len(body),
        body_crc=frame.crc32c(body),
        entry=draw(U64),
        base_offset=draw(U64),
        span=draw(U32),
        count=draw(U32),
        leader_epoch=draw(U64),
        append_time_us=draw(I64),
        producer_id=draw(U64),
        producer_epoch=draw(U32),
        producer_sequence=draw(U32),
        timestamp_max_us=draw(I64),
    )
    return frame.make(header, body)


def small() -> bytes:
    body = b"seventeen bytes.."
    made = frame.make(
        frame.Header(frame.DATA, 5, len(body), frame.crc32c(body), 7, 100, 3, 3, 2, 10**15), body
    )
    return b"".join(made.parts())


def read(data: bytes) -> tuple[frame.Header, bytes]:
    header = frame.parse(data)
    return header, bytes(frame.check_body(header, data))


@given(st.lists(frames(), max_size=5))
def test_frames_come_back_as_they_were(made: list[frame.Frame]) -> None:
    data = b"".join(bytes(part) for one in made for part in one.parts())
    assert len(data) == sum(one.size for one in made)
    assert len(data) % frame.ALIGNMENT == 0
    assert [(header, bytes(body)) for header, body in frame.walk(data)] == [
        (one.header, bytes(one.body)) for one in made
    ]


def test_every_flipped_bit_is_noticed() -> None:
    good = small()
    assert read(good)[1] == b"seventeen bytes.."
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            read(bytes(bad))


def test_every_truncation_is_noticed() -> None:
    good = small()
    for length in range(len(good)):
        with pytest.raises(Corrupt, match="cut short"):
            read(good[:length])


def test_zeros_are_no_frame() -> None:
    with pytest.raises(Corrupt, match="no frame"):
        frame.parse(bytes(4096))


@given(st.binary(max_size=400), st.integers(0, 300))
def test_any_bytes_are_a_frame_or_corrupt(data: bytes, position: int) -> None:
    with pytest.raises(Corrupt):
        frame.check_body(frame.parse(data, position), data, position)


@given(st.binary(max_size=300), st.data())
def test_a_sound_header_does_not_make_its_body_sound(noise: bytes, data: st.DataObject) -> None:
    """A header with a right checksum and lies in it: the body decides."""
    length = data.draw(st.integers(0, frame.LENGTH_MAX))
    header = frame.Header(frame.DATA, 0, length, data.draw(U32), 0)
    whole = frame.pack(header) + noise
    found = frame.parse(whole)
    try:
        body = frame.check_body(found, whole)
    except Corrupt:
        return
    assert len(body) == length
    assert frame.crc32c(body) == header.body_crc
