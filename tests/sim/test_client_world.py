"""The client world holds over fixed seeds, and each planted bug is caught: the test of the tests.

Covers `sim/late_storage.py`, `sim/log_contents.py`, `sim/virtual_time.py`, `sim/actors/sim_clients.py`,
`sim/actors/sim_consumers.py`, `sim/actors/surroundings.py` and `sim/worlds/client_world.py`.
"""

from typing import Any

import pytest

from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.turn import NOTHING, Turn
from tailrace.client.publish.partition_flow import PartitionFlow, PendingBatch
from tailrace.client.rpc.retries import Retries
from tailrace.core.model.commands import Published
from tailrace.format import frame
from tailrace.sim.worlds import client_world
from tests.sim.planted import Plant, first_caught, reached, title

SEEDS = 40
BUG_SEEDS = 150


def test_every_seed_holds_and_nearly_every_state_is_reached() -> None:
    found = reached(client_world.run, range(SEEDS))
    assert len(client_world.STATES - found) <= 1, client_world.STATES - found


def test_a_sync_that_failed_just_before_the_end_of_trouble_needs_a_restart() -> None:
    """The broker had not heard of it yet."""
    client_world.run(720_109)


def test_same_seed_same_run() -> None:
    assert client_world.run(7) == client_world.run(7)


def _identity_kept_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is given up in doubt, and the next one gets its number."""

    def renumber(self: PartitionFlow, numbered: list[PendingBatch]) -> None:
        waiting = [batch for batch in numbered if not batch.done]
        used = [batch.sequence for batch in numbered if batch.sequence is not None]
        self._next_sequence = min([*used, self._next_sequence - 1])
        for batch in waiting:
            batch.sequence, batch.doubtful = self._next_sequence, False
            self._next_sequence += 1

    monkeypatch.setattr(PartitionFlow, "_renew_identity", renumber)


def _resent_while_others_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = PartitionFlow._answered

    def hasty(self: PartitionFlow, batch: PendingBatch, reply: Any) -> None:
        answered(self, batch, reply)
        if self._recovering and self.flight:
            self._recover()

    monkeypatch.setattr(PartitionFlow, "_answered", hasty)


def _hole_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    recover = PartitionFlow._recover

    def keep(self: PartitionFlow) -> None:
        self._hole = None
        for batch in (*self._returned, *self.queue):
            batch.gap = None
        recover(self)

    monkeypatch.setattr(PartitionFlow, "_recover", keep)


def _stored_ones_before_a_hole_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is numbered anew from the first one that came back, also over numbers that are used."""
    recover = PartitionFlow._recover

    def close_up(self: PartitionFlow) -> None:
        back = [batch.sequence for batch in self._returned if batch.sequence is not None and not batch.done]
        if self._hole is not None and back:
            self._hole = min(self._hole, min(back) - 1)
            for batch in self._returned:
                batch.doubtful = False
        recover(self)

    monkeypatch.setattr(PartitionFlow, "_recover", close_up)


def _certain_in_spite_of_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = PendingBatch.settle

    def trusting(self: PendingBatch, stored: Any, error: Any) -> None:
        if error is not None and error.code in ("fenced", "unavailable"):
            error.outcome = "none"
        settle(self, stored, error)

    monkeypatch.setattr(PendingBatch, "settle", trusting)


