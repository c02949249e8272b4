"""Dead letters, schedules and delayed messages through the SDK, on the real core with virtual time.

Also covers `client/admin/dead_letter_reader.py`, `client/admin/redrive.py` and `client/admin/schedules.py`.
"""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import tailrace
from tailrace.client.rpc.calls import ask
from tailrace.core.model.queue_commands import HoldOffsets, OffsetsHeld
from tailrace.errors import InvalidRequest, NotFound
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import nothing, on_broker, publish, take, wait


async def bury(client: tailrace.Client, group: str, *values: bytes, reason: str = "no use") -> None:
    """The group rejects these, and acknowledges everything else."""
    async with client.consumer("t", group) as consumer:
        left = set(values)
        while left:
            (m,) = await take(consumer)
            if m.value in left:
                left.discard(m.value)
                await m.reject(reason)
            else:
                await m.ack()


def test_dead_letters_say_where_they_come_from() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        letters = client.dead_letters("t")
        assert await letters.list() == []
        await publish(client, b"a", b"b", key=b"k", headers={"mine": b"x"})
        await bury(client, "g", b"b")
        (letter,) = await letters.list()
        assert (letter.topic, letter.partition, letter.offset, letter.group) == ("t", 0, 1, "g")
        assert (letter.reason, letter.error, letter.attempts, letter.deliveries) == (
            "rejected",
            "no use",
            0,
            1,
        )
        assert letter.message.value == b"b"
        assert letter.message.key == b"k"
        assert ("mine", b"x") in letter.message.headers
        assert letter.last_member
        assert letter.time is not None
        assert letter.first_delivery is not None
        shown = await letters.show(letter.message.partition, letter.message.offset)
        assert shown.message.value == b"b"
        with pytest.raises(NotFound):
            await letters.show(0, 99)
        assert len(await letters.list()) == 1  # Looking does not take.
        assert await letters.list(group="other") == []
        assert await letters.list(reason="expired") == []
        assert len(await letters.list(group="g", reason="rejected")) == 1

    on_broker(scenario)


def test_redrive_goes_to_the_group_that_gave_up_and_to_no_other() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c")
        await bury(client, "g", b"b", b"c")
        async with client.consumer("t", "other") as other:
            for m in await take(other, 3):
                await m.ack()
            letters = client.dead_letters("t")
            plan = await letters.redrive(group="g", dry_run=True)
            assert (plan.count, plan.reopened, plan.dry_run) == (2, 0, True)
            assert len(await letters.list()) == 2
            done = await letters.redrive(filter=lambda letter: letter.message.value == b"b")
            assert (done.count, done.reopened, done.republished) == (1, 1, 0)
            assert [letter.message.value for letter in await letters.list()] == [b"c"]
            async with client.consumer("t", "g") as consumer:
                (m,) = await take(consumer)
                assert (m.value, m.offset, m.attempt, m.deliveries) == (b"b", 1, 1, 1)
                await m.ack()
                await nothing(broker, consumer)
            await nothing(broker, other)
            with pytest.raises(InvalidRequest):
                await letters.redrive(rate=0)

    on_broker(scenario)


def test_redrive_of_what_was_trimmed_is_published_again_for_its_group_only() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", key=b"k")
        await bury(client, "g", b"a", b"b")
        async with client.consumer("t", "other") as other:
            for m in await take(other, 2):
                await m.ack()
            await client.admin().trim_topic("t", 0, 1)
            done = await client.dead_letters("t").redrive()
            assert (done.count, done.reopened, done.republished) == (2, 1, 1)
            async with client.consumer("t", "g") as consumer:
                again = await take(consumer, 2)
                assert [(m.value, m.offset, m.key) for m in again] == [(b"b", 1, b"k"), (b"a", 2, b"k")]
                for m in again:
                    await m.ack()
            await nothing(broker, other)
            await other.commit()
            assert (await client.groups().describe("other")).lag == 0
        assert await client.dead_letters("t").list() == []

    on_broker(scenario)


