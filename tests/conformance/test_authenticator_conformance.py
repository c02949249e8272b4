"""What `Authenticator` promises: one answer for each login, and callers whose proof ends when it ends.

Covers `broker/access/authenticator.py`.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tailrace.broker.access.authenticator import NEEDED, WRONG, CredentialCheck
from tailrace.broker.access.passwords import CHEAP, Passwords
from tailrace.broker.runtime.clock import ManualClock
from tailrace.broker.runtime.pump import Pump
from tailrace.core.access import slow_down
from tailrace.core.access.identity_changes import Particulars, change
from tailrace.core.access.tokens import new_token
from tailrace.core.model.access import OWNER, Caller, Identities, Origin
from tailrace.core.model.access_commands import (
    AddUser,
    AlterUser,
    CreateToken,
    RemoveUser,
    RevokeToken,
    TokenMade,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.format.wire import Credentials
from tailrace.ports import Authenticator
from tests.broker.held_engine import HeldThreads

PASSWORD = "correct horse"
ME = 4711
FAR = Origin("10.0.0.1")
Build = Callable[["Door"], Authenticator]


def _credential_check(door: "Door") -> Authenticator:
    return CredentialCheck(
        lambda: door.identities,
        Passwords(door.threads.read, CHEAP),
        door.pump,
        owners={0, ME},
        told=lambda origin, claimed, end: door.told.append((origin, claimed, end)),
    )


class Door:
    """An authenticator in front of identities, on virtual time."""

    def __init__(self, build: Build) -> None:
        self.clock = ManualClock()
        self.threads = HeldThreads()
        self.pump = Pump(self.clock, self.threads)
        self.identities = Identities()
        self.random = Random(5)
        self.told: list[tuple[Origin, str, Caller | Refusal]] = []
        self.authenticator = build(self)
        self.work = Passwords(self.threads.read, CHEAP)

    def do(self, command: Any) -> Any:
        token = new_token(self.random.randbytes)
        hashes: list[Any] = [""]
        if getattr(command, "password", None):
            self.work.hash("here", command.password, hashes.append)
            self.settle()
        given = Particulars(
            self.clock.wall_us(),
            password=hashes[-1],
            token_id=token.id,
            digest=token.digest,
            secret=token.text,
        )
        outcome = change(self.identities, command, given)
        assert not isinstance(outcome, Refusal), outcome
        self.identities, reply = outcome
        return reply

    def settle(self) -> None:
        while self.pump.drain():
            pass

    def begin(self, credentials: Credentials | None = None, origin: Origin = FAR) -> list[Caller | Refusal]:
        answers: list[Caller | Refusal] = []
        self.authenticator.authenticate(credentials, origin, answers.append)
        return answers

    def ends(self, answers: list[Caller | Refusal]) -> Caller | Refusal:
        """The end of a login, however long it takes."""
        self.settle()
        while not answers:
            due_us = self.pump.next_deadline_us()
            assert due_us is not None, "nobody answers"
            self.clock.set_us(max(due_us, self.clock.now_us()))
            self.pump.tick()
            self.settle()
        (end,) = answers
        return end

    def login(self, credentials: Credentials | None = None, origin: Origin = FAR) -> Caller | Refusal:
        return self.ends(self.begin(credentials, origin))

    def caller(self, credentials: Credentials | None = None, origin: Origin = FAR) -> Caller:
        end = self.login(credentials, origin)
        assert isinstance(end, Caller), end
        assert self.still(end) is None
        return end

    def refused(self, credentials: Credentials | None = None, origin: Origin = FAR) -> str:
        end = self.login(credentials, origin)
        assert isinstance(end, Refusal), end
        assert end.code == "unauthenticated"
        return end.message

    def still(self, caller: Caller) -> Refusal | None:
        return self.authenticator.still(caller, self.clock.wall_us())

    def over(self, caller: Caller) -> bool:
        refusal = self.still(caller)
        assert refusal is None or refusal.code == "unauthenticated"
        return refusal is not None


@pytest.fixture(params=[_credential_check], ids=["CredentialCheck"])
def door(request: pytest.FixtureRequest) -> Door:
    return Door(request.param)


@pytest.fixture
def known(door: Door) -> Door:
    """With an administrator, and anna, who can prove herself in every way."""
    door.do(AddUser("root", PASSWORD))
    door.do(AddUser("anna", "annas secret", [], ["DNS:anna", "URI:spiffe://x/anna"], ["anna", "1234"]))
    return door


def anna(password: str = "annas secret") -> Credentials:
    return Credentials("anna", password)


def test_without_users_everybody_is_open_until_there_is_one(door: Door) -> None:
    caller = door.caller()
    assert (caller.proof, caller.user, caller.address, caller.trusted) == ("open", "", "10.0.0.1", True)
    assert door.caller(Credentials(token="trt_old")).proof == "open"
    owner = door.caller(origin=Origin("", uid=ME))
    assert owner.proof == "owner"
    door.do(AddUser("root", PASSWORD))
    assert door.over(caller)
    assert not door.over(owner)
    assert not door.over(OWNER)
    assert door.refused() == NEEDED
    assert door.refused(Credentials()) == NEEDED


def test_the_owner_is_known_by_its_user_of_the_operating_system(known: Door) -> None:
    for uid in (0, ME):
        assert known.caller(origin=Origin("", uid=uid)).proof == "owner"
    assert known.caller(anna(), Origin("", uid=ME)).user == "anna", "credentials that are given count alone"
    assert known.refused(anna("wrong"), Origin("", uid=ME)) == WRONG


def test_users_of_the_operating_system(known: Door) -> None:
    caller = known.caller(origin=Origin("", uid=1234))
    assert (caller.user, caller.proof, caller.credential) == ("anna", "socket", "1234")
    assert "65533" in known.refused(origin=Origin("", uid=65533))
    known.do(AlterUser("anna", system_users=["daemon"]))
    assert known.over(caller)
    assert known.caller(origin=Origin("", uid=1)).credential == "daemon"


def test_passwords(known: Door) -> None:
    caller = known.caller(anna())
    assert (caller.user, caller.proof) == ("anna", "password")
    assert "secret" not in repr(caller)
    known.do(AlterUser("anna", teams=["shop"]))
    assert not known.over(caller)
    known.do(AlterUser("anna", password="another secret"))
    assert known.over(caller)
    assert known.refused(anna()) == WRONG
    again = known.caller(anna("another secret"))
    known.do(AlterUser("anna", password=""))
    assert known.over(again)
    assert known.refused(anna("another secret")) == WRONG
    assert known.refused(anna("")) == WRONG


def test_an_unknown_user_and_a_wrong_password_are_told_the_same_after_the_same_work(known: Door) -> None:
    known.do(AddUser("tokens-only"))
    known.threads.holding = True
    for credentials in (anna("wrong"), Credentials("nobody", "wrong"), Credentials("tokens-only", "wrong")):
        answers = known.begin(credentials, Origin(f"10.0.0.{credentials.user}"))
        assert answers == []
        assert len(known.threads.held) == 1
        known.threads.run_held()
        end = known.ends(answers)
        assert isinstance(end, Refusal)
        assert (end.message, end.code, end.details) == (WRONG, "unauthenticated", {})


@pytest.mark.parametrize("command", [RemoveUser("anna"), AlterUser("anna", "another secret")])
def test_a_user_that_changes_while_its_password_is_compared_is_not_let_in(known: Door, command: Any) -> None:
    before = known.identities
    known.do(command)
    after, known.identities = known.identities, before
    known.threads.holding = True
    first, second = known.begin(anna()), known.begin(anna())
    known.threads.run_held(1)
    assert isinstance(known.ends(first), Caller)
    known.identities = after
    known.threads.run_held()
    end = known.ends(second)
    assert isinstance(end, Refusal)
    assert end.message == WRONG


def test_tokens(known: Door) -> None:
    end_us = known.clock.wall_us() + 1_000_000
    made = known.do(CreateToken("ci", "anna", end_us))
    assert isinstance(made, TokenMade)
    credentials = Credentials(token=made.secret)
    answers = known.begin(credentials)
    assert len(answers) == 1, "nothing has to be waited for"
    caller = known.caller(credentials)
    assert (caller.user, caller.proof, caller.credential) == ("anna", "token", made.id)
    assert made.secret not in repr(caller)
    known.clock.set_us(known.clock.now_us() + 1_000_000)
    assert known.over(caller)
    assert "has expired" in known.refused(credentials)


def test_tokens_that_are_wrong(known: Door) -> None:
    made = known.do(CreateToken("ci", "anna"))
    other = known.do(CreateToken("other", "anna"))
    secret = made.secret.rpartition(made.id)[2]
    for text in ("x", made.secret[:-1], other.secret.replace(other.id, made.id), f"trt_{'0' * 16}{secret}"):
        assert known.refused(Credentials(token=text)) == WRONG
    caller = known.caller(Credentials(token=made.secret))
    known.do(RevokeToken(made.id))
    assert known.over(caller)
    assert known.refused(Credentials(token=made.secret)) == WRONG
    left = known.caller(Credentials(token=other.secret))
    known.do(RemoveUser("anna"))
    assert known.over(left)
    assert known.refused(Credentials(token=other.secret)) == WRONG


def test_certificates(known: Door) -> None:
    origin = Origin("10.0.0.1", True, ("DNS:other", "URI:spiffe://x/anna", "DNS:anna"))
    caller = known.caller(origin=origin)
    assert (caller.user, caller.proof, caller.credential) == ("anna", "certificate", "DNS:anna")
    assert "stand for no user: DNS:ANNA" in known.refused(origin=Origin("", True, ("DNS:ANNA",)))
    known.do(AddUser("bert", certificates=["DNS:other"]))
    assert "stand for several users" in known.refused(origin=origin)
    assert known.caller(anna(), origin).proof == "password"
    known.do(AlterUser("anna", certificates=["URI:spiffe://x/anna"]))
    assert known.over(caller)


def test_a_removed_user_is_out_whatever_it_had_proved(known: Door) -> None:
    token = known.do(CreateToken("ci", "anna")).secret
    callers = [
        known.caller(anna()),
        known.caller(Credentials(token=token)),
        known.caller(origin=Origin("", True, ("DNS:anna",))),
        known.caller(origin=Origin("", uid=1234)),
    ]
    assert [caller.proof for caller in callers] == ["password", "token", "certificate", "socket"]
    known.do(RemoveUser("anna"))
    assert all(known.over(caller) for caller in callers)
    known.do(AddUser("anna", "annas secret"))
    assert all(known.over(caller) for caller in callers), "another user has the name now"


def test_wrong_passwords_make_the_next_answer_wait_and_nobody_else(known: Door) -> None:
    waits = []
    for _ in range(5):
        before_us = known.clock.now_us()
        assert known.refused(anna("wrong")) == WRONG
        waits.append(known.clock.now_us() - before_us)
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] > slow_down.STEP_US
    root = known.begin(Credentials("root", PASSWORD), Origin("10.0.0.2"))
    known.settle()
    assert [type(end) for end in root] == [Caller]
    held = known.begin(anna())
    known.settle()
    assert held == [], "a right password waits like a wrong one"
    assert isinstance(known.ends(held), Caller)


def test_too_many_logins_of_an_address_are_refused_and_those_of_others_are_not(known: Door) -> None:
    for _ in range(3):
        known.refused(anna("wrong"))
    logins = [known.begin(anna("wrong")) for _ in range(20)]
    known.settle()
    refused = [end for login in logins for end in login if isinstance(end, Refusal)]
    assert len(refused) == 20 - slow_down.PENDING_SLOW_MAX
    assert {end.code for end in refused} == {"overloaded"}
    assert isinstance(known.login(Credentials("root", PASSWORD), Origin("10.0.0.2")), Caller)


def test_users_of_one_machine_do_not_wait_for_each_other(known: Door) -> None:
    for _ in range(8):
        known.refused(Credentials("root", "wrong"), Origin("", uid=7001))
    others = known.begin(anna(), Origin("", uid=7002))
    known.settle()
    assert [type(end) for end in others] == [Caller]


def test_every_login_is_told_once_and_without_secrets(known: Door) -> None:
    made = known.do(CreateToken("ci", "anna"))
    for credentials in (anna(), anna("wrong"), Credentials(token=made.secret), Credentials(token="x"), None):
        known.login(credentials)
    assert [claimed for _, claimed, _ in known.told] == ["anna", "anna", made.id, "", ""]
    assert not any(word in repr(known.told) for word in ("annas secret", "wrong'", made.secret))
