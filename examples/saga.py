"""A saga: an order is paid and shipped by request and reply; when shipping fails, the money goes back."""

import asyncio

import msgspec

import tailrace
from tailrace.bus import Bus, Message, Reject, RequestFailed

bus = Bus("example-shop")


@bus.command(key="order")
class Pay(msgspec.Struct):
    order: int
    amount: int


@bus.command(key="order")
class Refund(msgspec.Struct):
    order: int


@bus.command(key="order")
class Ship(msgspec.Struct):
    order: int
    country: str


@bus.event(key="order")
class OrderClosed(msgspec.Struct):
    order: int
    outcome: str


closed: dict[int, str] = {}


@bus.handler(Pay)
async def pay(message: Message[Pay]) -> str:
    return f"paid {message.data.amount}"


@bus.handler(Refund)
async def refund(message: Message[Refund]) -> str:
    return "paid back"


@bus.handler(Ship)
async def ship(message: Message[Ship]) -> str:
    if message.data.country == "Atlantis":
        raise Reject("there is no way to Atlantis")
    return f"on its way to {message.data.country}"


@bus.handler(OrderClosed)
async def note(message: Message[OrderClosed]) -> None:
    closed[message.data.order] = message.data.outcome


async def place(order: int, country: str) -> None:
    """The saga itself: step by step, and backwards when a step fails for good."""
    print(f"order {order}: {await bus.request(Pay(order, 100))}")
    try:
        outcome = await bus.request(Ship(order, country))
    except RequestFailed as error:
        print(f"order {order}: {error}; {await bus.request(Refund(order))}")
        outcome = "cancelled"
    await bus.publish(OrderClosed(order, outcome))


async def main() -> None:
    async with tailrace.connect() as client, bus.attach(client):
        worker = asyncio.create_task(bus.run(concurrency=4))
        await asyncio.gather(place(1, "Portugal"), place(2, "Atlantis"))
        while len(closed) < 2:
            await asyncio.sleep(0.01)
        bus.stop()
        await worker
        for order, outcome in sorted(closed.items()):
            print(f"order {order} is closed: {outcome}")


if __name__ == "__main__":
    asyncio.run(main())
