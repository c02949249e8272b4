"""A message that dies again is among the dead letters again, also where the clock stands still."""

import pytest

import tailrace
from tailrace.testing import LocalBroker
from tests.client.admin.test_dead_letters import bury
from tests.client.queue.test_consumer import on_broker, publish


def test_a_message_that_dies_again_after_a_redrive_is_there_again() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        letters = client.dead_letters("t")
        await publish(client, b"a")
        await bury(client, "g", b"a", reason="first")
        assert (await letters.redrive()).reopened == 1
        assert await letters.list() == []
        await bury(client, "g", b"a", reason="second")
        assert [letter.error for letter in await letters.list()] == ["second"]

    on_broker(scenario)


@pytest.mark.parametrize("anew", ["reset", "deleted", "created again"])
def test_a_message_that_dies_in_another_life_is_there_again(anew: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        await bury(client, "g", b"a", reason="first")
        if anew == "reset":
            await client.groups().reset("g", "t", "earliest")
        elif anew == "deleted":
            await client.groups().delete("g")
        else:
            await client.admin().delete_topic("t")
            await client.admin().create_topic("t", partitions=1)
            await publish(client, b"a")
        await bury(client, "g", b"a", reason="second")
        assert [letter.error for letter in await client.dead_letters("t").list()] == ["first", "second"]

    on_broker(scenario)