def test_a_redriven_copy_has_the_headers_of_its_message() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        own = [("tailrace-type", b"Pay"), ("mine", b"x"), ("tailrace-of-mine", b"y")]
        await publish(client, b"a", headers=own)
        for _ in range(2):  # A copy that dies is copied again.
            await bury(client, "g", b"a")
            (letter,) = await client.dead_letters("t").list()
            await client.admin().trim_topic("t", 0, letter.offset + 1)
            assert (await client.dead_letters("t").redrive()).republished == 1
        async with client.consumer("t", "g") as consumer:
            (m,) = await take(consumer)
            assert m.headers == [*own, ("tailrace-redrive-group", b"g")]
            await m.ack()

    on_broker(scenario)


@pytest.mark.parametrize("died", ["of age", "before its time was over"])
def test_redrive_of_what_has_expired_is_published_again_without_an_end(died: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", expired_to_dlq=True)
        await publish(client, b"a", key=b"k", ttl=10)
        if died == "of age":
            await wait(broker, 11)
            async with client.consumer("t", "g") as consumer:
                await nothing(broker, consumer)
        else:
            await bury(client, "g", b"a")
            await wait(broker, 11)
        letters = client.dead_letters("t")
        assert len(await letters.list()) == 1
        done = await letters.redrive()
        assert (done.count, done.reopened, done.republished) == (1, 0, 1)
        await wait(broker, 100)
        async with client.consumer("t", "g") as consumer:
            (m,) = await take(consumer)
            assert (m.value, m.key, m.offset, m.attempt) == (b"a", b"k", 1, 1)
            await m.ack()
        assert await letters.list() == []
        assert len(broker.dead_letters("t")) == 1

    on_broker(scenario)


def test_a_topic_that_was_created_again_has_a_copy_and_keeps_its_own_messages_settled() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"old", b"other")
        await bury(client, "g", b"old")
        await client.admin().delete_topic("t")
        await client.admin().create_topic("t", partitions=1)
        await publish(client, b"new")
        async with client.consumer("t", "g") as consumer:
            (m,) = await take(consumer)
            assert (m.value, m.offset) == (b"new", 0)
            await m.ack()
            done = await client.dead_letters("t").redrive()
            assert (done.count, done.reopened, done.republished) == (1, 0, 1)
            (m,) = await take(consumer)
            assert (m.value, m.offset) == (b"old", 1)
            await m.ack()
            await nothing(broker, consumer)

    on_broker(scenario)


def test_a_dead_letter_that_does_not_tell_the_id_of_its_topic_is_taken_at_its_word() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        async with client.consumer("t", "g") as consumer:
            await (await take(consumer))[0].ack()
        await client.admin().create_topic("t.dlq", partitions=1)
        told = {"origin-topic": b"t", "origin-partition": b"0", "origin-offset": b"0", "group": b"g"}
        headers = {f"tailrace-{name}": value for name, value in told.items()}
        await publish(client, b"a", topic="t.dlq", headers=headers)
        assert (await client.dead_letters("t").redrive()).reopened == 1
        async with client.consumer("t", "g") as consumer:
            assert (await take(consumer))[0].offset == 0

    on_broker(scenario)


