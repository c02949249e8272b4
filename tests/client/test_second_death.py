"""A message that was redriven and dies again is among the dead letters again."""

import tailrace
from tailrace.testing import LocalBroker
from tests.client.test_consumer import on_broker, publish
from tests.client.test_dead_letters import bury


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
