"""Users, tokens and rules over the wire: who may change what, when it applies, and what a restart finds."""

import logging
from typing import Any

import msgspec
import pytest

from tailrace.broker.access.access_verbs import CHANGES_OF_USER_MAX, CHANGES_WAITING_MAX, PAGE_MAX
from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.cluster.identity_file import EXPECTED, FILE, FileIdentities, MemoryIdentities
from tailrace.core.model.access import OWNER, Caller, Identities, Origin
from tailrace.core.model.access_commands import (
    AccessChecked,
    AddRule,
    AddTenant,
    AddUser,
    AlterUser,
    CallerInfo,
    CheckAccess,
    CreateToken,
    ListQuotas,
    ListRules,
    ListTenants,
    ListTokens,
    ListUsers,
    PutQuota,
    RemoveUser,
    RevokeToken,
    TenantList,
    TokenList,
    TokenMade,
    UserList,
    WhoAmI,
)
from tailrace.core.model.commands import CreateTopic, Done, ListTopics, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Corrupt, StorageFault
from tailrace.format.wire import Credentials
from tailrace.sim.sim_disk import Crash, SimDisk
from tests.broker.held_engine import HeldEngine

PASSWORD = "correct horse"
ANYBODY = Caller("", "open", "", "10.0.0.9")
FAR = Origin("10.0.0.1")


class Store(MemoryIdentities):
    """Fails when told."""

    broken: Exception | None = None

    def save(self, identities: Identities) -> None:
        if self.broken is not None:
            raise self.broken
        super().save(identities)


class KnownBroker(HeldEngine):
    """A broker that is asked by callers who have logged in."""

    def __init__(self, store: Any = None) -> None:
        super().__init__(identities=Store() if store is None else store)

    def login(self, user: str, password: str = PASSWORD, token: str = "") -> Caller:
        found: list[Caller | Refusal] = []
        credentials = Credentials(token=token) if token else Credentials(user, password)
        self.engine.authenticator.authenticate(credentials, FAR, found.append)
        self.settle()
        (caller,) = found
        assert isinstance(caller, Caller), caller
        return caller

    def begin(self, caller: Caller, request: Any) -> list[tuple[Reply, bytes]]:
        return self.submit(request, gate=OpenGate(caller))

    def by(self, caller: Caller, request: Any) -> Any:
        """The answer, which has to be there at once."""
        ((reply, _),) = self.begin(caller, request)
        return reply

    def done(self, caller: Caller, request: Any) -> Any:
        reply = self.by(caller, request)
        assert not isinstance(reply, Refusal), reply
        return reply

    def code(self, caller: Caller, request: Any) -> str:
        reply = self.by(caller, request)
        assert isinstance(reply, Refusal), reply
        return reply.code

    @property
    def identities(self) -> Identities:
        return self.engine.authority.identities


def started(store: Any = None) -> tuple[KnownBroker, Caller]:
    """A broker with an administrator."""
    broker = KnownBroker(store)
    broker.done(ANYBODY, AddUser("root", PASSWORD))
    return broker, broker.login("root")


def test_the_first_user_closes_the_door_behind_whoever_added_it() -> None:
    broker = KnownBroker()
    assert broker.by(ANYBODY, WhoAmI()) == CallerInfo("", "open", administrator=True)
    reply = broker.done(ANYBODY, AddUser("root", PASSWORD))
    assert isinstance(reply, UserList)
    assert reply.users[0]["administrator"] is True
    assert broker.code(ANYBODY, ListTopics()) == "unauthenticated"
    assert broker.code(ANYBODY, AddUser("mallory", PASSWORD)) == "unauthenticated"
    root = broker.login("root")
    broker.done(root, CreateTopic("t"))
    info = broker.by(root, WhoAmI())
    assert (info.user, info.proof, info.credential, info.administrator) == ("root", "password", "", True)
    assert broker.by(OWNER, WhoAmI()).proof == "owner"


def test_what_was_changed_is_there_after_a_restart() -> None:
    broker, root = started()
    token = broker.done(root, CreateToken("ci"))
    before = broker.identities
    broker.restart()
    assert broker.identities == before
    assert broker.known.load() == before
    caller = broker.login("", token=token.secret)
    assert (caller.user, caller.proof) == ("root", "token")
    assert broker.by(caller, WhoAmI()).credential == token.id


def test_a_change_applies_when_it_is_stored_and_is_answered_then() -> None:
    broker, root = started()
    broker.threads.holding = True
    answers = broker.begin(root, AddRule("allow", "everyone", ["read"], "topic"))
    assert answers == []
    assert broker.identities.rules == ()
    broker.threads.run_held()
    broker.settle()
    assert len(answers) == 1
    assert len(broker.identities.rules) == 1


