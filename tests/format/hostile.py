"""Throws mutated bodies at the decoders; run as a program, because a bad decoder takes the process with it.

`python -m tests.format.hostile SEED CASES` prints each case before it runs, so the last line names the
culprit, and `done` with the growth of peak memory at the end. A case follows from the seed and its number.
"""

import faulthandler
import random
import resource
import struct
import sys

import pyarrow as pa

from tailrace.core.model.identifiers import HAS_OFFSET_DELTA
from tailrace.errors import Corrupt, InvalidRequest, TooLarge
from tailrace.format import batch, frame

NUMBERS = [0, 1, -1, 2, 7, 8, 63, 64, 65, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
LONGS = [*NUMBERS, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**31), -8, -64, 48 << 20, 100_000, 100_001]
ADDRESS_SPACE = 3 << 30


def sample(rng: random.Random) -> tuple[int, bytes]:
    """A good body of random columns, by the direct writer, by pyarrow, or compressed."""
    count = rng.choice([1, 2, 3, 9, 40])

    def items(size: int) -> list[bytes | None]:
        return [None if rng.random() < 0.2 else rng.randbytes(rng.randrange(size)) for _ in range(count)]

    options = {
        "keys": items(9),
        "headers": [[("n", b"v")] * rng.randrange(3) for _ in range(count)],
        "priorities": [rng.randrange(5) for _ in range(count)],
        "deliver_at": [rng.randrange(10**15) for _ in range(count)],
        "expires_at": [None if rng.random() < 0.3 else 10**15 for _ in range(count)],
        "dedup_ids": items(9),
    }
    options = {name: column for name, column in options.items() if rng.random() < 0.5}
    values = items(30) if "keys" in options else [rng.randbytes(rng.randrange(30)) for _ in range(count)]
    compression = rng.choice([None, None, None, "lz4", "zstd"])
    ids = batch.make_ids(count, 10**12, rng.getrandbits(62), 1)
    columns, body = batch.encode(values, ids=ids, timestamps=10**15, compression=compression, **options)  # type: ignore[arg-type]
    if compression is None and rng.random() < 0.3:
        body = memoryview(batch.decode(body, columns).serialize())
    return columns, bytes(body)


def mutate(rng: random.Random, body: bytes) -> bytes:
    """One or several changes: numbers of the metadata, offsets, lengths, any byte, the end."""
    data = bytearray(body)
    metadata = min(len(data), 8 + struct.unpack_from("<I", data, 4)[0])
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        kind = rng.randrange(7)
        if kind == 0:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 1:
            data[rng.randrange(metadata)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            struct.pack_into("<q", data, rng.randrange(0, metadata - 8, 8), number(rng, LONGS, 64, len(body)))
        elif kind == 3:
            struct.pack_into(
                "<i", data, rng.randrange(0, metadata - 4, 4), number(rng, NUMBERS, 32, len(body))
            )
        elif kind == 4:
            at = rng.randrange(metadata - 4, len(data) - 4) // 4 * 4
            struct.pack_into("<i", data, at, number(rng, NUMBERS, 32, len(body)))
        elif kind == 5:
            at = rng.randrange(metadata - 8, len(data) - 8) // 8 * 8
            struct.pack_into("<q", data, at, number(rng, LONGS, 64, len(body)))
        else:
            struct.pack_into(
                "<H", data, rng.randrange(0, min(metadata, 120), 2), rng.choice([0, 4, 8, 12, 65535])
            )
    if rng.random() < 0.1:
        data = (
            data[: rng.randrange(len(data))]
            if rng.random() < 0.5
            else data + rng.randbytes(rng.randrange(80))
        )
    return bytes(data)


def number(rng: random.Random, known: list[int], bits: int, length: int) -> int:
    """A number worth trying, as a signed one of so many bits."""
    value = rng.choice(
        [*known, length, length - 64, rng.randrange(length), rng.randrange(64), -rng.randrange(64)]
    )
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def use(columns: int, body: bytes) -> bool:
    """What a broker and a reader do with a body in a frame of right checksums; True if the broker took it."""
    taken = read = True
    try:
        batch.open_body(body, columns, want_keys=True)
    except (InvalidRequest, TooLarge):
        taken = False
    try:
        found = batch.decode(body, columns)
    except Corrupt:
        read = False
    assert read or not taken, "the broker took what a reader refuses"
    if read:
        touch(found)
        rows = found.num_rows
        header = frame.Header(frame.DATA, columns, len(body), frame.crc32c(body), 0, 5, 2 * rows, rows)
        whole = b"".join(bytes(part) for part in frame.make(header, body).parts())
        ((header, stored),) = frame.walk(whole)
        batch.view_of(header, stored, want_keys=True)
        batch.with_positions(batch.decode(stored, columns), header, "topic", 0)
        batch.take(stored, columns, [0, rows - 1])
    return taken


def touch(found: pa.RecordBatch) -> None:
    """Read every byte of every column."""
    for column in found.columns:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.int64())
        column.to_pylist()


def main(seed: int, cases: int) -> None:
    """Run the cases one after another."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    use(*sample(random.Random(0)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = 0
    for case in range(cases):
        print(f"seed {seed} case {case}", flush=True)
        rng = random.Random(f"{seed}/{case}")
        columns, body = sample(rng)
        if rng.random() < 0.05:
            columns ^= rng.choice([1, 2, 4, 32, HAS_OFFSET_DELTA, 1 << 7, 1 << 20])
        taken += use(columns, mutate(rng, body))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"done {taken} taken, {grown} KiB more")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
