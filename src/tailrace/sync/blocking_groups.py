"""Blocking administration of groups, dead letters and schedules."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tailrace.client.admin import dead_letters, group_admin, schedules
from tailrace.client.admin.dead_letters import DeadLetter, Filter, Redriven
from tailrace.client.admin.group_admin import Group, Reset
from tailrace.client.admin.schedules import Schedule
from tailrace.client.publish.message_fields import Headers
from tailrace.core.model.identifiers import PRIORITY_DEFAULT
from tailrace.sync.portal import Portal


class Groups:
    """Look at groups and change them; see `tailrace.Groups`."""

    def __init__(self, portal: Portal, inner: group_admin.Groups) -> None:
        self._portal = portal
        self._inner = inner

    def list(
        self, prefix: str = "", *, topic: str | None = None, timeout: float | None = None
    ) -> builtins.list[Group]:
        """Groups by name, or only those of one topic."""
        return self._portal.call(lambda: self._inner.list(prefix, topic=topic, timeout=timeout))

    def describe(self, group: str, *, timeout: float | None = None) -> Group:
        """A group with its members and partitions."""
        return self._portal.call(lambda: self._inner.describe(group, timeout=timeout))

    def create(
        self,
        group: str,
        topics: str | Sequence[str],
        *,
        if_missing: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> Group:
        """Enlist a group before anybody connects."""
        return self._portal.call(
            lambda: self._inner.create(group, topics, if_missing=if_missing, timeout=timeout, **options)
        )

    def alter(self, group: str, *, timeout: float | None = None, **options: Any) -> Group:
        """Change options of a group; see `tailrace.Groups.alter`."""
        return self._portal.call(lambda: self._inner.alter(group, timeout=timeout, **options))

    def delete(self, group: str, *, force: bool = False, timeout: float | None = None) -> None:
        """Forget a group and its state on every topic."""
        self._portal.call(lambda: self._inner.delete(group, force=force, timeout=timeout))

    def pause(self, group: str, *, timeout: float | None = None) -> None:
        """Stop deliveries to the whole group; its members stay."""
        self._portal.call(lambda: self._inner.pause(group, timeout=timeout))

    def resume(self, group: str, *, timeout: float | None = None) -> None:
        """Go on with deliveries."""
        self._portal.call(lambda: self._inner.resume(group, timeout=timeout))

    def reset(
        self,
        group: str,
        topic: str,
        to: str | int | datetime | Mapping[int, int],
        *,
        dry_run: bool = False,
        force: bool = False,
        timeout: float | None = None,
    ) -> Reset:
        """Move a group on one topic; see `tailrace.Groups.reset`."""
        return self._portal.call(
            lambda: self._inner.reset(group, topic, to, dry_run=dry_run, force=force, timeout=timeout)
        )


class DeadLetters:
    """The dead letters of one topic; see `tailrace.DeadLetters`."""

    def __init__(self, portal: Portal, inner: dead_letters.DeadLetters) -> None:
        self.topic, self.name = inner.topic, inner.name
        self._portal = portal
        self._inner = inner

    def list(
        self,
        *,
        group: str | None = None,
        reason: str | None = None,
        filter: Filter | None = None,
        limit: int = 100,
    ) -> builtins.list[DeadLetter]:
        """Those that are still there."""
        return self._portal.call(
            lambda: self._inner.list(group=group, reason=reason, filter=filter, limit=limit)
        )

    def show(self, partition: int, offset: int) -> DeadLetter:
        """One of them, by its place on the dead-letter topic."""
        return self._portal.call(lambda: self._inner.show(partition, offset))

    def redrive(
        self,
        *,
        group: str | None = None,
        reason: str | None = None,
        filter: Filter | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Send them back to where they came from; see `tailrace.DeadLetters.redrive`."""
        return self._portal.call(
            lambda: self._inner.redrive(group=group, reason=reason, filter=filter, rate=rate, dry_run=dry_run)
        )

    def purge(
        self, *, group: str | None = None, reason: str | None = None, filter: Filter | None = None
    ) -> int:
        """Forget them for good; returns how many."""
        return self._portal.call(lambda: self._inner.purge(group=group, reason=reason, filter=filter))


class Schedules:
    """Recurring schedules; see `tailrace.Schedules`."""

    def __init__(self, portal: Portal, inner: schedules.Schedules) -> None:
        self._portal = portal
        self._inner = inner

    def put(
        self,
        name: str,
        topic: str,
        cron: str,
        *,
        zone: str = "UTC",
        value: bytes | None = None,
        key: bytes | None = None,
        headers: Headers | None = None,
        priority: int = PRIORITY_DEFAULT,
        ttl: float | None = None,
        paused: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Create or replace a schedule; see `tailrace.Schedules.put`."""
        self._portal.call(
            lambda: self._inner.put(
                name,
                topic,
                cron,
                zone=zone,
                value=value,
                key=key,
                headers=headers,
                priority=priority,
                ttl=ttl,
                paused=paused,
                timeout=timeout,
            )
        )

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        """Remove a schedule."""
        self._portal.call(lambda: self._inner.delete(name, timeout=timeout))

    def list(self, prefix: str = "", *, timeout: float | None = None) -> builtins.list[Schedule]:
        """Schedules by name, with their next tick."""
        return self._portal.call(lambda: self._inner.list(prefix, timeout=timeout))

    def pause(self, name: str, *, timeout: float | None = None) -> None:
        """Let a schedule rest."""
        self._portal.call(lambda: self._inner.pause(name, timeout=timeout))

    def resume(self, name: str, *, timeout: float | None = None) -> None:
        """Let a schedule go on."""
        self._portal.call(lambda: self._inner.resume(name, timeout=timeout))