def test_changes_are_made_one_after_the_other_on_what_was_stored() -> None:
    broker, root = started()
    broker.threads.holding = True
    answers = [broker.begin(root, AddTenant(name)) for name in ("a", "b", "a", "c")]
    for _ in range(8):
        assert len(broker.threads.held) <= 1
        broker.threads.run_held()
        broker.settle()
    replies = [reply for ((reply, _),) in answers]
    assert [type(reply) for reply in replies] == [TenantList, TenantList, Refusal, TenantList]
    assert set(broker.identities.tenants) == {"a", "b", "c"}
    assert broker.known.load() == broker.identities


@pytest.mark.parametrize("outcome", ["none", "unknown"])
def test_a_change_that_cannot_be_stored_does_not_apply(outcome: Any) -> None:
    broker, root = started()
    before = broker.identities
    assert isinstance(broker.known, Store)
    broker.known.broken = StorageFault("the disk failed", outcome=outcome)
    refusal = broker.by(root, AddTenant("acme"))
    assert (refusal.code, refusal.outcome) == ("storage_fault", outcome)
    assert broker.identities is before
    broker.known.broken = None
    broker.done(root, AddTenant("acme"))


def test_who_lost_its_rights_while_a_change_waited_changes_nothing() -> None:
    broker, root = started()
    broker.done(root, AddUser("anna", PASSWORD, administrator=True))
    anna = broker.login("anna")
    broker.threads.holding = True
    slow = broker.begin(anna, AddUser("mallory", PASSWORD))
    demoted = broker.begin(root, AlterUser("anna", administrator=False))
    behind = broker.begin(anna, AddTenant("acme"))
    for _ in range(8):
        broker.threads.run_held()
        broker.settle()
    assert not isinstance(demoted[0][0], Refusal)
    refusals = [slow[0][0], behind[0][0]]
    assert [refusal.code for refusal in refusals if isinstance(refusal, Refusal)] == ["denied", "denied"]
    assert set(broker.identities.users) == {"root", "anna"}


def test_what_is_refused_costs_no_hash() -> None:
    broker, root = started()
    broker.threads.holding = True
    for command in (AddUser("root", PASSWORD), AddUser("a b", PASSWORD), AlterUser("nobody", PASSWORD)):
        assert isinstance(broker.by(root, command), Refusal)
    assert broker.threads.held == []


def test_waiting_changes_have_a_bound_and_are_refused_when_the_broker_ends() -> None:
    broker, root = started()
    broker.threads.holding = True
    answers = [broker.begin(root, AddTenant(f"t{number}")) for number in range(CHANGES_WAITING_MAX + 1)]
    assert broker.code(root, AddTenant("more")) == "overloaded"
    hashing = broker.begin(OWNER, WhoAmI())
    assert len(hashing) == 1
    broker.engine.drain()
    broker.threads.run_held()
    broker.settle()
    codes = [getattr(reply, "code", "stored") for ((reply, _),) in answers]
    assert codes == ["stored", *["unavailable"] * CHANGES_WAITING_MAX]


def test_a_user_who_asks_for_many_changes_keeps_nobody_from_taking_its_token() -> None:
    broker, root = started()
    broker.done(root, AddUser("anna", PASSWORD))
    anna = broker.login("anna")
    token = broker.done(anna, CreateToken("t"))
    broker.threads.holding = True
    answers = [
        broker.begin(anna, CreateToken(f"t{number}") if number % 2 else AlterUser("anna", PASSWORD + "!"))
        for number in range(2 * CHANGES_WAITING_MAX)
    ]
    codes = [reply.code for answer in answers for reply, _ in answer if isinstance(reply, Refusal)]
    assert codes == ["overloaded"] * (2 * CHANGES_WAITING_MAX - CHANGES_OF_USER_MAX)
    revoked = broker.begin(root, RevokeToken(token.id))
    assert not revoked, "it waits"
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert [reply for reply, _ in revoked] == [Done()]
    assert all(len(answer) == 1 for answer in answers)
    another = broker.done(root, CreateToken("another", "anna"))
    broker.done(broker.login("anna", PASSWORD + "!"), RevokeToken(another.id))


def test_a_password_that_is_hashed_when_the_broker_ends_changes_nothing() -> None:
    broker, root = started()
    broker.threads.holding = True
    answers = broker.begin(root, AddUser("anna", PASSWORD))
    broker.engine.drain()
    broker.threads.run_held()
    broker.settle()
    ((reply, _),) = answers
    assert isinstance(reply, Refusal)
    assert reply.code == "unavailable"
    assert set(broker.identities.users) == {"root"}


# ------------------------------------------------------------------------------------------- what users do


def test_an_administrator_changes_its_own_password() -> None:
    broker, root = started()
    broker.done(root, AlterUser("root", "another secret"))
    broker.login("root", "another secret")
    assert broker.code(broker.login("root", "another secret"), AlterUser("root", "")) == "invalid_request"