def test_a_dead_letter_is_not_sent_where_its_topic_has_no_part() -> None:
    """Who may write to one topic does not get anything into another by the hands of an administrator."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.admin().create_topic("payments", partitions=1)
        await client.admin().create_topic("t.dlq", partitions=1)
        told = {"origin-topic": b"payments", "origin-partition": b"0", "origin-offset": b"9", "group": b"g"}
        headers = {f"tailrace-{name}": value for name, value in told.items()}
        await publish(client, b"forged", topic="t.dlq", headers=headers)
        done = await client.dead_letters("t").redrive()
        assert (done.count, done.failed) == (0, 1)
        assert "it says that it came from topic 'payments'" in done.problems[0]

    on_broker(scenario)


def test_headers_at_their_limit_do_not_keep_a_copy_from_its_group() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", headers={"h": bytes(64 * 1024 - 1)})
        await publish(client, b"b")
        await bury(client, "g", b"a", b"b", reason="x" * 1000)
        await client.admin().trim_topic("t", 0, 2)
        done = await client.dead_letters("t").redrive()
        assert (done.count, done.republished, done.failed) == (2, 2, 0)
        async with client.consumer("t", "g") as consumer:
            again = await take(consumer, 2)
            assert [m.value for m in again] == [b"a", b"b"]
            assert again[0].headers == [("h", bytes(64 * 1024 - 1)), ("tailrace-redrive-group", b"g")]

    on_broker(scenario)


def test_a_letter_that_cannot_be_sent_back_is_told_and_the_others_go() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"long" * 10, b"a", b"b")
        await bury(client, "g", b"long" * 10, b"a", b"b")
        await publish(client, b"by hand", topic="t.dlq")
        await client.admin().alter_topic("t", message_bytes_max=10)
        await client.admin().trim_topic("t", 0, 2)
        letters = client.dead_letters("t")
        done = await letters.redrive(rate=100)
        assert (done.count, done.reopened, done.republished, done.failed) == (2, 1, 1, 2)
        assert "t.dlq/0@0: a value has 40 bytes" in done.problems[0]
        assert done.problems[1].startswith("t.dlq/0@3: it does not say where it came from")
        assert [letter.message.offset for letter in await letters.list()] == [0, 3]
        await client.admin().alter_topic("t", message_bytes_max=40)
        assert (await letters.redrive()).republished == 1  # Nobody holds it any more.

    on_broker(scenario)


@pytest.mark.parametrize("lost", ["the topic", "the group"])
def test_dead_letters_whose_group_is_gone_stay(lost: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        await bury(client, "g", b"a")
        await client.admin().delete_topic("t")
        if lost == "the group":
            await client.admin().create_topic("t", partitions=1)
            await client.groups().delete("g")
        letters = client.dead_letters("t")
        done = await letters.redrive()
        assert (done.count, done.failed) == (0, 1)
        assert ("there is no topic 't'" if lost == "the topic" else "there is no group 'g'") in done.problems[
            0
        ]
        assert len(await letters.list()) == 1

    on_broker(scenario)


def test_redrive_is_throttled() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, *[b"%d" % number for number in range(10)])
        await bury(client, "g", *[b"%d" % number for number in range(10)])
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await client.dead_letters("t").redrive(rate=2)).count == 10
        assert 4.5 <= loop.time() - began <= 5.5

    on_broker(scenario)


def test_purge_forgets_them() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, *[b"%d" % number for number in range(5)])
        await bury(client, "g", *[b"%d" % number for number in range(5)])
        letters = client.dead_letters("t")
        assert await letters.purge(filter=lambda letter: letter.offset < 2) == 2
        assert [letter.offset for letter in await letters.list()] == [2, 3, 4]
        assert len(await letters.list(limit=2)) == 2
        late = await letters.list(filter=lambda letter: letter.offset > 2, limit=1)
        assert [letter.offset for letter in late] == [3]
        for call in (letters.list, letters.redrive, letters.purge):
            with pytest.raises(InvalidRequest, match="max_deliveries, rejected, expired, poison, not 'zz'"):
                await call(reason="zz")
        assert await letters.purge() == 3
        assert await letters.list() == []
        assert await letters.purge() == 0
        assert (await letters.show(0, 0)).message.value == b"0"  # Still readable, until retention.

    on_broker(scenario)


def test_who_looks_takes_nothing_away_from_others() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, *[b"%d" % number for number in range(5)])
        await bury(client, "g", *[b"%d" % number for number in range(5)])
        letters = client.dead_letters("t")
        assert [len(found) for found in await asyncio.gather(*[letters.list() for _ in range(3)])] == [5] * 3
        plans = await asyncio.gather(*[letters.redrive(dry_run=True) for _ in range(3)])
        assert [plan.count for plan in plans] == [5] * 3

        def fail(letter: tailrace.DeadLetter) -> bool:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await letters.redrive(filter=fail)
        assert broker.groups() == [broker.group("g")]
        assert len(await letters.list()) == 5

    on_broker(scenario)


def test_what_another_redrive_has_in_hand_is_counted_and_can_be_purged() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a", b"b", b"c", b"d")
        await bury(client, "g", b"a", b"b", b"c", b"d")
        letters = client.dead_letters("t")
        assert (await letters.redrive(filter=lambda letter: letter.offset == 3)).count == 1
        hold = HoldOffsets("t.dlq", 0, "_redrive", "another", [0, 2], 60_000)
        assert await ask(letters._verbs, hold, 5) == OffsetsHeld([0, 2])
        assert [letter.offset for letter in await letters.list()] == [0, 1, 2]
        done = await letters.redrive()
        assert (done.count, done.reopened, done.held) == (1, 1, 2)
        assert await letters.purge(filter=lambda letter: letter.offset == 0) == 1
        await wait(broker, 61, 30)  # The other one never came back.
        done = await letters.redrive()
        assert (done.count, done.reopened, done.held) == (1, 1, 0)
        assert await letters.list() == []

    on_broker(scenario)


def test_redrives_at_once_send_each_back_once() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        values = [b"%d" % number for number in range(20)]
        await publish(client, *values)
        await bury(client, "g", *values)
        letters = client.dead_letters("t")
        done = await asyncio.gather(*[letters.redrive(rate=rate) for rate in (100, 200, 300)])
        assert sum(one.reopened for one in done) == 20
        assert await letters.list() == []

    on_broker(scenario)


@pytest.mark.parametrize("wrong", ["a", None, -1, 1.5])
def test_arguments_that_make_no_sense_are_named(wrong: Any) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        letters = client.dead_letters("t")
        with pytest.raises(InvalidRequest, match="limit"):
            await letters.list(limit=wrong)
        with pytest.raises(InvalidRequest, match="partition"):
            await letters.show(wrong, 0)
        with pytest.raises(InvalidRequest, match="offset"):
            await letters.show(0, wrong)
        for rate in ("a", float("inf"), float("nan"), -1):
            with pytest.raises(InvalidRequest, match="rate"):
                await letters.redrive(rate=rate)  # type: ignore[arg-type]

    on_broker(scenario)


def test_schedules_publish_at_every_tick() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        schedules = client.schedules()
        await schedules.put("every-minute", "t", "* * * * *", value=b"tick", headers={"h": b"1"})
        (schedule,) = await schedules.list()
        assert (schedule.name, schedule.cron, schedule.value, schedule.paused) == (
            "every-minute",
            "* * * * *",
            b"tick",
            False,
        )
        assert schedule.headers == [("h", b"1")]
        assert schedule.next_time is not None
        assert schedule.next_time - broker.clock.now <= timedelta(minutes=1)
        async with client.consumer("t", "g") as consumer:
            await nothing(broker, consumer)
            await wait(broker, 61, 5)
            (m,) = await take(consumer)
            assert m.value == b"tick"
            await m.ack()
            await schedules.pause("every-minute")
            assert (await schedules.list())[0].paused
            await wait(broker, 180, 20)
            await nothing(broker, consumer)
            await schedules.resume("every-minute")
            await wait(broker, 61, 5)
            await (await take(consumer))[0].ack()
        await schedules.delete("every-minute")
        assert await schedules.list() == []
        for wrong in ("delete", "pause"):
            with pytest.raises(NotFound):
                await getattr(schedules, wrong)("every-minute")
        bad: dict[str, Any] = {"value": b"x"}
        with pytest.raises(InvalidRequest, match="cron"):
            await schedules.put("bad", "t", "* * *", **bad)
        with pytest.raises(InvalidRequest, match="zone"):
            await schedules.put("bad", "t", "* * * * *", zone="Atlantis/Capital", **bad)

    on_broker(scenario)
