"""A job queue: workers share the jobs, a failing job is tried again, a hopeless one goes to the dead letters.

python examples/job_queue.py                     against the broker of TAILRACE_URL, or the default one
"""

import asyncio
import json

import tailrace

TOPIC, GROUP = "example-jobs", "workers"


async def publish_jobs(client: tailrace.Client) -> None:
    async with client.producer(TOPIC) as producer:
        for number in range(20):
            await producer.send(json.dumps({"job": number}).encode(), key=f"customer-{number % 4}".encode())
        await producer.send(b"this is no job")


async def work(client: tailrace.Client, name: str, done: list[int]) -> None:
    async with client.consumer(TOPIC, GROUP, assignment="shared", max_attempts=3) as consumer:
        async for message in consumer:
            try:
                job = json.loads(message.value or b"")["job"]
            except ValueError as error:
                await message.reject(f"not a job: {error}")
                continue
            if job == 7 and message.attempt == 1:
                await message.nack(delay=0.05, error="the first attempt at 7 always fails")
                continue
            await message.ack()
            done.append(job)
            print(f"{name} did job {job} of {(message.key or b'').decode()}, attempt {message.attempt}")


async def main() -> None:
    async with tailrace.connect() as client:
        await client.admin().create_topic(TOPIC, if_missing=True)
        await publish_jobs(client)
        done: list[int] = []
        workers = [asyncio.create_task(work(client, f"worker {number}", done)) for number in (1, 2, 3)]
        while len(done) < 20:
            await asyncio.sleep(0.01)
        letters = client.dead_letters(TOPIC)
        while not (dead := await letters.list()):
            await asyncio.sleep(0.01)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        print(f"done: {sorted(done)}")
        print(f"dead: {dead[0].message.value!r} because it was {dead[0].reason}: {dead[0].error}")


if __name__ == "__main__":
    asyncio.run(main())