def test_users_look_after_their_own_tokens_and_passwords() -> None:
    broker, root = started()
    broker.done(root, AddUser("anna", PASSWORD))
    broker.done(root, CreateToken("ci"))
    anna = broker.login("anna")
    made = broker.done(anna, CreateToken("ci"))
    assert isinstance(made, TokenMade)
    assert made.user == "anna"
    (row,) = broker.done(anna, ListTokens()).tokens
    assert row == {
        "id": made.id,
        "user": "anna",
        "name": "ci",
        "created_us": broker.clock.wall_us(),
        "expires_us": None,
    }
    assert len(broker.done(root, ListTokens()).tokens) == 2
    assert len(broker.done(root, ListTokens("anna")).tokens) == 1
    assert broker.code(root, ListTokens("nobody")) == "not_found"
    assert broker.code(anna, CreateToken("x", "root")) == "denied"
    broker.done(anna, AlterUser("anna", "another secret"))
    broker.login("anna", "another secret")
    assert broker.engine.authenticator.still(anna, 0) is not None
    assert broker.done(anna, RevokeToken(made.id)) == Done()


def test_who_has_found_a_token_makes_no_way_in_for_good_of_it() -> None:
    broker, root = started()
    broker.done(root, AddUser("anna", PASSWORD))
    end_us = broker.clock.wall_us() + 1000
    token = broker.done(root, CreateToken("ci", "anna", end_us))
    thief = broker.login("", token=token.secret)
    assert broker.code(thief, AlterUser("anna", "my own secret")) == "denied"
    assert broker.code(thief, CreateToken("more")) == "invalid_request"
    assert broker.code(thief, CreateToken("more", expires_us=end_us + 1)) == "invalid_request"
    broker.done(thief, CreateToken("more", expires_us=end_us))
    assert broker.code(thief, AddUser("mallory", PASSWORD)) == "denied"
    administrator = broker.login("", token=broker.done(root, CreateToken("ci", None, end_us)).secret)
    broker.done(administrator, AlterUser("anna", "her new secret"))
    broker.done(administrator, CreateToken("for-good"))


def test_administrators_of_tenants_see_and_change_what_is_of_the_tenant() -> None:
    broker, root = started()
    commands: list[Any] = [
        AddTenant("acme"),
        AddTenant("beta"),
        AddUser("acme/root", PASSWORD, administrator=True),
        AddUser("beta/x"),
        AddRule("allow", "user:beta/x", ["read"], "topic", "beta/*"),
        AddRule("allow", "everyone", ["read"], "topic", "news"),
        CreateToken("ci", "beta/x"),
    ]
    for command in commands:
        broker.done(root, command)
    chief = broker.login("acme/root")
    broker.done(chief, AddUser("acme/anna", PASSWORD))
    broker.done(chief, CreateToken("ci", "acme/anna"))
    broker.done(chief, AddRule("allow", "user:acme/anna", ["read"], "topic", "acme/*"))
    assert [row["name"] for row in broker.done(chief, ListUsers()).users] == ["acme/anna", "acme/root"]
    assert [row["user"] for row in broker.done(chief, ListTokens()).tokens] == ["acme/anna"]
    assert [row["subject"] for row in broker.done(chief, ListRules()).rules] == ["user:acme/anna"]
    foreign: list[Any] = [
        AddUser("beta/y", PASSWORD),
        AddUser("y", PASSWORD),
        AddUser("acme/y", certificates=["DNS:another-name-of-somebody.example.com"]),
        AlterUser("acme/anna", system_users=["1000"]),
        AddRule("allow", "everyone", ["read"], "topic", "acme/*"),
        CreateToken("x", "beta/x"),
        PutQuota("tenant:acme", topics_max=5),
        AddTenant("gamma"),
        ListTenants(),
        ListQuotas(),
    ]
    for command in foreign:
        assert broker.code(chief, command) == "denied"
    assert [row["name"] for row in broker.done(root, ListTenants()).tenants] == ["acme", "beta"]
    assert [row["users"] for row in broker.done(root, ListTenants()).tenants] == [2, 1]
    assert broker.by(chief, WhoAmI()).tenant == "acme"


def test_others_learn_nothing_of_users_and_rules() -> None:
    broker, root = started()
    broker.done(root, AddUser("anna", PASSWORD))
    anna = broker.login("anna")
    for command in (ListUsers(), ListRules(), ListTenants(), ListQuotas(), ListTokens("root")):
        assert broker.code(anna, command) == "denied"
    assert broker.done(anna, ListTokens()) == TokenList([])


