"""Lost ranges of a log: found without a change, and accepted in steps that a crash may interrupt anywhere.

*Finding.* `find_losses` walks through every segment. At a bad place it continues behind the frame, if the
frame's header is good; otherwise at the next barrier of the segment. A barrier carries the number of its
segment, so that no message body can pose as one. Everything between is a *lost range* of entries and offsets.
Suppose the header of entry 2 is damaged; entries 2 to 4 held the offsets 20 to 34:

    before    B  F0  F1  ✗✗✗✗✗✗✗✗✗✗✗✗  B  F5  F6        the barrier says: entry 5 and offset 35 come next
    after     B  F0  F1  LOST [2, 5)   B  F5  F6        LOST: 3 entries, up to offset 35

The LOST frame takes exactly the place of the damaged bytes. So every other frame stays byte for byte where it
is, the log has no gap in its numbers, and no offset is ever used again. Where only a body is damaged, the
header tells the numbers, and the loss is one frame.

At the end of the log nothing may tell how many messages there were. Then an upper bound is taken: the numbers
that the durable mark and the snapshots know, plus as many as a segment can hold. The mark alone is no bound,
because it lags behind the last appends; but it names each new segment before that segment gets frames, so
there was no segment after the one that it names.

*Accepting.* `accept_losses` makes each step durable before the next:

1. the damaged bytes are copied aside (`lost-…`), for somebody who can save more from them;
2. the file `loss` says which offsets are lost: the intent;
3. each damaged segment is replaced by its repaired copy, in one rename, after its index was removed;
4. the durable mark is replaced if the log has another end now; unusable snapshots are renamed;
5. the quarantine note is removed.

A crash before the end of step 5 leaves a log that opens as damaged, or one that opens well with
`Recovery.lost` set. Either way the loss stays known, and accepting again completes the work. The owner of the
log then appends a fact about the loss; when that is durable, `loss` is removed
(`PartitionLog.loss_recorded`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import msgspec

from tailrace.errors import Corrupt
from tailrace.format.frame import (
    ALIGNMENT,
    BARRIER,
    DATA,
    HEADER_BYTES,
    LENGTH_MAX,
    LOST,
    Header,
    crc32c,
    pack,
    padded,
    parse,
)
from tailrace.ports import Disk, Losses, LostRange
from tailrace.storage.files.key_rows import keys_name
from tailrace.storage.files.log_folder import QUARANTINE_NAME, LogFolder
from tailrace.storage.files.mark import MARK_NAME, SLOT_BYTES, Mark, encode
from tailrace.storage.files.opening import read_mark
from tailrace.storage.files.scan import barrier, barriers_in, damaged, look_behind, scan
from tailrace.storage.files.segment import decode_index, first_entry, index_name, log_name
from tailrace.storage.snapshots import load_snapshot, snapshot_entry
from tailrace.storage.storage_tuning import CHUNK, ENTRIES_MAX, OFFSETS_MAX

LOSS_NAME = "loss"


class Intent(msgspec.Struct, frozen=True):
    """The file `loss`: offsets whose loss was accepted and is not a fact in the log yet."""

    spans: list[int]


class Hole(msgspec.Struct):
    """Bytes of a segment file that have to be replaced."""

    position: int
    end: int
    """End of the bytes; may lie behind the end of the file."""
    why: str
    first_entry: int
    end_entry: int
    first_offset: int
    end_offset: int
    exact: bool = True
    barrier: bool = False
    """Whether only a barrier is damaged: then nothing is lost."""


class Walked(msgspec.Struct):
    """One segment file after the walk."""

    first: int
    file_bytes: int
    entry: int
    offset: int
    holes: list[Hole]
    base: int = 0
    """First offset of the segment."""
    nonce: int = 0
    origin: int = 0
    end: int = 0
    """Position behind the last good frame or barrier."""
    used: int = 0
    """Position behind the last byte that is not zero."""
    synced: int = 0
    open_end: str = ""
    """Why the file could not be read to its end; empty if it could."""


class RepairPlan(msgspec.Struct):
    """The damage of a log, and the files that replace the damaged ones."""

    segments: list[Walked]
    ranges: list[LostRange]
    snapshots: list[str]
    """Names of snapshot files to be put aside."""
    mark: Mark | None = None
    new_end: bool = False


def find_losses(
    disk: Disk, folder: str, entries: Collection[int], snapshots: Collection[int], bound: int
) -> RepairPlan:
    """Find the lost ranges of a log; changes nothing. `entries` name frames that are whole but cannot be
    applied, `snapshots` such snapshots. `bound` is an offset above all that the log can have had, for a log
    of which nothing is left."""
    names = disk.list(folder)
    firsts = sorted(entry for name in names if (entry := first_entry(name)) is not None)
    mark = read_mark(disk, folder) if MARK_NAME in names else None
    nonces = {mark.segment: mark.nonce} if mark is not None and mark.nonce else {}
    plan = RepairPlan([], [], [name for name in names if snapshot_entry(name) in snapshots], mark)
    known = list(_good_snapshots(disk, folder, [name for name in names if name not in plan.snapshots]))
    offset: int | None = None
    for first, following in pairwise([*firsts, None]):
        assert first is not None
        base = _base_offset(disk, folder, first)
        walked = _walk(
            disk, f"{folder}/{log_name(first)}", first, base if base is not None else offset, nonces, entries
        )
        if following is not None:
            _close(walked, following, _base_offset(disk, folder, following))
        plan.segments.append(walked)
        offset = walked.offset
    _in_front(plan, known)
    _at_the_end(plan, known, bound)
    for walked in plan.segments:
        for hole in walked.holes:
            if not hole.barrier:
                path = f"{folder}/{log_name(walked.first)}"
                place = (path, hole.position, max(0, min(hole.end, walked.file_bytes) - hole.position))
                numbers = (hole.first_entry, hole.end_entry, hole.first_offset, hole.end_offset)
                plan.ranges.append(LostRange(*numbers, *place, hole.why, hole.exact))
    return plan


def accept_losses(disk: Disk, folder: LogFolder, plan: RepairPlan, nonce: int) -> Losses:
    """Repair a closed log as planned."""
    if not disk.list(folder.folder):
        disk.make_folder(folder.folder)
    kept = []
    for walked in plan.segments:
        for hole in walked.holes:
            end = min(hole.end, walked.file_bytes)
            if end > hole.position:
                name = f"lost-{walked.first:020d}-{hole.position}.bytes"
                folder.save(name, [_bytes(disk, folder.path(log_name(walked.first)), hole.position, end)])
                kept.append(folder.path(name))
    spans = [(lost.first_offset, lost.end_offset) for lost in plan.ranges]
    spans += _pairs(read_intent(disk, folder.folder))
    if lost := _joined(spans):
        folder.save(LOSS_NAME, [msgspec.json.encode(Intent(lost))])
    for walked in plan.segments:
        if walked.holes:
            folder.remove(index_name(walked.first), keys_name(walked.first))
            folder.save(log_name(walked.first), _repaired(disk, folder, walked, nonce))
    if plan.new_end:
        folder.save(MARK_NAME, _marks(plan, nonce))
    for name in plan.snapshots:
        disk.rename(folder.path(name), folder.path(f"lost-{name}"))
        kept.append(folder.path(f"lost-{name}"))
    folder.sync_names()
    folder.remove(QUARANTINE_NAME)
    return Losses(plan.ranges, kept)


def read_intent(disk: Disk, folder: str) -> list[int]:
    """Offsets, as flat spans, whose loss was accepted and is not a fact in the log yet."""
    if LOSS_NAME not in disk.list(folder):
        return []
    handle = disk.open(f"{folder}/{LOSS_NAME}")
    try:
        raw = disk.read(handle, 0, disk.size(handle))
        return msgspec.json.decode(raw, type=Intent).spans
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{folder}/{LOSS_NAME} cannot be read: {error}", path=LOSS_NAME, position=0) from error
    finally:
        disk.close(handle)


# ------------------------------------------------------------------------------------------------ walking


def _good_snapshots(disk: Disk, folder: str, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    for name in names:
        if snapshot_entry(name) is not None:
            try:
                snapshot = load_snapshot(disk, f"{folder}/{name}")
            except Corrupt:
                continue
            yield snapshot.entry, snapshot.offset


def _base_offset(disk: Disk, folder: str, first: int) -> int | None:
    """The first offset of a segment, from its first barrier or its index; None when neither can be read."""
    handle = disk.open(f"{folder}/{log_name(first)}")
    try:
        header = parse(disk.read(handle, 0, HEADER_BYTES))
        if header.kind == BARRIER and header.entry == first:
            return header.base_offset
    except Corrupt:
        pass  # The index may know.
    finally:
        disk.close(handle)
    if index_name(first) not in disk.list(folder):
        return None
    handle = disk.open(f"{folder}/{index_name(first)}")
    try:
        segment = decode_index(disk.read(handle, 0, disk.size(handle)))
        return segment.base_offset if segment.first_entry == first else None
    except Corrupt:
        return None
    finally:
        disk.close(handle)


def _walk(
    disk: Disk, path: str, first: int, offset: int | None, nonces: dict[int, int], unfit: Collection[int]
) -> Walked:
    handle = disk.open(path)
    try:
        file_bytes = disk.size(handle)
        walked = Walked(first, file_bytes, first, offset or 0, [], offset or 0, nonces.get(first, 0))
        start = 0
        while start < file_bytes:
            try:
                _walk_frames(disk, handle, path, start, walked, unfit)
                break
            except Corrupt as error:
                bad = error.position
                behind = look_behind(disk, handle, bad, file_bytes, walked.nonce or None)
                walked.synced = max(walked.synced, behind.synced)
                if behind.used == bad:
                    break  # Nothing but the zeros of reserved space.
                hole = _resumed(disk, handle, bad, walked, error.message)
                if hole is None:
                    walked.used, walked.open_end = behind.used, error.message
                    header = _parsed(disk.read(handle, bad, HEADER_BYTES))
                    if header is not None:  # Its body may end in zeros.
                        walked.used = max(walked.used, min(bad + header.size, file_bytes))
                    break
                walked.holes.append(hole)
                walked.entry, walked.offset, start = hole.end_entry, hole.end_offset, hole.end
                walked.end = hole.end
        walked.used = max(walked.used, walked.end)
        return walked
    finally:
        disk.close(handle)


def _walk_frames(
    disk: Disk, handle: int, path: str, start: int, walked: Walked, unfit: Collection[int]
) -> None:
    for header, position, _ in scan(disk, handle, path, start, walked.file_bytes):
        if header.entry != walked.entry:
            raise damaged(path, position, f"entry {header.entry} stands where {walked.entry} belongs")
        if header.kind == BARRIER:
            walked.nonce = walked.nonce or header.producer_id
            walked.origin = header.leader_epoch
            walked.synced = max(walked.synced, header.append_time_us)
            walked.end = position + header.size
            continue
        if position == 0:
            raise damaged(path, position, "the segment does not begin with a barrier")
        if header.kind == DATA and header.base_offset != walked.offset:
            text = f"offset {header.base_offset} stands where {walked.offset} belongs"
            raise damaged(path, position, text)
        entry, offset = walked.entry, walked.offset
        walked.entry, walked.offset = _after(header, offset)
        walked.end = position + header.size
        if entry in unfit:
            why = f"entry {entry} cannot be applied"
            numbers = (entry, walked.entry, offset, walked.offset)
            walked.holes.append(Hole(position, walked.end, why, *numbers))


def _after(header: Header, offset: int) -> tuple[int, int]:
    """The entry and the offset that follow a frame."""
    if header.kind == LOST:
        return header.entry + header.producer_id, header.timestamp_max_us
    return header.entry + 1, header.end_offset if header.kind == DATA else offset


def _resumed(disk: Disk, handle: int, bad: int, walked: Walked, why: str) -> Hole | None:
    """The hole from a bad place to the next place that can be read; None when there is none."""
    raw = disk.read(handle, bad, HEADER_BYTES)
    entry, offset = walked.entry, walked.offset
    header = _parsed(raw)
    if header is not None and header.entry == entry and header.kind != BARRIER and bad:
        end = bad + header.size
        right = header.kind != DATA or header.base_offset == offset
        if right and (end == walked.file_bytes or _parsed(disk.read(handle, end, HEADER_BYTES)) is not None):
            return Hole(bad, end, why, entry, _after(header, offset)[0], offset, _after(header, offset)[1])
    if header is None and len(raw) == HEADER_BYTES:
        kind, number = raw[5], int.from_bytes(raw[56:64], "little")  # If these bytes are good.
        behind = _parsed(disk.read(handle, bad + HEADER_BYTES, HEADER_BYTES))
        numbered = walked.nonce != 0 and number == walked.nonce
        fits = behind is not None and behind.kind != BARRIER and behind.entry == entry
        if (numbered or kind == BARRIER) and fits:
            return Hole(bad, bad + HEADER_BYTES, why, entry, entry, offset, offset, barrier=True)
    position = bad + ALIGNMENT
    while position < walked.file_bytes:
        chunk = disk.read(handle, position, min(CHUNK + HEADER_BYTES, walked.file_bytes - position))
        for at, found in barriers_in(chunk, position, walked.nonce or None):
            if found.entry >= entry and found.base_offset >= offset and at - bad >= 2 * HEADER_BYTES:
                return Hole(bad, at, why, entry, found.entry, offset, found.base_offset)
        position += CHUNK
    return None


def _parsed(raw: bytes) -> Header | None:
    try:
        return parse(raw)
    except Corrupt:
        return None


# ------------------------------------------------------------------------------------------ whole segments


def _close(walked: Walked, following: int, base: int | None) -> None:
    """Add a hole at the end of a segment that does not reach its successor."""
    offset = max(walked.offset, base) if base is not None else walked.offset
    if walked.entry < following or walked.open_end:
        why = walked.open_end or f"entries {walked.entry} to {following - 1} are missing"
        end = max(padded(walked.used), walked.end + HEADER_BYTES)
        exact = base is not None
        numbers = (walked.entry, following, walked.offset, offset)
        walked.holes.append(Hole(walked.end, end, why, *numbers, exact))
        walked.entry, walked.offset, walked.end, walked.open_end = following, offset, end, ""
    elif offset > walked.offset:
        text = f"a segment ends at offset {walked.offset}, the next begins at {offset}"
        raise Corrupt(f"{text}: this cannot be repaired here", path=log_name(walked.first), position=0)


def _in_front(plan: RepairPlan, known: Sequence[tuple[int, int]]) -> None:
    """If segments are missing in front, add one that holds nothing but a LOST frame."""
    mark, segments = plan.mark, plan.segments
    if not segments:
        return
    first = segments[0]
    origin = first.origin or (mark.origin if mark is not None else 0)
    start = max((entry + 1 for entry, _ in known), default=origin)
    if mark is not None and mark.nonce:
        start = min(start, mark.first) if first.first > mark.first else start
    if first.first > start:
        segments.insert(0, _made(start, first.first, 0, first.base, "the files in front are missing", origin))


def _made(entry: int, end_entry: int, offset: int, end_offset: int, why: str, origin: int) -> Walked:
    hole = Hole(0, 2 * HEADER_BYTES, why, entry, end_entry, offset, end_offset, exact=False)
    return Walked(entry, 0, end_entry, end_offset, [hole], origin=origin, end=2 * HEADER_BYTES)


def _at_the_end(plan: RepairPlan, known: Sequence[tuple[int, int]], bound: int) -> None:
    """If the last segment ends before what the durable mark and the snapshots know of, add a hole."""
    mark, segments = plan.mark, plan.segments
    entry = max((at + 1 for at, _ in known), default=0)
    offset = max((at for _, at in known), default=0)
    if not segments:
        if mark is not None and mark.nonce:
            entry, offset = max(entry, mark.entry) + ENTRIES_MAX, max(offset, mark.offset) + OFFSETS_MAX
        elif known:  # Nobody knows how old the newest snapshot was.
            entry, offset = entry + ENTRIES_MAX, max(offset + OFFSETS_MAX, bound)
        why = "all segments are missing" if mark is not None or known else "the whole log is missing"
        origin = mark.origin if mark is not None else 0
        start = min((at + 1 for at, _ in known), default=origin)
        if mark is not None and mark.nonce:
            start = min(start, mark.first)
        end_offset = max(offset, bound if mark is None and not known else offset)
        segments.append(_made(start, max(entry, start + 1), 0, end_offset, why, origin))
        plan.new_end = True
        return
    last = segments[-1]
    exact, used, synced = True, last.used, last.synced
    if mark is not None and mark.nonce and mark.segment >= last.first:
        here = mark.segment == last.first
        synced = max(synced, mark.position if here else last.end + 1)
        entry, offset = max(entry, mark.entry), max(offset, mark.offset)
        # The numbers are exact if the segment was synced whole and ends just there. If it ends earlier, in
        # zeros or at the end of the file, nobody knows what was appended after the mark was written.
        whole = here and mark.entry > mark.segment and padded(used) == mark.position
        exact = synced <= last.end or whole
    else:
        exact = synced <= last.end
    if synced <= last.end and entry <= last.entry:
        return  # What may be behind it is a torn tail.
    why = last.open_end or f"entries from {last.entry} on are missing at the end"
    end = max(padded(used), last.end + HEADER_BYTES)
    entry = max(entry, last.entry) + (0 if exact else ENTRIES_MAX)
    offset = max(offset, last.offset) + (0 if exact else OFFSETS_MAX)
    last.holes.append(
        Hole(last.end, end, why, last.entry, max(entry, last.entry + 1), last.offset, offset, exact)
    )
    last.entry, last.offset, last.end = max(entry, last.entry + 1), offset, end
    plan.new_end = True


# ------------------------------------------------------------------------------------------------ writing


def _repaired(disk: Disk, folder: LogFolder, walked: Walked, nonce: int) -> list[bytes]:
    """The bytes of a segment with LOST frames in its holes."""
    path, parts, at = folder.path(log_name(walked.first)), [], 0
    for hole in walked.holes:
        if hole.position > at:
            parts.append(_bytes(disk, path, at, hole.position))
        parts.append(_filling(walked, hole, walked.nonce or nonce))
        at = hole.end
    if at < walked.file_bytes:
        parts.append(_bytes(disk, path, at, walked.file_bytes))
    return parts


def _filling(walked: Walked, hole: Hole, nonce: int) -> bytes:
    size, made = hole.end - hole.position, b""
    if hole.barrier or not hole.position:
        made = barrier(hole.first_entry, hole.first_offset, 0, nonce, walked.origin)
        if hole.barrier:
            return made
    while len(made) < size:
        room = size - len(made) - HEADER_BYTES
        length = room if room <= LENGTH_MAX else LENGTH_MAX - HEADER_BYTES
        last = length == room
        entries = hole.end_entry - hole.first_entry if last else 0
        end_offset = hole.end_offset if last else hole.first_offset
        body = bytes(length)
        made += pack(
            Header(
                LOST,
                0,
                length,
                crc32c(body),
                hole.first_entry,
                hole.first_offset,
                producer_id=entries,
                timestamp_max_us=end_offset,
            )
        )
        made += body
    return made


def _marks(plan: RepairPlan, nonce: int) -> list[bytes]:
    last, sequence = plan.segments[-1], plan.mark.sequence if plan.mark is not None else 0
    mark = Mark(
        0,
        last.first,
        last.end,
        last.entry,
        last.offset,
        last.nonce or nonce,
        last.origin,
        plan.segments[0].first,
    )
    slots = [bytes(SLOT_BYTES), bytes(SLOT_BYTES)]
    for number in (sequence + 1, sequence + 2):
        raw, position = encode(number, mark)
        slots[position // SLOT_BYTES] = raw + bytes(SLOT_BYTES - len(raw))
    return slots


def _bytes(disk: Disk, path: str, start: int, end: int) -> bytes:
    handle = disk.open(path)
    try:
        return disk.read(handle, start, end - start)
    finally:
        disk.close(handle)


def _pairs(spans: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(spans[::2], spans[1::2], strict=True))


def _joined(spans: Sequence[tuple[int, int]]) -> list[int]:
    found: list[int] = []
    for first, end in sorted(span for span in spans if span[0] < span[1]):
        if found and first <= found[-1]:
            found[-1] = max(found[-1], end)
        else:
            found += (first, end)
    return found
