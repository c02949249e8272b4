"""A job queue: workers share the jobs, a failing job is tried again, a hopeless one goes to the dead letters.

python examples/job_queue.py                     against the broker of TAILRACE_URL, or the default one
"""

import asyncio
import json
from collections import Counter

import tailrace

TOPIC, GROUP = "example-jobs", "example-workers"
JOBS, WORKERS = 40, 5


async def publish_jobs(client: tailrace.Client) -> None:
    async with client.producer(TOPIC) as producer:
        for number in range(JOBS):
            await producer.send(json.dumps({"job": number}).encode(), key=f"customer-{number % 8}".encode())
        await producer.send(b"this is no job")


async def work(client: tailrace.Client, name: str, done: dict[int, str]) -> None:
    """One worker. There may be more of them than partitions, in this process and in others."""

    async def handle(message: tailrace.Delivery) -> None:
        try:
            job = json.loads(message.value or b"")["job"]
        except ValueError as error:
            await message.reject(f"not a job: {error}")
            return
        await asyncio.sleep(0.02)  # The work.
        if job == 7 and message.attempt == 1:
            await message.nack(delay=0.05, error="the first attempt at 7 always fails")
            return
        await message.ack()
        done[job] = name
        print(f"{name} did job {job} of {(message.key or b'').decode()}, attempt {message.attempt}")

    async with client.consumer(TOPIC, GROUP, max_attempts=3) as consumer:
        await consumer.run(handle)


async def main() -> None:
    async with tailrace.connect() as client:
        await client.admin().create_topic(TOPIC, if_missing=True)
        await publish_jobs(client)
        done: dict[int, str] = {}
        names = [f"worker {number}" for number in range(1, WORKERS + 1)]
        async with asyncio.TaskGroup() as tasks:  # The first worker that fails ends the program.
            workers = [tasks.create_task(work(client, name, done)) for name in names]
            while len(done) < JOBS:
                await asyncio.sleep(0.01)
            letters = client.dead_letters(TOPIC)
            while not (dead := await letters.list()):
                await asyncio.sleep(0.01)
            for worker in workers:
                worker.cancel()
        shares = Counter(done.values())
        print("shared: " + ", ".join(f"{name} did {shares[name]}" for name in names))
        print(f"done: {sorted(done)}")
        print(f"dead: {dead[0].message.value!r} because it was {dead[0].reason}: {dead[0].error}")


if __name__ == "__main__":
    asyncio.run(main())
