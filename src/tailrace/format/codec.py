"""Values as bytes: requests, replies and facts in MessagePack, by the types that msgspec already knows.

Decoding is total: any bytes give a value of the expected type, or an error that says what is wrong:
`InvalidRequest`, or `Corrupt` for facts from a log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec

from tailrace.core.model.commands import Reply, Request
from tailrace.errors import Corrupt, InvalidRequest
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
    """Pack a value; raises `InvalidRequest` if an option in it has a type that cannot be encoded."""
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what}: {error}") from None


_decode_request = decoder_of(Request, "request")
_decode_reply = decoder_of(Reply, "reply")
_FIELDS = {kind.__struct_config__.tag: kind.__struct_fields__ for kind in get_args(Request)}
_PLACE = re.compile(r"(?s)request: (.*) - at `\$\[(\d+)\](.*)`")


def encode_request(request: Request) -> bytes:
    """A request as the header of a native message; `InvalidRequest` names a field that cannot be encoded."""
    try:
        return encode_value(request, "request")
    except InvalidRequest:
        for field in request.__struct_fields__:
            encode_value(getattr(request, field), f"request: {request.__struct_config__.tag}.{field}")
        raise


def decode_request(data: Buffer) -> Request:
    """The request in a header; `InvalidRequest` names the field that is wrong."""
    try:
        request: Request = _decode_request(data)
    except InvalidRequest as error:
        raise InvalidRequest(_with_name(error.message, data)) from None
    return request


def checked(request: Request) -> Request:
    """A request made in this process, as a broker on the network would have received it: fields of a wrong
    type are refused, and no value in it is shared with the caller."""
    return decode_request(encode_request(request))


class _Kind(msgspec.Struct, array_like=True):
    """The first element of any request."""

    tag: str


def _with_name(text: str, data: Buffer) -> str:
    """An error of msgspec about an element by number, with the name of the field instead: `request:
    nack.error: expected str, got bytes`."""
    found = _PLACE.fullmatch(text)
    if found is None:
        return text
    reason, number, inside = found.groups()
    try:
        tag = msgspec.msgpack.decode(data, type=_Kind).tag
        field = _FIELDS[tag][int(number) - 1] if int(number) else ""
    except (msgspec.DecodeError, ValueError, LookupError, RecursionError):
        field = ""
    if not field:
        return text
    reason = reason.replace("`", "")
    return f"request: {tag}.{field}{inside}: {reason[:1].lower()}{reason[1:]}"


def encode_reply(reply: Reply) -> bytes:
    """A reply as the header of a native message."""
    return encode_value(reply, "reply")


def decode_reply(data: Buffer) -> Reply:
    """The reply in a header."""
    reply: Reply = _decode_reply(data)
    return reply


def encode_facts(facts: Sequence[Any]) -> bytes:
    """The body of a facts frame: the facts of one turn, in order."""
    return encode_value(facts, "facts")


def facts_decoder(fact: Any) -> Callable[[Buffer], list[Any]]:
    """A decoder of the bodies of facts frames; `fact` is the union of the facts that they may hold.

    Facts come only from a log, so a body that cannot be read is damaged: `Corrupt`.
    """
    decode = decoder_of(list[fact], "facts")

    def total(data: Buffer) -> list[Any]:
        try:
            facts: list[Any] = decode(data)
        except InvalidRequest as error:
            raise Corrupt(error.message) from None
        return facts

    return total
