"""A transactional outbox: what a database has committed is published exactly once, whatever crashes when.

The application writes its change and the message in one database transaction. A relay publishes the messages
with `client.atomic`, whose version is the number of the last row: a relay that died after publishing and
before it marked the rows repeats the same version, and Tailrace knows it.
"""

import asyncio
import sqlite3

import tailrace


def place_order(db: sqlite3.Connection, order: int) -> None:
    """The application: the order and its message, together or not at all."""
    with db:
        db.execute("insert into orders values (?)", (order,))
        db.execute("insert into outbox (topic, body) values (?, ?)", ("example-orders", f"order {order}"))


async def relay(client: tailrace.Client, db: sqlite3.Connection, *, crash: bool = False) -> bool:
    """Publish what is not marked yet; returns whether anything new was written."""
    rows = db.execute("select id, topic, body from outbox where not sent order by id").fetchall()
    if not rows:
        return False
    version = rows[-1][0]
    async with client.atomic("shop-outbox", version) as transaction:
        for number, topic, body in rows:
            await transaction.send(topic, body.encode(), key=str(number).encode())
    if crash:
        raise RuntimeError("the relay died before it could mark the rows")
    with db:
        db.execute("update outbox set sent = 1 where id <= ?", (version,))
    return transaction.won


async def main() -> None:
    db = sqlite3.connect(":memory:")
    db.execute("create table orders (id integer primary key)")
    db.execute("create table outbox (id integer primary key, topic text, body text, sent default 0)")
    async with tailrace.connect() as client:
        await client.admin().create_topic("example-orders", if_missing=True)
        for order in (1, 2, 3):
            place_order(db, order)
        try:
            await relay(client, db, crash=True)
        except RuntimeError as error:
            print(error)
        print(f"the next relay wrote something new: {await relay(client, db)}")
        place_order(db, 4)
        print(f"and with one more order: {await relay(client, db)}")
        async with client.reader("example-orders", start="earliest", stop_at_end=True) as reader:
            found = sorted([(message.value or b"").decode() async for message in reader])
        print(f"published: {found}")


if __name__ == "__main__":
    asyncio.run(main())
