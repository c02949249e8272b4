"""A held engine with a group on its partitions, and what its members do, as tests say it."""

from typing import Any, NamedTuple

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model.commands import Publish, Published, Reply
from tailrace.core.model.group_commands import JoinGroup, Membership
from tailrace.core.model.queue_commands import Ack, Grant, Lease, Leases, Nack, RejectMessages, Settled
from tailrace.format import batch as arrow
from tailrace.format import frame
from tests.broker.held_engine import HeldEngine

SESSION_MS = 3_600_000
Answers = list[tuple[Reply, bytes]]


class Got(NamedTuple):
    """A message as it was delivered."""

    partition: int
    offset: int
    value: bytes
    deliveries: int
    failures: int
    lease: int


class QueueEngine(HeldEngine):
    """A broker whose group "g" has the member "m", which never fails to show itself."""

    def enlist(self, group: str = "g", topic: str = "t", member: str = "m", **options: Any) -> None:
        """Let a member join a group, which is made when it is new."""
        request = JoinGroup(group, member, [topic], {"session_ms": SESSION_MS, **options})
        ((reply, _),) = self.submit(request)
        assert isinstance(reply, Membership), reply

    def tell(self, runtime: Any, command: Any) -> Any:
        """A command of the broker itself; its answer."""
        replies: list[Reply] = []
        runtime.submit(command, b"", lambda reply, parts: replies.append(reply))
        self.settle()
        (reply,) = replies
        assert not hasattr(reply, "code"), reply
        return reply

    def send(self, *values: bytes, topic: str = "t", partition: int = 0, **columns: Any) -> int:
        """Publish a batch with any columns; its first offset."""
        ids = arrow.make_ids(len(values), self.clock.now_us() // 1000, 7, 7)
        bits, body = arrow.encode(list(values), ids=ids, timestamps=self.clock.now_us(), **columns)
        reply = self.ask(Publish(topic, partition, bits, frame.crc32c(body)), body)
        assert isinstance(reply, Published), reply
        return reply.base_offset

    def begin_lease(self, group: str = "g", topic: str = "t", member: str = "m", **fields: Any) -> Answers:
        """Ask for messages; the list gets the answer when there is one."""
        runtimes = self.engine.topics.get(topic).runtimes
        generation = fields.pop("generation", None)
        partitions = fields.pop("partitions", range(len(runtimes)))
        gate = fields.pop("gate", None) or OpenGate()
        places = []
        for partition in partitions:
            granted = runtimes[partition].state.queues.grant(group)
            known = 0 if granted is None else granted[1]
            places.append((partition, known if generation is None else generation))
        return self.submit(Lease(topic, group, member, places, **fields), gate=gate)

    def lease(self, **fields: Any) -> list[Got]:
        """Ask for messages that are there at once."""
        return got(self.begin_lease(**fields))

    def ack(self, *messages: Got, group: str = "g", topic: str = "t") -> Any:
        """Settle messages of one partition."""
        leases: dict[int, list[int]] = {}
        for message in sorted(messages, key=lambda item: item.offset):
            leases.setdefault(message.lease, []).extend((message.offset, message.offset + 1))
        return self.ask(Ack(topic, messages[0].partition, group, list(leases.items())))

    def nack(self, message: Got, group: str = "g", topic: str = "t", **fields: Any) -> None:
        """Let a message fail."""
        span = [message.offset, message.offset + 1]
        reply = self.ask(Nack(topic, message.partition, group, message.lease, span, **fields))
        assert reply == Settled(), reply

    def reject(self, message: Got, group: str = "g", topic: str = "t", **fields: Any) -> None:
        """Send a message to the dead letters."""
        span = [message.offset, message.offset + 1]
        reply = self.ask(RejectMessages(topic, message.partition, group, message.lease, span, **fields))
        assert reply == Settled(), reply


def grants(answers: Answers) -> list[Grant]:
    """What an answer grants."""
    ((reply, _),) = answers
    assert isinstance(reply, Leases), reply
    return reply.grants


def got(answers: Answers) -> list[Got]:
    """The messages of an answer, in the order of delivery; every byte of it is accounted for."""
    ((_, data),) = answers
    found: list[Got] = []
    at = 0
    for grant in grants(answers):
        counters = {
            offset: counts for first, count, *counts in grant.runs for offset in range(first, first + count)
        }
        seen = []
        for header, body in frame.walk(data[at : at + grant.nbytes]):
            rows = arrow.decode(body, header.columns).to_pylist()
            for row, fields in enumerate(rows):
                offset = header.base_offset + fields.get("offset_delta", row)
                if offset in counters:
                    deliveries, failures = counters[offset]
                    seen.append(offset)
                    found.append(
                        Got(grant.partition, offset, fields["value"], deliveries, failures, grant.lease)
                    )
        assert seen == list(counters)
        at += grant.nbytes
    assert at == len(data)
    return found


def values(messages: list[Got]) -> list[bytes]:
    """What the messages say."""
    return [message.value for message in messages]
