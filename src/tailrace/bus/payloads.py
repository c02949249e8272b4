"""Bodies of bus messages: which codec a type has, and values to bytes and back.

A type chooses its codec by itself: bytes travel as they are, pydantic models through pydantic, everything
else that msgspec knows (structs, dataclasses, attrs classes, plain JSON values) as JSON. A value that is sent
has to tell its type, which a typed dict does not: its values are dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

JSON = "json"
BYTES = "bytes"


class Codec(msgspec.Struct, frozen=True):
    """How values of one type travel. `convert` makes a value of plain JSON data (after an upcast)."""

    content: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    convert: Callable[[Any], Any]


def codec_of(kind: Any) -> Codec:
    """The codec of a type."""
    if kind is bytes:
        return Codec(BYTES, bytes, bytes, bytes)
    if hasattr(kind, "model_validate_json"):  # pydantic, which need not be there
        return Codec(
            JSON,
            lambda value: value.model_dump_json().encode(),
            kind.model_validate_json,
            kind.model_validate,
        )
    decoder = msgspec.json.Decoder(kind)  # refuses here, not at the first message, what it cannot decode
    return Codec(
        JSON,
        msgspec.json.encode,
        decoder.decode,
        lambda data: msgspec.convert(data, kind),
    )


def plain(body: bytes, content: str) -> Any:
    """A body without a type: what JSON says, or the bytes themselves."""
    return msgspec.json.decode(body) if content == JSON else body