def test_lists_come_in_pages() -> None:
    broker, root = started()
    for number in range(7):
        broker.done(root, AddTenant(f"t{number}"))
        broker.done(root, AddRule("deny", "everyone", ["read"], "topic", f"t{number}"))
    for request, field in ((ListTenants(limit=3), "tenants"), (ListRules(limit=3), "rules")):
        seen, pages, more = [], 0, True
        while more:
            reply = broker.done(root, request)
            seen += getattr(reply, field)
            pages += 1
            more = reply.next is not None
            request = msgspec.structs.replace(request, after=reply.next) if more else request
        assert pages == 3
        assert len(seen) == 7
    assert [row["id"] for row in broker.done(root, ListRules("everyone", after=5)).rules] == [6, 7]
    for limit in (0, PAGE_MAX + 1):
        assert broker.code(root, ListUsers(limit=limit)) == "invalid_request"
    assert broker.done(root, ListUsers("ro")).users[0]["name"] == "root"
    assert broker.done(root, ListUsers("x")).users == []


def test_checks_say_what_decides() -> None:
    broker = KnownBroker()
    reply = broker.by(ANYBODY, CheckAccess("publish", "topic", "t"))
    assert reply == AccessChecked(True, "this broker has no users: everything is allowed")
    broker.done(ANYBODY, AddUser("root", PASSWORD))
    root = broker.login("root")
    broker.done(root, AddUser("anna", PASSWORD))
    number = broker.done(root, AddRule("allow", "user:anna", ["publish"], "topic", "t*")).rules[0]["id"]
    checked = broker.done(root, CheckAccess("publish", "topic", "t", "anna"))
    assert (checked.allowed, checked.rule) == (True, number)
    own = broker.done(broker.login("anna"), CheckAccess("read", "topic", "t"))
    assert not own.allowed
    assert broker.done(OWNER, CheckAccess("read", "topic", "t")).allowed
    assert broker.code(root, CheckAccess("read", "topic", "t", "nobody")) == "not_found"


# ------------------------------------------------------------------------------------- files, and secrets


def test_a_change_that_was_acknowledged_is_found_after_any_crash() -> None:
    """Power fails at every step of a change; the broker that starts then knows whom it knew before, or has
    the change, and is never without users."""
    found = set()
    for seed in range(6):
        for step in range(9):
            disk = SimDisk(seed)
            broker, root = started(FileIdentities(disk))
            disk.crash_in = step
            try:
                broker.done(root, AddUser("anna", PASSWORD))
                expected = {2}
            except Crash:
                expected = {1, 2}
            disk.crash()
            broker = KnownBroker(FileIdentities(disk))
            found.add(len(broker.identities.users))
            assert len(broker.identities.users) in expected
            assert broker.code(ANYBODY, ListTopics()) == "unauthenticated"
            broker.login("root")
    assert found == {1, 2}


def test_a_broker_that_has_lost_its_users_does_not_start() -> None:
    disk = SimDisk(1)
    started(FileIdentities(disk))
    disk.remove(FILE)
    with pytest.raises(Corrupt, match="this broker had users"):
        KnownBroker(FileIdentities(disk))
    disk.remove(EXPECTED)
    assert KnownBroker(FileIdentities(disk)).identities.users == {}


def test_no_secret_is_anywhere_but_in_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Passwords and tokens are searched for in every answer, in what is stored, in the log and in `repr`."""
    caplog.set_level(logging.DEBUG)
    disk = SimDisk(1)
    broker, root = started(FileIdentities(disk))
    told: list[str] = []
    secrets = [PASSWORD, "a second secret"]
    commands: list[Any] = [
        AddUser("anna", "a second secret"),
        AddUser("anna", "a second secret"),
        AlterUser("nobody", "a second secret"),
        AlterUser("anna", "a second secret"),
        AddUser("a b", "a second secret"),
        ListUsers(),
        ListTokens(),
        WhoAmI(),
        RemoveUser("nobody"),
    ]
    made = broker.done(root, CreateToken("ci"))
    secrets += [made.secret, made.secret.rpartition("_")[2]]
    for command in commands:
        told += [repr(command), repr(broker.by(root, command))]
    for credentials in (Credentials("anna", "a second secret"), Credentials(token=made.secret + "x")):
        ends: list[Any] = []
        broker.engine.authenticator.authenticate(credentials, FAR, ends.append)
        broker.settle()
        told += [repr(credentials), repr(ends)]
    handle = disk.open(FILE)
    told += [disk.read(handle, 0, disk.size(handle)).decode(), repr(made), caplog.text]
    told += [repr(value) for value in (broker.identities, root, broker.engine.authenticator)]
    for text in told:
        assert not [secret for secret in secrets if secret in text], text
    shown = "".join([*told[: 2 * len(commands)], *told[-3:]])
    assert "argon2" not in shown
    assert broker.identities.tokens[made.id].digest not in shown
