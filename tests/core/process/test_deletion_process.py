"""Deletions as a process: the seeded model with planted bugs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tailrace.core.process.deletion_process import DeletionProcess
from tailrace.core.process.process import After, Begun, Effect, Event, Now, Submit
from tests.core.process.group_world import GroupWorld
from tests.core.process.process_model import caught

SEEDS = range(80, 160)
BUG_SEEDS = range(2_000)


def test_every_seed_holds() -> None:
    assert caught(GroupWorld, SEEDS) is None


class ForgottenWhenWritten(DeletionProcess):
    """A deletion is forgotten before the partition has synced that it has forgotten the group."""

    def step(self, event: Event, now: Now) -> list[Effect]:
        return [
            effect._replace(sure=False) if isinstance(effect, Submit) else effect
            for effect in super().step(event, now)
        ]


class ForgottenAtARestart(DeletionProcess):
    def step(self, event: Event, now: Now) -> Any:
        return () if isinstance(event, Begun) else super().step(event, now)


class NotTriedAgain(DeletionProcess):
    def step(self, event: Event, now: Now) -> list[Effect]:
        return [effect for effect in super().step(event, now) if not isinstance(effect, After)]


class ConfirmedAtOnce(DeletionProcess):
    def _send(self, tag: Any) -> Submit:
        return super()._send(tag._replace(what="confirm"))


class CarriedBeforeItIsDurable(DeletionProcess):
    def step(self, event: Event, now: Now) -> Any:
        self._durable |= {(deletion.group, deletion.id) for deletion in self._deletions.pending()}
        return super().step(event, now)


@pytest.mark.parametrize(
    "bug",
    [ForgottenWhenWritten, ForgottenAtARestart, NotTriedAgain, ConfirmedAtOnce, CarriedBeforeItIsDurable],
)
def test_planted_bug_is_caught(bug: type[DeletionProcess]) -> None:
    assert caught(partial(GroupWorld, deletions=bug), BUG_SEEDS) is not None
