"""docs/formats.md is true: its tables fit the code, and its program reads a file of frames.

Covers `core/model/commands.py`, `core/model/queue_commands.py` and `core/model/access_commands.py`.
"""

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pyarrow as pa

from tailrace.core.model import commands, identifiers
from tailrace.core.model.access_commands import AccessReply, AccessRequest
from tailrace.core.model.facts import Fact
from tailrace.core.model.group_commands import GroupReply, GroupRequest
from tailrace.core.model.group_facts import CoordinationFact
from tailrace.core.model.queue_commands import DeliveryReply, DeliveryRequest
from tailrace.format import batch, frame

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, without its two head lines."""
    rows = re.findall(r"^\|(.*)\|$", re.split(rf"^#+ {heading}$", PAGE, flags=re.M)[1].split("\n#")[0], re.M)
    return [[cell.strip().strip("`") for cell in row.split("|")] for row in rows][2:]


def test_header_table() -> None:
    """Each number of a header stands where the page says, and nothing else is there."""
    forms = {"u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "i64": "<q"}
    numbers = {name: 3 + at for at, name in enumerate(frame.Header.__struct_fields__)}
    numbers["kind"] = frame.FACTS
    header = frame.Header(**numbers)
    packed = frame.pack(header)
    end = 0
    for at, length, form, name, *_ in table("Header"):
        assert int(at) == end
        end += int(length)
        raw = packed[int(at) : end]
        if name == "magic":
            assert raw == frame.MAGIC
        elif name == "header_crc":
            assert struct.unpack("<I", raw) == (frame.crc32c(packed[: int(at)]),)
        elif not name:
            assert not any(raw)
        else:
            assert struct.unpack(forms[form], raw) == (numbers.pop(name, frame.VERSION),)
    assert end == frame.HEADER_BYTES
    assert not numbers


def test_kinds_table() -> None:
    assert {name: int(kind) for kind, name, *_ in table("Kinds")} == {
        name: getattr(frame, name)
        for name in (
            "DATA",
            "SCHEDULED",
            "FACTS",
            "EPOCH_START",
            "SNAPSHOT_MARK",
            "BARRIER",
            "STAGED",
            "LOST",
        )
    }
    assert frame.MORE == 1 << 15


def kinds(union: Any) -> Iterable[Any]:
    """The structs of a union, those of unions in it too."""
    for kind in get_args(union):
        yield from kinds(kind) if get_args(kind) else (kind,)


def fields_of(kind: Any) -> str:
    """The fields of a struct as the page writes them: in order, with defaults behind their names."""
    shown = []
    for field in msgspec.structs.fields(kind):
        default = None if field.required else msgspec.json.encode(_default(field)).decode()
        shown.append(field.encode_name if default is None else f"{field.encode_name} {default}")
    return ", ".join(shown)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    assert callable(field.default_factory)
    return field.default_factory()


def tag_of(kind: Any) -> Any:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.tag


def test_facts_tables() -> None:
    listed = [row[:3] for row in table("Facts") if row[0].isdigit()]
    stored = sorted([*kinds(Fact), *kinds(CoordinationFact)], key=tag_of)
    assert listed == [[str(tag_of(kind)), kind.__name__, fields_of(kind)] for kind in stored]


def test_requests_and_answers_of_groups_and_leases_and_users() -> None:
    rows = table("Groups and schedules") + table("Leases, delays, traces, atomic writes")
    rows += table("Users, rules, quotas and tenants")
    listed = {row[0]: row[1].removesuffix("; body: the batch") for row in rows}
    asked = [*kinds(GroupRequest), *kinds(DeliveryRequest), *kinds(AccessRequest)]
    told = [*kinds(GroupReply), *kinds(DeliveryReply), *kinds(AccessReply)]
    for kind in [*asked, *told]:
        assert listed.get(tag_of(kind)) == fields_of(kind), kind
    assert listed.keys() - {tag_of(kind) for kind in [*asked, *told]} == {"answer", "---"}
    known = {tag_of(kind) for kind in kinds(commands.Reply)} | {tag_of(kind) for kind in told}
    for row in rows:
        if len(row) == 3:
            assert row[2].split()[0].strip("`") in known, row


def test_columns_table() -> None:
    for columns in range(identifiers.COLUMNS_ALL + 1):
        expected = [
            (name, kind, null == "never")
            for bit, name, kind, null, _ in table("Columns")
            if bit == "–" or columns >> int(bit) & 1
        ]
        found = [
            (field.name, type_name(field.type), not field.nullable) for field in batch.schema_of(columns)
        ]
        assert found == expected


def type_name(kind: pa.DataType) -> str:
    return "map<string, binary>" if pa.types.is_map(kind) else str(kind)


def test_hash_vectors() -> None:
    rows = table("Hashes")
    assert len(rows) >= 6
    for text, digest, of_3, of_30, key_hash in rows:
        key = b"" if text == "(empty)" else bytes.fromhex(text)
        assert identifiers.partition_of(key, 1 << 32) == int(digest)
        assert (identifiers.partition_of(key, 3), identifiers.partition_of(key, 30)) == (
            int(of_3),
            int(of_30),
        )
        assert f"{identifiers.key_hash(key):016x}" == key_hash


COLUMNS: dict[str, Any] = {
    "keys": [b"k", None],
    "headers": [{"a": b"1"}, None],
    "priorities": [0, 4],
    "deliver_at": 5,
    "expires_at": 6,
    "dedup_ids": [b"d", None],
}
CHOSEN: list[dict[str, Any]] = [{}, *({name: COLUMNS[name]} for name in COLUMNS), COLUMNS]
"""The columns of the frames of a segment: none, each alone, all."""


def segment() -> bytes:
    """Frames of several kinds and column sets as a storage engine leaves them, then zeros."""
    frames: list[frame.Frame] = []
    bodies: list[tuple[int, int, Any]] = [(frame.BARRIER, 0, b""), (frame.FACTS, 0, b"\x90")]
    ids = batch.make_ids(2, 1, 1, 1)
    for one in CHOSEN:
        for kind in (frame.DATA, frame.SCHEDULED):
            bodies.append((kind, *batch.encode([b"a", b"bb"], ids=ids, timestamps=7, **one)))
    for entry, (kind, columns, body) in enumerate(bodies):
        header = frame.Header(kind, columns, len(body), frame.crc32c(body), entry, 2 * entry, 2, 2)
        frames.append(frame.make(header, body))
    return b"".join(bytes(part) for one in frames for part in one.parts()) + bytes(100_000)


def test_the_program_reads_a_segment(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert program
    assert len(program[1].splitlines()) == 13
    data = segment()
    path = tmp_path / "segment"
    for content in (data, data[:-100_000]):
        path.write_bytes(content)
        names: dict[str, Any] = {"path": str(path)}
        exec(program[1], names)
        found = names["batches"]
        assert [one.num_rows for one in found] == [2] * 8
        assert [one["value"].to_pylist() for one in found] == [[b"a", b"bb"]] * 8
        priorities = [one["priority"].to_pylist() for one in found]
        assert priorities == [one.get("priorities", [2, 2]) for one in CHOSEN]
        assert found[-1]["headers"].to_pylist() == [[("a", b"1")], None]
        assert found[-1]["dedup_id"].to_pylist() == [b"d", None]