def _fenced_one_claims_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In doubt, an older producer of a name takes it back from the newer one."""
    claim = PartitionFlow._claim

    def forgetful(self: PartitionFlow) -> None:
        self._claimed, known = None, self._claimed
        renewed = known is not None
        submit = self._outside.submit
        if renewed:  # the world shall not take it for a producer that opens
            monkeypatch.setattr(self._outside, "submit", self._outside.line.submit)  # type: ignore[attr-defined]
        claim(self)
        if renewed:
            monkeypatch.setattr(self._outside, "submit", submit)

    monkeypatch.setattr(PartitionFlow, "_claim", forgetful)


def _answered_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    write = PartitionRuntime._write

    def early(self: PartitionRuntime, turn: Turn) -> None:
        replies, turn.replies = turn.replies, []
        write(self, turn)
        for respond, reply in replies:
            respond(reply, NOTHING)

    monkeypatch.setattr(PartitionRuntime, "_write", early)


def _delivered_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    write = PartitionRuntime._write

    def early(self: PartitionRuntime, turn: Turn) -> None:
        for item in turn.frames:
            if item.header.kind == frame.DATA:
                self.tail.push(item)
        self._notify()
        self.tail.__dict__["push"] = lambda item: None
        write(self, turn)
        del self.tail.__dict__["push"]

    monkeypatch.setattr(PartitionRuntime, "_write", early)


def _decided_on_what_is_not_stored_yet(wanted: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that need no write leave at once, although they speak of what is being written."""
    turn = PartitionRuntime.turn

    def eager(self: PartitionRuntime, now_us: int) -> None:
        waiting = list(self._turns)
        known = {id(entry): len(entry.replies) for entry in waiting}
        turn(self, now_us)
        for entry in waiting:
            late, entry.replies = entry.replies[known[id(entry)] :], entry.replies[: known[id(entry)]]
            for respond, reply in late:
                if isinstance(reply, Published) == (wanted is Published):
                    respond(reply, NOTHING)
                else:
                    entry.replies.append((respond, reply))

    monkeypatch.setattr(PartitionRuntime, "turn", eager)


def _retry_answered_before_the_first_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    _decided_on_what_is_not_stored_yet(Published, monkeypatch)


def _refused_before_its_reason_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    _decided_on_what_is_not_stored_yet(object, monkeypatch)


def _state_kept_after_a_failed_append(monkeypatch: pytest.MonkeyPatch) -> None:
    reopen = PartitionRuntime.reopen

    def keep(self: PartitionRuntime, *how: Any) -> None:
        ahead = self.state
        adopt = self._adopt

        def adopt_log_only(state: Any, *others: Any) -> None:
            adopt(state, *others)
            self.state = ahead

        monkeypatch.setattr(self, "_adopt", adopt_log_only)
        reopen(self, *how)

    monkeypatch.setattr(PartitionRuntime, "reopen", keep)


def _failed_sync_said_to_be_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = PartitionRuntime.fail

    def certain(self: PartitionRuntime, error: Exception, *, outcome: str | None = None) -> None:
        fail(self, error, outcome="none")

    monkeypatch.setattr(PartitionRuntime, "fail", certain)


def _refusals_that_ask_for_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic's refusal sets a timer that asks for all topics: timers double while the broker is away."""

    def refused(self: Retries, name: str, least_s: float = 0.02) -> None:
        pause_s = self._pauses_s.get("", least_s)
        self._pauses_s[""] = min(pause_s * 2, 0.25)
        self._loop.call_later(pause_s, self._ask)

    monkeypatch.setattr(Retries, "refused", refused)


def _refusals_that_are_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retries, "_arm", lambda self: None)


BUGS: list[Plant] = [
    _identity_kept_in_doubt,
    _resent_while_others_are_under_way,
    _hole_not_closed,
    _stored_ones_before_a_hole_forgotten,
    _certain_in_spite_of_doubt,
    _fenced_one_claims_again,
    _answered_before_it_is_stored,
    _delivered_before_it_is_stored,
    _retry_answered_before_the_first_is_stored,
    _refused_before_its_reason_is_stored,
    _state_kept_after_a_failed_append,
    _failed_sync_said_to_be_harmless,
    _refusals_that_ask_for_everything_again,
    _refusals_that_are_the_last_word,
]


@pytest.mark.parametrize("plant", BUGS, ids=title)
def test_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert first_caught(client_world.run, range(BUG_SEEDS), by=Exception) is not None
