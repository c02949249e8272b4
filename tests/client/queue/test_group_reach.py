"""What holds for a group as a whole: its limits over several topics, and who sees a redriven copy."""

import tailrace
from tailrace.testing import LocalBroker
from tests.client.admin.test_dead_letters import bury
from tests.client.queue.test_consumer import nothing, on_broker, publish, take


def test_limits_of_messages_in_flight_count_over_all_topics_of_a_group() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        broker.create_topic("u", partitions=1)
        for topic in ("t", "u"):
            async with client.producer(topic) as producer:
                await producer.send_many([b"%d" % number for number in range(20)])
        async with client.consumer(["t", "u"], "g", in_flight_max=10) as consumer:
            held = await take(consumer, 10)
            await nothing(broker, consumer)
            rows = broker.group("g").partitions
            assert sum(row["in_flight"] for row in rows) == 10
            await held[0].ack()
            await take(consumer)

    on_broker(scenario)


def test_a_redriven_copy_is_for_its_group_alone() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.consumer("t", "s", mode="stream") as stream:
            await publish(client, b"a")
            await bury(client, "g", b"a")
            assert (await anext(stream)).value == b"a"
            await client.admin().trim_topic("t", 0, 1)
            assert (await client.dead_letters("t").redrive()).republished == 1
            await publish(client, b"b")
            assert (await anext(stream)).value == b"b"

    on_broker(scenario)
