"""The engine: a broker without listeners; stores, catalog, pump and gateway put together, and their upkeep.

A node with sockets, a broker embedded in an application and a broker for tests are this engine with
different hosts around its pump.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from tailrace.broker.access.access_verbs import AccessVerbs
from tailrace.broker.access.audit import Audit
from tailrace.broker.access.authenticator import CredentialCheck
from tailrace.broker.access.authority import Authority, BrokerNames
from tailrace.broker.access.passwords import Passwords
from tailrace.broker.access.quotas import Quotas, TopicUse
from tailrace.broker.deadletter.dead_letter_batch import dead_letters
from tailrace.broker.deadletter.dead_letter_verbs import DeadLetterVerbs
from tailrace.broker.delay.delay_verbs import DelayVerbs
from tailrace.broker.gateway import Gateway, VerbPart
from tailrace.broker.groups.cron_verbs import CronVerbs, cron
from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.groups.group_processes import deletions, grants, sessions
from tailrace.broker.groups.group_reports import GroupReports, stats_of_all
from tailrace.broker.groups.group_verbs import GroupVerbs
from tailrace.broker.local_router import LocalRouter
from tailrace.broker.metrics import Metrics, Strays
from tailrace.broker.partition.coordinator_partition import CoordinatorListeners, CoordinatorPartition
from tailrace.broker.partition.credit_waiters import CreditWaiter, CreditWaiters
from tailrace.broker.partition.delay_prefetch import releases
from tailrace.broker.partition.queue_partition import QueueListeners, QueuePartition
from tailrace.broker.partition.staged_reads import StagedReads
from tailrace.broker.queue.key_reads import KeyReads
from tailrace.broker.queue.lease_verbs import LeaseVerbs
from tailrace.broker.runtime.process_driver import ProcessDriver, Processes
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.replay_debt import ReplayBounds, due
from tailrace.broker.runtime.turn import Countdown
from tailrace.broker.staged.staged_verbs import StagedVerbs, staged
from tailrace.broker.topics import Topics, kept_text
from tailrace.broker.trace.fact_reads import FactReads
from tailrace.broker.trace.trace_verbs import TraceVerbs
from tailrace.broker.upkeep.loss_acceptance import LossAcceptance
from tailrace.broker.upkeep.scrub_runner import ScrubRunner
from tailrace.broker.upkeep.space_watch import SpaceWatch
from tailrace.cluster.identity_file import MemoryIdentities
from tailrace.core.model.access import Identities
from tailrace.core.model.group_commands import Place
from tailrace.core.model.identifiers import TopicPartition
from tailrace.core.model.topic_options import decode_folder
from tailrace.core.process.credit_process import CreditProcess
from tailrace.ports import Clock, IdentityStore, LogStats, LogStore, Registry, SpaceGauge, Threads

log = logging.getLogger("tailrace.engine")

SWEEP_US = 60_000_000
SYNC_CHECK_US = 100_000
AGE_US = 5_000_000
"""Period of `FrameCache.age`: cached frames are dropped one to two periods after their last use."""


class Engine:
    """All parts of a broker that do not depend on how clients reach it."""

    def __init__(
        self,
        clock: Clock,
        threads: Threads,
        stores: dict[str, LogStore],
        coordinator: Registry,
        *,
        wake: Callable[[], None] = lambda: None,
        arm: Callable[[int], None] = lambda due_us: None,
        sync_check_us: int = SYNC_CHECK_US,
        topic_defaults: dict[str, Any] | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        scrub_period_us: int = 0,
        replay_bounds: ReplayBounds | None = None,
        gauge: SpaceGauge | None = None,
        free_bytes_low: int = 0,
        identities: IdentityStore | None = None,
        passwords: Passwords | None = None,
        owners: Collection[int] = (),
        identities_changed: Callable[[], None] = lambda: None,
        audit_line: Callable[[bytes], bool] = lambda line: True,
    ) -> None:
        self.replay_bounds = replay_bounds or ReplayBounds()
        self._sync_check_us = sync_check_us
        self.metrics = Metrics(self._figures, lambda: stats_of_all(self.topics), self._strays)
        self.pump = Pump(clock, threads, wake, arm, lambda: self.space.filled())
        self.space = SpaceWatch(self.pump, self.metrics, gauge, free_bytes_low, self._give_back)
        self.stores = stores
        credit = CreditWaiters(self.pump).process
        self.quotas = Quotas(clock, self._topic_uses, credit.held)
        self.topics = Topics(
            stores,
            coordinator,
            self.pump,
            self.metrics,
            self._queue_listeners(credit),
            CoordinatorListeners(self._coordinator_processes, self._coordinator_reopened),
            defaults=topic_defaults or {},
            changed=lambda name: self.coordination.topic_changed(name),
            trouble=lambda: self.space.trouble,
            too_many=self.quotas.too_many_topics,
        )
        self.leasing = LeaseVerbs(
            self.topics, self.pump, self.metrics, credit, self._hungry, entropy, ceiling=self.quotas
        )
        self.router = LocalRouter(self.topics)
        self.coordinators = GroupDirectory(self.topics)
        self.staged_writes = StagedVerbs(self.topics, self.coordinators)
        self.coordination = GroupVerbs(self.topics, self.pump, self.coordinators, self.leasing.evict)
        self.cron = CronVerbs(self.topics, self.pump, self.coordinators)
        self.authority = Authority(self._names(), (self._rights_changed, identities_changed))
        self.audit = Audit(self.pump, audit_line, self.authority.explained)
        passwords, told = passwords or Passwords(threads.read), self.audit.logged_in
        self.authenticator = CredentialCheck(self._identities, passwords, self.pump, owners=owners, told=told)
        stored = identities or MemoryIdentities()
        self.access = AccessVerbs(self.authority, stored, passwords, self.pump, entropy)
        store = stores[self.topics.storage()]
        self.scrubbing = ScrubRunner(self.topics, self.pump, store, self.metrics, scrub_period_us)
        self.key_reading = KeyReads(self.topics, self.pump, self.metrics)
        self.gateway = self._gateway()

    def _gateway(self) -> Gateway:
        places = self.topics, self.pump, self.metrics, self.space
        return Gateway(*places, self.authority, self._parts(), quotas=self.quotas, audit=self.audit)

    def _names(self) -> BrokerNames:
        return BrokerNames(self.topics, self.coordinators)

    def _parts(self) -> list[VerbPart]:
        """Everything that answers requests, beside the gateway itself."""
        return [
            self.leasing,
            self.staged_writes,
            self.coordination,
            GroupReports(self.topics, self.pump, self.coordination),
            self.cron,
            DelayVerbs(self.topics, self.pump),
            DeadLetterVerbs(self.topics, self.leasing.book.new_lease),
            LossAcceptance(self.topics),
            self.scrubbing,
            TraceVerbs(self.topics, self.pump),
            FactReads(self.topics, self.pump),
            self.key_reading,
            self.access,
        ]

    def open(self, progress: Callable[[str, int, int], None] = lambda name, done, total: None) -> None:
        """Load users and rules, recover every partition (blocking), and start."""
        self.access.load()
        self.recover(progress)
        self.start()

    def recover(self, progress: Callable[[str, int, int], None] = lambda name, done, total: None) -> None:
        """Recover every partition; blocking, in any thread, before `start`."""
        self.space.open()
        self.topics.open(progress)

    def start(self) -> None:
        """Begin the upkeep, and resume what the last run left unfinished."""
        for runtime in list(self.topics.runtimes()):
            runtime.start()
        self.space.start()
        self.pump.every(self._sync_check_us, self._sync)
        self.pump.every(SWEEP_US, self._sweep)
        self.pump.every(AGE_US, self._age)
        self.coordination.start()
        self.scrubbing.start()
        self.key_reading.warm()

    # -- what partitions ask and tell; by then every part is made

    def _queue_listeners(self, credit: CreditProcess[CreditWaiter]) -> QueueListeners:
        hooks = self._processes, self._overslept, self._reopened
        return QueueListeners(credit, *hooks, StagedReads(self.pump), self._staged_expired)

    def _processes(self, queue: QueuePartition) -> Processes:
        home = TopicPartition(queue.topic, queue.partition)
        _, topic_id = decode_folder(queue.name.rpartition("/")[0])
        kinds = (
            dead_letters(home, topic_id, self.metrics),
            releases(home, topic_id, queue.prefetch, self.metrics),
        )
        return Processes(ProcessDriver(kind, queue, self.router, self.pump) for kind in kinds)

    def _coordinator_processes(self, runtime: CoordinatorPartition) -> Processes:
        home, groups = TopicPartition(runtime.topic, runtime.partition), self.coordination
        kinds = (
            sessions(home, groups.sessions.told),
            grants(home, groups.touch),
            deletions(home, groups.left),
            cron(home, self.authority.may_tick),
            staged(home),
        )
        return Processes(ProcessDriver(kind, runtime, self.router, self.pump) for kind in kinds)

    def _overslept(self, group: str, member: str) -> None:
        self.leasing.overslept(group, member)

    def _hungry(self, group: str, member: str, places: list[Place]) -> None:
        self.coordination.sessions.hungry(group, member, places)

    def _staged_expired(self, place: TopicPartition, attempts: Sequence[int]) -> None:
        self.staged_writes.expired(place, attempts)

    def _reopened(self, queue: QueuePartition) -> None:
        self.coordination.reopened(queue)

    def _coordinator_reopened(self, home: CoordinatorPartition) -> None:
        self.coordination.coordinator_reopened(home)

    def _identities(self) -> Identities:
        return self.authority.identities

    def _rights_changed(self) -> None:
        self.gateway.recheck()
        self.quotas.put(self.authority.identities)
        self.leasing.recheck(self.authority.refusal)

    # -- upkeep

    def _sync(self, now_us: int) -> None:
        runtimes = list(self.topics.runtimes())
        for runtime in runtimes:
            runtime.sync(now_us)
        owing = {runtime.upkeep: runtime for runtime in runtimes if runtime.replayed}
        for upkeep in due(owing, now_us, self.replay_bounds):
            owing[upkeep].shorten_replay()

    def _age(self, now_us: int) -> None:
        for queue in self.topics.queues():
            queue.cache.age()

    def _sweep(self, now_us: int) -> None:
        for queue in self.topics.queues():
            queue.sweep()
            queue.report_expired()

    def _give_back(self) -> None:
        for queue in self.topics.queues():
            queue.sweep()
            queue.press()

    def _figures(self) -> Iterator[tuple[str, int, LogStats]]:
        for host in self.topics.hosts():
            for partition, runtime in host.numbered():
                yield host.info.name, partition, runtime.stats()

    def _topic_uses(self) -> Iterator[TopicUse]:
        for host in self.topics.queue_hosts():
            nbytes = sum(runtime.stats().bytes for runtime in host.runtimes)
            yield TopicUse(host.info.name, host.info.owner, nbytes)

    def _strays(self) -> Strays:
        return Strays(len(self.coordination.unknown.find()), len(self.topics.kept))

    def faults(self) -> list[str]:
        """Reasons why the broker is not healthy; empty if it is."""
        full = self.space.trouble
        return (
            ([full] if full else [])
            + [kept_text(kept) for kept in self.topics.kept]
            + [
                f"{host.info.name}/{partition}: {runtime.fault.message}"
                for host in self.topics.hosts()
                for partition, runtime in host.numbered()
                if runtime.fault is not None
            ]
        )

    def drain(self) -> None:
        """Take no more requests, and answer those that wait."""
        self.gateway.close()
        self.access.close()
        self.leasing.close()
        self.coordination.close()
        self.scrubbing.close()
        self.key_reading.close()

    def close(self, closed: Callable[[], None]) -> None:
        """Take no more requests, answer those that wait, finish all storage work, store snapshots and sync;
        then call `closed`.
        """
        self.drain()
        self.audit.close()
        self.topics.close(lambda: self._close_partitions(closed))

    def _close_partitions(self, closed: Callable[[], None]) -> None:
        runtimes = list(self.topics.runtimes())
        one_less = partial(_closed, Countdown(len(runtimes), closed))
        for runtime in runtimes:
            try:
                runtime.close(one_less)
            except Exception as error:  # Close the others properly all the same.
                one_less(None, error)

    def release(self) -> None:
        """Stop the threads and unlock the stores; blocking."""
        self.pump.threads.close()
        for store in self.stores.values():
            store.close()


def _closed(all_closed: Countdown, result: object, error: Exception | None) -> None:
    """A log was closed."""
    if error is not None:
        log.error("closing a log failed, its tail will be checked at the next start: %s", error)
    all_closed.one()
