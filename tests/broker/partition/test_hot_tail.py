"""The hot tail against a plain list of frames: what it holds, what it gives, its bound."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.broker.partition.hot_tail import HotTail
from tailrace.format import frame
from tailrace.format.frame import DATA, Frame, Header, crc32c, make


def data(base_offset: int, count: int, size: int) -> Frame:
    body = bytes(size)
    return make(Header(DATA, 0, size, crc32c(body), 0, base_offset, count, count), body)


frames = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 600)), max_size=150)


@given(frames, st.integers(0, 5000), st.integers(0, 50), st.data())
def test_holds_the_newest_within_its_bound(
    shapes: list[tuple[int, int]], bytes_max: int, start: int, choose: st.DataObject
) -> None:
    tail = HotTail(bytes_max, start)
    assert (tail.start_offset, tail.end_offset) == (start, start)
    pushed: list[Frame] = []
    for count, size in shapes:
        pushed.append(data(tail.end_offset, count, size))
        tail.push(pushed[-1])
        held = [item for item in pushed if item.header.base_offset >= tail.start_offset]
        assert sum(item.size for item in held) <= bytes_max
        older = pushed[len(pushed) - len(held) - 1] if len(held) < len(pushed) else None
        assert older is None or sum(item.size for item in held) + older.size > bytes_max
    if tail.start_offset == tail.end_offset:
        return
    offset = choose.draw(st.integers(tail.start_offset, tail.end_offset - 1))
    room = choose.draw(st.integers(1, 4000))
    parts, size, rows = tail.read(offset, room)
    raw = b"".join(parts)
    headers = [header for header, _ in frame.walk(raw)]
    first = next(item for item in pushed if item.header.base_offset <= offset < item.header.end_offset)
    expected = [item.header for item in pushed if item.header.base_offset >= first.header.base_offset]
    assert headers == expected[: len(headers)]
    assert (size, rows) == (len(raw), sum(header.count for header in headers))
    assert size <= room or len(headers) == 1
    assert len(headers) == len(expected) or size + expected[len(headers)].size > room


def test_clear_starts_at_the_given_end() -> None:
    tail = HotTail(10_000, 0)
    tail.push(data(0, 3, 10))
    tail.clear(7)
    assert (tail.start_offset, tail.end_offset) == (7, 7)
    tail.push(data(7, 1, 10))
    assert tail.read(7, 1)[2] == 1
