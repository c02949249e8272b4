"""A broker on a simulated disk, catalog and logs: cut at any step of a change, damaged by hand at rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.broker.runtime.clock import ManualClock
from tailrace.cluster.embedded import FILE, FileCoordinator
from tailrace.core.model.commands import (
    AlterTopic,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    ListTopics,
    Published,
    TopicInfo,
    TopicList,
)
from tailrace.core.model.group_commands import (
    CreateGroup,
    GroupInfo,
    GroupList,
    ListGroups,
    ResetGroup,
    ResetPlan,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.sim.sim_disk import Crash, SimDisk
from tailrace.storage.files.file_store import FileStore
from tests.broker.held_engine import HeldEngine

SEGMENT_BYTES = 4096
CLOCK = ManualClock()


class CatalogWorld:
    """One data folder, one broker process after the other on it, and what was acknowledged."""

    def __init__(self, seed: int = 0) -> None:
        self.disk = SimDisk(seed)
        self.topics: dict[str, int] = {}
        """Acknowledged topics with their partitions."""
        self.doubtful: set[str] = set()
        """Topics about which the last change said nothing: they may be there or not, old or new."""
        self.messages: dict[tuple[str, int], list[bytes]] = {}
        self.broker = self.start()

    def start(self) -> HeldEngine:
        """Another process on the same folder."""
        store = FileStore(self.disk, CLOCK, segment_bytes=SEGMENT_BYTES)
        self.broker = HeldEngine(store, FileCoordinator(self.disk))
        self.broker.settle()
        return self.broker

    def stop(self) -> None:
        """End the process in good order: snapshots are written, logs closed."""
        self.broker.engine.close(lambda: None)
        self.broker.settle()
        self.broker.engine.release()

    def restart(self) -> HeldEngine:
        """Stop, and start again."""
        self.stop()
        return self.start()

    # -- acts, each remembered when it is acknowledged

    def create(self, name: str, partitions: int = 2, **options: Any) -> None:
        """Make a topic."""
        self.doubtful.add(name)
        reply = self.broker.ask(CreateTopic(name, {"partitions": partitions, **options}))
        assert isinstance(reply, TopicInfo), reply
        self.topics[name] = partitions
        self.doubtful.discard(name)

    def create_together(self, *names: str) -> None:
        """Make topics of two partitions that all wait for the first of them, and so for each other."""
        self.doubtful.update(names)
        threads = self.broker.threads
        threads.holding = True
        answers = [self.broker.submit(CreateTopic(name, {"partitions": 2})) for name in names]
        threads.holding = False
        threads.run_held()
        self.broker.settle()
        for name, answer in zip(names, answers, strict=True):
            assert isinstance(answer[0][0], TopicInfo), answer
            self.topics[name] = 2
            self.doubtful.discard(name)

    def grow(self, name: str, partitions: int) -> None:
        """Give a topic more partitions."""
        self.doubtful.add(name)
        reply = self.broker.ask(AlterTopic(name, {"partitions": partitions, "retention_count": 1000}))
        assert isinstance(reply, TopicInfo), reply
        self.topics[name] = partitions
        self.doubtful.discard(name)

    def delete(self, name: str) -> None:
        """Delete a topic."""
        self.doubtful.add(name)
        partitions = self.topics[name]
        reply = self.broker.ask(DeleteTopic(name))
        assert isinstance(reply, TopicInfo), reply
        del self.topics[name]
        for number in range(partitions):
            self.messages.pop((name, number), None)
        self.doubtful.discard(name)

    def publish(self, name: str, partition: int, *values: bytes) -> None:
        """Store messages."""
        ((reply, _),) = self.broker.publish(*values, topic=name, partition=partition)
        assert isinstance(reply, Published), reply
        self.messages.setdefault((name, partition), []).extend(values)

    def fill(self, name: str, partition: int, segments: int = 4) -> None:
        """Store messages until there are so many segments."""
        number = 0
        while self.broker.runtime(name, partition).stats().segments < segments:
            self.publish(name, partition, b"%04d" % number + bytes(400))
            number += 1

    # -- faults

    def cut(self, step: int, act: Callable[[], None]) -> bool:
        """Do something, stop the machine at that step of the disk, and start again; False when it was done
        before that step came."""
        self.disk.crash_in = step
        try:
            act()
            self.broker.settle()
        except Crash:
            self.disk.crash()
            self.start()
            return True
        self.disk.crash_in = None
        return False

    def paths(self, folder: str) -> list[str]:
        """The files of a folder."""
        return [f"{folder}/{name}" for name in self.disk.list(folder)]

    def folder(self, name: str) -> str:
        """The folder of a topic."""
        return self.broker.engine.topics.known(name).info.folder

    def saved(self) -> bytes:
        """The catalog as a backup has it."""
        return self.disk.content(FILE)

    def put_back(self, catalog: bytes) -> None:
        """Restore the catalog from that backup."""
        handle = self.disk.open(FILE, create=True)
        self.disk.truncate(handle, 0)
        self.disk.write(handle, [catalog], 0)
        self.disk.sync(handle)
        self.disk.close(handle)
        self.disk.sync_folder("")

    # -- checks

    def check(self) -> None:
        """All that was acknowledged is there, nothing else is, and the broker is well."""
        assert self.broker.engine.faults() == []
        listed = self.broker.ask(ListTopics())
        assert isinstance(listed, TopicList)
        there = {info.name: info.options["partitions"] for info in listed.topics}
        for name, partitions in self.topics.items():
            if name not in self.doubtful:
                assert there.get(name) == partitions, f"topic {name} is {there.get(name)}"
        assert set(there) <= set(self.topics) | self.doubtful
        for (name, partition), values in self.messages.items():
            if name in there:
                assert self.broker.values(name, partition) == values
            else:
                assert name in self.doubtful
        known = {self.folder(name) for name in there}
        assert {name for name in self.disk.list("") if "~" in name and not name.startswith("_")} == known
        for name, partitions in there.items():
            numbers = {item for item in self.disk.list(self.folder(name)) if item.isdigit()}
            assert numbers == {str(number) for number in range(partitions)}

    def fault(self, name: str, partition: int) -> str:
        """What a description of the topic says about a partition; "" when it is well."""
        info = self.broker.ask(DescribeTopic(name))
        assert not isinstance(info, Refusal), info
        return info.partitions[partition]["fault"] or ""

    # -- groups

    def enlist(self, group: str, *topics: str) -> None:
        """Make a group."""
        reply = self.broker.ask(CreateGroup(group, list(topics)))
        assert isinstance(reply, GroupInfo), reply

    def move(self, group: str, topic: str, *offsets: int) -> None:
        """Let a group have settled all below these offsets, one for each partition."""
        reply = self.broker.ask(ResetGroup(group, topic, offsets=list(enumerate(offsets))))
        assert isinstance(reply, ResetPlan), reply

    def places(self, group: str, topic: str) -> list[int | None]:
        """Where a group stands on the partitions of a topic."""
        host = self.broker.engine.topics.find(topic)
        assert host is not None
        return [runtime.state.queues.committed(group) for runtime in host.runtimes]

    def groups(self) -> dict[str, GroupInfo]:
        """All groups."""
        reply = self.broker.ask(ListGroups())
        assert isinstance(reply, GroupList)
        return {info.group: info for info in reply.groups}

    def deletions(self) -> int:
        """Deletions of groups that some partition has not confirmed."""
        homes = self.broker.engine.coordinators.runtimes()
        return sum(len(list(home.state.deletions.pending())) for home in homes)
