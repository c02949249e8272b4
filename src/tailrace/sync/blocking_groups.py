"""Blocking administration of groups, dead letters and schedules."""

from __future__ import annotations

from tailrace.client.admin import dead_letters, group_admin, schedules
from tailrace.sync.blocking_wrapper import BlockingWrapper, blocking
from tailrace.sync.portal import Portal


class Groups(BlockingWrapper[group_admin.Groups]):
    """Look at groups and change them; see `tailrace.Groups`."""

    list = blocking(group_admin.Groups.list)
    describe = blocking(group_admin.Groups.describe)
    create = blocking(group_admin.Groups.create)
    alter = blocking(group_admin.Groups.alter)
    delete = blocking(group_admin.Groups.delete)
    pause = blocking(group_admin.Groups.pause)
    resume = blocking(group_admin.Groups.resume)
    reset = blocking(group_admin.Groups.reset)


class DeadLetters(BlockingWrapper[dead_letters.DeadLetters]):
    """The dead letters of one topic; see `tailrace.DeadLetters`."""

    def __init__(self, portal: Portal, inner: dead_letters.DeadLetters) -> None:
        super().__init__(portal, inner)
        self.topic, self.name = inner.topic, inner.name

    list = blocking(dead_letters.DeadLetters.list)
    show = blocking(dead_letters.DeadLetters.show)
    redrive = blocking(dead_letters.DeadLetters.redrive)
    purge = blocking(dead_letters.DeadLetters.purge)


class Schedules(BlockingWrapper[schedules.Schedules]):
    """Recurring schedules; see `tailrace.Schedules`."""

    put = blocking(schedules.Schedules.put)
    delete = blocking(schedules.Schedules.delete)
    list = blocking(schedules.Schedules.list)
    pause = blocking(schedules.Schedules.pause)
    resume = blocking(schedules.Schedules.resume)
