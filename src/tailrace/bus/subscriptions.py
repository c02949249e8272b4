"""One running group of a bus: its consumer, the choice of the handler, and answers to requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tailrace.bus.envelope import Batch, Message
from tailrace.bus.handlers import Handler, Invoker, Settle, settlement
from tailrace.bus.outcomes import TABLE, AckPolicy, Act, outcome_of
from tailrace.bus.payloads import BYTES, JSON
from tailrace.bus.registry import (
    CONTENT_HEADER,
    TYPE_HEADER,
    VERSION_HEADER,
    TypeRegistry,
    Undecodable,
)
from tailrace.bus.requests import CORRELATION_HEADER, ERROR_HEADER, REPLY_TO_HEADER
from tailrace.client.admin.group_admin import Groups
from tailrace.client.publish.producer import Producer
from tailrace.client.queue.consumer import Consumer
from tailrace.client.queue.delivery import Delivery
from tailrace.client.queue.handler_verdicts import as_text, described
from tailrace.errors import InvalidRequest, LeaseLost, TailraceError, TooLarge

log = logging.getLogger("tailrace.bus")
PAUSE_S = 0.5


class Answers:
    """Sends what handlers return to whoever asked."""

    def __init__(self, producer: Callable[[str], Awaitable[Producer]], registry: TypeRegistry) -> None:
        self._producer = producer
        self._registry = registry

    async def send(self, message: Message[Any], result: Any) -> Exception | None:
        """Answer a message, if it is a request. Returns why its result cannot travel: the handler's failure,
        like one that it raised."""
        if not is_request(message):
            return None
        try:
            body, headers = self._encode(result)
        except Exception as error:  # Any codec, any value.
            return TypeError(f"what the handler returned cannot be sent as an answer: {described(error)}")
        problem = await self._publish(message, body, headers)
        return problem if isinstance(problem, TooLarge) else None

    async def refuse(self, message: Message[Any], error: BaseException) -> None:
        """Tell whoever asked that there will be no answer, and why."""
        text = as_text(error) or type(error).__name__
        await self._publish(message, b"", [(ERROR_HEADER, text.encode())])

    async def _publish(
        self, message: Message[Any], body: bytes, headers: list[tuple[str, bytes]]
    ) -> Exception | None:
        topic, correlation = message.header(REPLY_TO_HEADER), message.header(CORRELATION_HEADER)
        assert topic is not None
        assert correlation is not None
        try:
            producer = await self._producer(topic)
            await producer.publish(body, headers=[(CORRELATION_HEADER, correlation.encode()), *headers])
        except Exception as error:  # Also for a place of answers that is none: the asker sees a timeout.
            log.error("%r cannot be answered: %s", message, as_text(error))
            return error
        return None

    def _encode(self, result: Any) -> tuple[bytes, list[tuple[str, bytes]]]:
        """A registered type travels as such; anything else that JSON knows, as plain data."""
        try:
            _, body, headers = self._registry.encode(result)
            return body, headers
        except InvalidRequest:
            pass
        content = BYTES if isinstance(result, bytes) else JSON
        body = result if isinstance(result, bytes) else msgspec.json.encode(result)
        return body, [
            (TYPE_HEADER, b"reply"),
            (VERSION_HEADER, b"1"),
            (CONTENT_HEADER, content.encode()),
        ]


def is_request(message: Message[Any]) -> bool:
    """Whether somebody waits for an answer."""
    return message.header(REPLY_TO_HEADER) is not None and message.header(CORRELATION_HEADER) is not None


class Subscription:
    """A consumer and the handlers that share its group."""

    def __init__(
        self,
        consumer: Consumer,
        handlers: Sequence[Handler],
        registry: TypeRegistry,
        caller: Invoker,
        answers: Answers,
        groups: Groups,
    ) -> None:
        self._consumer = consumer
        self._handlers = {name: handler for handler in handlers for name in handler.names}
        self._batch = handlers[0].batch
        self._registry = registry
        self._caller = caller
        self._answers = answers
        self._groups = groups
        self._stopping = False

    async def run(self, concurrency: int) -> None:
        """Handle messages until stopped."""
        async with self._consumer as consumer:
            if self._batch is None:
                await consumer.run(self._handle, concurrency=concurrency, settle=False)
            else:
                async for batch in consumer.batches(self._batch):
                    await self._handle_batch(list(batch))
            try:
                await consumer.commit()
            except TailraceError as error:
                # Of messages that no handler was called for: they come again.
                log.warning("not acknowledged: %s", error)

    def stop(self) -> None:
        """Take no more messages; `run` ends when those under way are done."""
        self._stopping = True
        self._consumer.stop()

    async def _open(self, delivery: Delivery) -> tuple[Handler, Message[Any]] | None:
        """The message and its handler; None when it is not for this group or cannot be read."""
        try:
            name, version, data = self._registry.decode(delivery.value, delivery.headers)
            handler = self._handlers.get(name)
            if handler is None and not self._registry.knows(name):
                raise Undecodable(f"the type {name!r} is not known here")
        except Undecodable as error:
            log.error("poison in %s: %s", _place(delivery), error)
            reason = as_text(error)
            await self._settled(delivery, lambda: delivery.reject(reason, poison=True))
            return None
        if handler is None:
            try:
                delivery.ack_nowait()  # Of a type that this group does not ask for.
            except TailraceError as lost:
                log.warning("not acknowledged: %s", lost)
            return None
        return handler, Message(delivery, name, version, data)

    async def _handle(self, delivery: Delivery) -> None:
        try:
            opened = await self._open(delivery)
            if opened is not None:
                await self._handle_one(*opened)
        except Exception as error:
            await _let_go([delivery], error)

    async def _handle_one(self, handler: Handler, message: Message[Any]) -> None:
        if handler.policy is AckPolicy.ACK_FIRST and not await self._acknowledged(message):
            return
        result, error = await self._caller.call(handler, message)
        if error is None:
            error = await self._answers.send(message, result)
        await self._settle(handler, message, error)
        _go_on_stopping(error)

    async def _is_final(self, handler: Handler, message: Message[Any], error: BaseException) -> bool:
        """Whether a request is not tried again after this error: then the asker may know."""
        act = message.act or TABLE[handler.policy][outcome_of(error)]
        if act is not Act.NACK:
            return act is not Act.GIVE_BACK
        try:
            group = await self._groups.describe(self._consumer.group)
        except TailraceError:
            return False  # The asker sees a timeout.
        return message.attempt >= int(group.options["max_attempts"])

    async def _handle_batch(self, deliveries: list[Delivery]) -> None:
        by_handler: dict[int, tuple[Handler, list[Message[Any]]]] = {}
        for delivery in deliveries:
            try:
                opened = await self._open(delivery)
            except Exception as error:
                await _let_go([delivery], error)
                continue
            if opened is not None:
                handler, message = opened
                by_handler.setdefault(id(handler), (handler, []))[1].append(message)
        for handler, messages in by_handler.values():
            try:
                await self._handle_set(handler, messages)
            except Exception as error:
                await _let_go([message.delivery for message in messages], error)

    async def _handle_set(self, handler: Handler, messages: list[Message[Any]]) -> None:
        """Under MANUAL the handler is called again with what is left of the set, until nothing is."""
        if handler.policy is AckPolicy.ACK_FIRST:
            acknowledged = [m for m in messages if await self._acknowledged(m)]
            messages = [Message(m.delivery, m.name, m.version, m.data) for m in acknowledged]
        batch = Batch([message for message in messages if not _is_over(message.delivery)])
        while len(batch):
            before = len(batch)
            _, error = await self._caller.call(handler, batch)
            for message in batch:
                await self._settle(handler, message, error)
            _go_on_stopping(error)
            if handler.policy is AckPolicy.ACK_FIRST:
                return
            if len(batch) == before:
                log.warning("%s settled none of %d messages; they are given back", handler.title, before)
                for message in batch:
                    await self._settled(message.delivery, message.give_back)

    async def _acknowledged(self, message: Message[Any]) -> bool:
        return await self._settled(message.delivery, message.acknowledge)

    async def _settle(self, handler: Handler, message: Message[Any], error: BaseException | None) -> None:
        if error is not None and is_request(message) and await self._is_final(handler, message, error):
            await self._answers.refuse(message, error)
        work = settlement(handler.policy, message, error)
        if work is not None:
            await self._settled(message.delivery, work)

    async def _settled(self, delivery: Delivery, work: Settle) -> bool:
        """Settle a message, however long the broker is away; False when it is delivered again instead.

        Whoever waits here keeps later messages of its key waiting, too, which must not overtake it.
        """
        while True:
            try:
                await work()
                return True
            except LeaseLost as lost:
                log.warning("handled too late: %s", lost)
                return False
            except TailraceError as error:
                if not error.retriable:
                    raise
                gone = self._stopping or delivery.rows.lease.is_lost(delivery.offset)
                then = "it will be delivered again" if gone else "trying again"
                log.warning("%s could not be settled: %s; %s", _place(delivery), error, then)
                if gone:
                    return False
                await asyncio.sleep(PAUSE_S)


def _is_over(delivery: Delivery) -> bool:
    """Whether its lease has ended while others of its batch were handled: it comes again."""
    return delivery.rows.settling.is_over(delivery.rows.lease)


def _place(delivery: Delivery) -> str:
    return f"{delivery.topic}/{delivery.partition}@{delivery.offset}"


def _go_on_stopping(error: BaseException | None) -> None:
    """The cancellation of a worker was held up only to settle what it had."""
    if isinstance(error, asyncio.CancelledError):
        raise error


async def _let_go(deliveries: list[Delivery], error: Exception) -> None:
    """Something went wrong beside the handler: the failure of these messages, and the worker goes on."""
    for delivery in deliveries:
        place = _place(delivery)
        log.error("%s could not be handled", place, exc_info=error)
        try:
            await delivery.nack(error=described(error))  # Harmless for those that are settled.
        except TailraceError as problem:
            log.warning("%s is not given back: %s", place, problem)
