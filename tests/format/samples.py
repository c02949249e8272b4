"""Random batches for the tests of bodies: plain rows, and how they are encoded."""

from typing import Any, NamedTuple

from hypothesis import strategies as st

from tailrace.core.model.identifiers import key_hash
from tailrace.format import batch
from tailrace.format.frame import Buffer

NOW_US = 1_700_000_000_000_000
TIME = st.integers(0, batch.TIME_US_END - 1)
BYTES = st.binary(max_size=20)
NAMES = st.text(max_size=5)
HEADERS = st.lists(st.tuples(NAMES, BYTES), max_size=3)


class Sample(NamedTuple):
    """The arguments of `encode` by name, and what they become."""

    values: list[bytes | None]
    options: dict[str, Any]

    def encode(self, compression: str | None = None) -> tuple[int, Buffer]:
        return batch.encode(self.values, **self.options, compression=compression)

    def rows(self, columns: int) -> dict[str, list[Any]]:
        """Every column as plain Python, as decoding must give it back."""
        count, given = len(self.values), self.options
        ids = given["ids"]
        times = {"timestamp": "timestamps", "deliver_at": "deliver_at", "expires_at": "expires_at"}
        found: dict[str, Any] = {"id": [ids[16 * row : 16 * row + 16] for row in range(count)]}
        found["value"] = [None if value is None else bytes(value) for value in self.values]
        for column, name in times.items():
            value = given.get(name)
            found[column] = [value] * count if isinstance(value, int) else value
        found["key"] = given.get("keys")
        found["key_hash"] = [None if key is None else key_hash(key) for key in given.get("keys") or ()]
        found["headers"] = given.get("headers")
        found["priority"] = given.get("priorities")
        found["dedup_id"] = given.get("dedup_ids")
        return {name: found[name] for name in batch.schema_of(columns).names}


@st.composite
def samples(draw: st.DrawFn, *, nulls: bool = True, rows_max: int = 12) -> Sample:
    """A batch of any set of columns; with `nulls` in every column that may have them."""
    count = draw(st.integers(1, rows_max))

    def rows(item: st.SearchStrategy[Any], nullable: bool = True) -> st.SearchStrategy[list[Any]]:
        return st.lists(st.none() | item if nullable and nulls else item, min_size=count, max_size=count)

    optional = {
        "keys": rows(BYTES),
        "headers": rows(HEADERS),
        "priorities": rows(st.integers(0, 4), nullable=False),
        "deliver_at": TIME | rows(TIME, nullable=False),
        "expires_at": TIME | rows(TIME),
        "dedup_ids": rows(BYTES),
    }
    options: dict[str, Any] = {name: draw(column) for name, column in optional.items() if draw(st.booleans())}
    options["timestamps"] = draw(TIME | rows(TIME, nullable=False))
    options["ids"] = batch.make_ids(count, NOW_US // 1000, draw(st.integers(0, 2**62 - 1)), 5)
    return Sample(
        draw(rows(BYTES | BYTES.map(bytearray) | BYTES.map(lambda item: memoryview(item)))), options
    )
