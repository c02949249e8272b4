"""Values as bytes: requests, replies and facts in MessagePack, by the types that msgspec already knows.

Decoding is total: any bytes give a value of the type asked for, or `InvalidRequest` that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tailrace.core.commands import Reply, Request
from tailrace.errors import InvalidRequest
from tailrace.format.frame import Buffer

_encoder = msgspec.msgpack.Encoder()


def decoder_of(union: Any, what: str) -> Callable[[Buffer], Any]:
    """A total decoder of one type or union; `what` names the value in the message of the error."""
    decode = msgspec.msgpack.Decoder(union).decode

    def total(data: Buffer) -> Any:
        try:
            return decode(data)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"{what}: {error}") from None

    return total


def encode_value(value: Any, what: str) -> bytes:
    """Pack a value; `InvalidRequest` when an option in it has a type that does not travel."""
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what}: {error}") from None


_decode_request = decoder_of(Request, "request")
_decode_reply = decoder_of(Reply, "reply")


def encode_request(request: Request) -> bytes:
    """A request as the header of a native message."""
    return encode_value(request, "request")


def decode_request(data: Buffer) -> Request:
    """The request that a header holds."""
    request: Request = _decode_request(data)
    return request


def encode_reply(reply: Reply) -> bytes:
    """A reply as the header of a native message."""
    return encode_value(reply, "reply")


def decode_reply(data: Buffer) -> Reply:
    """The reply that a header holds."""
    reply: Reply = _decode_reply(data)
    return reply


def encode_facts(facts: Sequence[Any]) -> bytes:
    """The body of a facts frame: the facts of one turn, in order."""
    return encode_value(facts, "facts")


def facts_decoder(fact: Any) -> Callable[[Buffer], list[Any]]:
    """A decoder of the bodies of facts frames; `fact` is the union of all facts, which the caller knows."""
    return decoder_of(list[fact], "facts")
