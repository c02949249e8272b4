"""An event store: an account is the sum of its events, and two writers never both win the same version."""

import asyncio

import msgspec

import tailrace
from tailrace.bus import EventStore
from tailrace.errors import SequenceConflict


class Opened(msgspec.Struct):
    owner: str


class Deposited(msgspec.Struct):
    amount: int


class Withdrawn(msgspec.Struct):
    amount: int


async def balance(store: EventStore, account: str) -> tuple[int, int]:
    """The state of an account is a fold over its events; its version is their number."""
    total = version = 0
    for event in await store.read(account):
        version = event.version
        if isinstance(event.data, Deposited):
            total += event.data.amount
        elif isinstance(event.data, Withdrawn):
            total -= event.data.amount
    return total, version


async def withdraw(store: EventStore, account: str, amount: int) -> bool:
    """Decide on what is there, and try again when somebody else was quicker."""
    while True:
        total, version = await balance(store, account)
        if total < amount:
            return False
        try:
            await store.append(account, [Withdrawn(amount)], expected=version)
            return True
        except SequenceConflict:
            print(f"{account}: version {version} is taken, deciding again")


async def main() -> None:
    async with tailrace.connect() as client, EventStore(client, "example-accounts") as store:
        for kind in (Opened, Deposited, Withdrawn):
            store.event(kind)
        _, version = await balance(store, "alice")
        events = [Deposited(100)] if version else [Opened("Alice"), Deposited(100)]
        await store.append("alice", events, expected=version)
        results = await asyncio.gather(*(withdraw(store, "alice", 30) for _ in range(5)))
        total, version = await balance(store, "alice")
        print(
            f"{results.count(True)} of 5 withdrawals of 30 succeeded, {total} are left at version {version}"
        )
        newest = await store.read("alice", backwards=True, limit=1)
        print(f"the newest event is {newest[0].data}")


if __name__ == "__main__":
    asyncio.run(main())
