"""How long does it take to make a thousand topics, and how much disk do a thousand partitions take?"""

from __future__ import annotations

import os
import subprocess
import time

from bench.harness import Case, Run
from bench.results import Sample
from bench.roles.admins import AdminDone, AdminJob

TOPICS, MESSAGES = 1000, 3
PATIENCE_S = 300.0
CREATE_S, DISK_S = 40.0, 30.0
SYNCS = 200


def create(run: Run) -> list[Sample]:
    """One after the other from one client, with the defaults; beside it, as many more all at once."""
    count = run.scaled(TOPICS)
    sync_ms = _sync_ms(run)
    with run.broker(keep=True) as broker:
        with run.role("admins", AdminJob(url=broker.url, topics=count)) as child:
            one_by_one = child.answer(AdminDone, PATIENCE_S).seconds
        with run.role("admins", AdminJob(url=broker.url, topics=count, at_once=True)) as child:
            at_once = child.answer(AdminDone, PATIENCE_S).seconds
    with run.broker() as broker:
        startup_s = broker.startup_s
    said: dict[str, object] = {
        "topics": count,
        "partitions_each": 3,
        "how": "one after the other, one client",
        "as_many_more_at_once_s": round(at_once, 2),
        "sync_ms": round(sync_ms, 2),
        "start_with_all_s": round(startup_s, 2),
    }
    return [Sample(name="create_1000_topics_s", value=one_by_one, unit="s", conditions=said)]


def _sync_ms(run: Run) -> float:
    """What a sync of a small file costs on this disk at this time."""
    took = []
    handle = os.open(run.folder / "synced", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        for number in range(SYNCS):
            os.pwrite(handle, b"x" * 256, number * 256)
            began = time.perf_counter()
            os.fdatasync(handle)
            took.append(time.perf_counter() - began)
    finally:
        os.close(handle)
    return sorted(took)[SYNCS // 2] * 1000


def disk(run: Run) -> list[Sample]:
    """What `du` says of the data folder, `_groups` and dead letters included, while the broker runs."""
    count = run.scaled(TOPICS)
    with run.broker() as broker:
        with run.role("admins", AdminJob(url=broker.url, topics=count, messages=MESSAGES)) as child:
            child.answer(AdminDone, PATIENCE_S)
        told = subprocess.run(
            ["du", "-s", "--block-size=1", str(run.folder / "data")], check=True, capture_output=True
        )
    used = int(told.stdout.split()[0])
    said: dict[str, object] = {"partitions": count, "messages_each": MESSAGES, "durability": "fsync"}
    value = used / 1e6
    return [Sample(name="disk_mb_1000_partitions", value=value, unit="MB", conditions=said)]


CREATE = Case(("create_1000_topics_s",), CREATE_S, create)
DISK = Case(("disk_mb_1000_partitions",), DISK_S, disk)
