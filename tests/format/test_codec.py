"""The codec: values come back, and any bytes are a value or `InvalidRequest`."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model import commands
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Corrupt, InvalidRequest
from tailrace.format import codec

REQUESTS: list[commands.Request] = [
    commands.Ping(),
    commands.CreateTopic("orders", {"partitions": 3, "retention": {"bytes": 2**40}}, True),
    commands.Publish("orders", 1, 5, 2**32 - 1, 2**63, 7, 9, expected_key_sequences=[0, -1]),
    commands.Fetch("orders", [(0, 5), (1, 2**62)]),
]
REPLIES: list[commands.Reply] = [
    commands.Done(),
    commands.Published(5, 10**15, [(0, 3)]),
    commands.TopicList([commands.TopicInfo("orders", 1, {"partitions": 3})]),
    Refusal("overloaded", "full", "none", {"retry_after_ms": 50}),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_requests_come_back(request_: commands.Request) -> None:
    packed = codec.encode_request(request_)
    assert codec.decode_request(packed) == request_
    assert codec.decode_request(memoryview(bytearray(packed))) == request_


@pytest.mark.parametrize("reply", REPLIES)
def test_replies_come_back(reply: commands.Reply) -> None:
    assert codec.decode_reply(codec.encode_reply(reply)) == reply


@pytest.mark.parametrize(
    "data",
    [
        b"",
        codec.encode_request(commands.Ping()) + b"\x00",
        codec.encode_reply(commands.Pong()),
        b"\x93\xaccreate_topic\xa1a" + b"\x81\xa1a" * 5000,  # nested deeper than any stack
        b"\x93\xaccreate_topic\xa1\xff\x80",  # a name that is no text
        b"\x93\xaccreate_topic\xa1a\x81\xa1a\xdd\x7f\xff\xff\xff",  # a list of two thousand million
        b"\x93\xaccreate_topic\xa1a\x81\xa1a\xd7\xff" + b"\xff" * 8,  # a time that is none
    ],
    ids=["empty", "trailing", "reply", "nested", "text", "long", "time"],
)
def test_malformed_requests(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^request: "):
        codec.decode_request(data)


@given(st.data())
def test_any_bytes_are_a_request_or_refused(data: st.DataObject) -> None:
    packed = bytearray(codec.encode_request(data.draw(st.sampled_from(REQUESTS))))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    for wrong in (packed, data.draw(st.binary(max_size=60))):
        try:
            found = codec.decode_request(wrong)
        except InvalidRequest:
            continue
        assert codec.decode_request(codec.encode_request(found)) == found


def test_options_that_do_not_travel_are_refused() -> None:
    for option in (object(), 2**70):
        with pytest.raises(InvalidRequest, match=r"^request: create_topic\.options: "):
            codec.encode_request(commands.CreateTopic("orders", {"partitions": option}))


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (commands.TrimTopic("orders", 0, True), "trim_topic.offset: expected int, got bool"),
        (commands.DeleteTopic(b"orders"), "delete_topic.name: expected str, got bytes"),  # type: ignore[arg-type]
        (
            commands.Fetch("orders", [(0, 5), (1, 6.0)]),  # type: ignore[list-item]
            "fetch.positions[1][1]: expected int, got float",
        ),
    ],
)
def test_a_wrong_type_is_refused_by_the_name_of_its_field(request_: commands.Request, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.checked(request_)
    assert refused.value.message == f"request: {text}"


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_that_is_checked_stays_what_it_was(request_: commands.Request) -> None:
    assert codec.checked(request_) == request_


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """A fact for this test."""

    at: int


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """Another one."""


def test_facts_come_back_in_order() -> None:
    decode = codec.facts_decoder(Opened | Closed)  # type: ignore[arg-type]
    facts = [Opened(1), Closed(), Opened(2)]
    assert decode(codec.encode_facts(facts)) == facts
    for wrong in (b"", codec.encode_facts(facts)[:-1], codec.encode_facts([["opened", "x"]])):
        with pytest.raises(Corrupt, match=r"^facts: "):
            decode(wrong)
