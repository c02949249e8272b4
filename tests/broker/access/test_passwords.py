"""Passwords: argon2id at most twice at once, in turns between those who ask, and few may wait."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tailrace.broker.access.passwords import (
    AT_ONCE,
    CHEAP,
    NICE,
    STRONG,
    WAITING_MAX,
    HashThreads,
    Passwords,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.storage.threads import StorageThreads


class HeldWork:
    """Work waits until the test lets it go."""

    def __init__(self) -> None:
        self.held: list[tuple[Callable[[], object], Any]] = []
        self.most = 0

    def run(self, work: Callable[[], object], done: Any) -> None:
        self.held.append((work, done))
        self.most = max(self.most, len(self.held))

    def let_go(self) -> None:
        work, done = self.held.pop(0)
        try:
            result, error = work(), None
        except Exception as failure:
            done(None, failure)
        else:
            done(result, error)

    def let_all_go(self) -> None:
        while self.held:
            self.let_go()


class Hashing:
    """Passwords with held work, and the answers."""

    def __init__(self) -> None:
        self.work = HeldWork()
        self.passwords = Passwords(self.work.run, CHEAP)
        self.answers: list[tuple[str, Any]] = []

    def hashed(self, password: str) -> str:
        found: list[Any] = []
        self.passwords.hash("here", password, found.append)
        self.work.let_all_go()
        (text,) = found
        assert isinstance(text, str)
        return text

    def verify(self, source: str, stored: str = "", password: str = "x", **known: bool) -> None:
        def done(right: bool | Refusal) -> None:
            self.answers.append((source, right))

        self.passwords.verify(source, stored, password, done, **known)


def test_a_password_fits_its_hash_only() -> None:
    hashing = Hashing()
    stored = hashing.hashed("correct horse")
    assert stored.startswith("$argon2id$")
    assert stored != hashing.hashed("correct horse"), "each hash has a salt of its own"
    assert "correct" not in stored
    for password in ("correct horse", "Correct horse", "", "x" * 5000, "\ud800"):
        hashing.verify("a", stored, password)
    hashing.verify("a", "", "correct horse")
    hashing.verify("a", "", "nobody's password")
    hashing.work.let_all_go()
    assert [right for _, right in hashing.answers] == [True, *[False] * 6]


def test_letters_are_the_same_however_they_are_composed() -> None:
    hashing = Hashing()
    hashing.verify("a", hashing.hashed("\u00e4rger im b\u00fcro"), "a\u0308rger im bu\u0308ro")
    hashing.work.let_all_go()
    assert hashing.answers == [("a", True)]


def test_two_are_hashed_at_once() -> None:
    hashing = Hashing()
    for number in range(20):
        hashing.verify(f"source-{number % 3}")
    assert len(hashing.work.held) == AT_ONCE
    hashing.work.let_all_go()
    assert hashing.work.most == AT_ONCE
    assert len(hashing.answers) == 20


def test_sources_take_turns() -> None:
    hashing = Hashing()
    for _ in range(50):
        hashing.verify("flood")
    for _ in range(2):
        hashing.verify("guest")
    hashing.work.let_all_go()
    order = [source for source, _ in hashing.answers]
    assert order.index("guest") <= AT_ONCE + 1
    assert order[:8].count("guest") == 2


def test_who_has_most_waiting_gives_way() -> None:
    hashing = Hashing()
    for _ in range(AT_ONCE + WAITING_MAX):
        hashing.verify("flood")
    assert hashing.answers == []
    hashing.verify("guest")
    ((source, refusal),) = hashing.answers
    assert source == "flood"
    assert isinstance(refusal, Refusal)
    assert refusal.code == "overloaded"
    assert refusal.details["retry_after_ms"] > 0
    hashing.verify("flood")
    assert hashing.answers[1][0] == "flood"
    hashing.answers.clear()
    hashing.work.let_all_go()
    assert len(hashing.answers) == AT_ONCE + WAITING_MAX
    assert ("guest", False) in hashing.answers


def test_many_sources_are_bounded_together() -> None:
    hashing = Hashing()
    for number in range(AT_ONCE + WAITING_MAX + 30):
        hashing.verify(f"source-{number}")
    assert len(hashing.answers) == 30
    hashing.work.let_all_go()
    assert len(hashing.answers) == AT_ONCE + WAITING_MAX + 30


def test_strangers_from_many_addresses_do_not_keep_out_who_is_known() -> None:
    hashing = Hashing()
    stored = hashing.hashed("right")
    for number in range(2 * WAITING_MAX):
        hashing.verify(f"10.0.{number // 256}.{number % 256}")
    hashing.answers.clear()
    for _ in range(3):
        hashing.verify("home", stored, "right", known=True)
    for _ in range(AT_ONCE + 2 * 3):
        hashing.work.let_go()
    assert [right for source, right in hashing.answers if source == "home"] == [True] * 3
    assert len(hashing.answers) == AT_ONCE + 2 * 3, "strangers have every other turn"
    hashing.work.let_all_go()
    strangers = [source for source, right in hashing.answers if right is False]
    assert len(strangers) == WAITING_MAX + AT_ONCE


def test_a_stored_hash_that_is_none_is_told_and_stops_nothing() -> None:
    hashing = Hashing()
    hashing.verify("a", "no hash")
    hashing.verify("a")
    hashing.work.let_all_go()
    (_, refusal), (_, right) = hashing.answers
    assert isinstance(refusal, Refusal)
    assert refusal.code == "error"
    assert right is False


def test_no_repr_of_waiting_work_shows_a_password() -> None:
    hashing = Hashing()
    hashing.verify("a", "", "correct horse")
    hashing.passwords.hash("a", "correct horse", lambda stored: None)
    assert "correct" not in repr(hashing.work.held)


def test_an_answer_that_fails_stops_nothing() -> None:
    hashing = Hashing()

    def fails(right: object) -> None:
        raise RuntimeError("the test asked for it")

    for _ in range(AT_ONCE):
        hashing.passwords.verify("a", "", "x", fails)
    hashing.verify("a")
    for _ in range(AT_ONCE):
        with pytest.raises(RuntimeError):
            hashing.work.let_go()
    hashing.work.let_all_go()
    assert hashing.answers == [("a", False)]


def test_threads_of_their_own_call_back_on_the_loop() -> None:
    ready = threading.Event()
    storage = StorageThreads(ready.set, count=1, readers=1)
    hashing = HashThreads(storage.tell)
    try:
        passwords = Passwords(hashing.run, CHEAP)
        answers: list[Any] = []
        passwords.hash("a", "correct horse", answers.append)
        passwords.verify("a", "", "x", answers.append)
        passwords.verify("a", "broken", "x", answers.append)
        while len(answers) < 3:
            assert ready.wait(30)
            ready.clear()
            for done, result, error in storage.completed():
                done(result, error)
        assert {type(answer) for answer in answers} == {str, bool, Refusal}
        hashing.close()
        passwords.verify("a", "", "x", answers.append)
        for done, result, error in storage.completed():
            done(result, error)
        assert isinstance(answers[3], Refusal)
        assert answers[3].code == "unavailable"
    finally:
        hashing.close()
        storage.close()


def test_the_threads_step_back_and_the_others_do_not() -> None:
    ready = threading.Event()
    storage = StorageThreads(ready.set, count=1, readers=1)
    hashing = HashThreads(storage.tell)
    seen: list[Any] = []
    try:
        hashing.run(
            lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
            lambda *told: seen.append(told),
        )
        while not seen:
            assert ready.wait(30)
            ready.clear()
            for done, result, error in storage.completed():
                done(result, error)
    finally:
        hashing.close()
        storage.close()
    assert seen == [(NICE, None)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < NICE


def test_the_profile_that_is_used_is_what_the_documents_say() -> None:
    """At least what OWASP recommends: 46 MiB and one pass."""
    assert STRONG.memory_kib * STRONG.passes >= 46 * 1024
    assert CHEAP.memory_kib < 1024
    assert 1 <= AT_ONCE <= 2
