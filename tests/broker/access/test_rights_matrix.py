"""Every kind of request through the gateway: with all it needs, without each of its needs, and denied each.

The broker is real; who asks is a user that has just the rights that the test gives.
"""

from typing import Any

import msgspec
import pytest

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.access.resources import NEEDS, Need
from tailrace.core.access.rules import RIGHTS_ON, origin_of
from tailrace.core.model.access import Caller, Identities, Tenant, Token, User
from tailrace.core.model.group_commands import CreateGroup, PutSchedule
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import DecideStaged, StageRows
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tests.broker.access.guarded_broker import ROOT, GuardedBroker
from tests.core.access.request_table import TABLE

REQUESTS = [request for request, _ in TABLE]
NAMES = ("t", "u", "v", "here", "bills")
USERS = (ROOT, User(name="anna"), User(name="ben"), User(name="acme/x"))


def furnished() -> GuardedBroker:
    """A broker in which everything that the table names exists."""
    broker = GuardedBroker()
    for name in NAMES:
        broker.create(name)
    broker.ask(CreateGroup("g", ["t", "u"]))
    broker.submit(
        PutSchedule("nightly", "bills", "0 3 * * *"), gate=OpenGate(Caller("anna", "owner"))
    )  # Hers, as if she had put it.
    columns, body = arrow.encode([b"x"], ids=bytes(16), timestamps=broker.clock.now_us(), dedup_ids=None)
    for topic in ("t", "u"):
        broker.submit(StageRows(topic, 0, "spark", "a", columns, crc32c(body)), body)
    broker.ask(DecideStaged("spark", 1, [("t", 0, "a"), ("u", 0, "a")]))
    populate(broker)
    return broker


def populate(broker: GuardedBroker) -> None:
    token = Token(id="k1", user="anna", name="k", digest="0" * 64, created_us=0)
    broker.engine.authority.put(
        Identities(
            users={user.name: user for user in USERS},
            tokens={"k1": token},
            tenants={"acme": Tenant(name="acme")},
        )
    )
    for subject in ("user:acme/x", "user:anna"):
        broker.allow(subject, "read", "topic", "acme/*")


@pytest.fixture(scope="module")
def closed() -> GuardedBroker:
    """For tests whose requests are all refused, so that nothing changes."""
    return furnished()


@pytest.fixture(scope="module")
def empty() -> GuardedBroker:
    """The same users, and nothing else."""
    broker = GuardedBroker()
    populate(broker)
    return broker


def needs_of(broker: GuardedBroker, request: Any, user: str = "ben") -> list[Need]:
    return list(NEEDS[type(request)](request, user, broker.engine.authority))


def grant(broker: GuardedBroker, need: Need, effect: str = "allow") -> None:
    """Give or deny what a need asks for, and nothing beside it."""
    if need.right == "manage":
        assert effect == "allow"
        broker.users(User(name="ben", administrator=True))
        return
    if need.right == "bear":
        return  # Nobody else's.
    right: str = need.right
    if right in ("any", "ensure"):
        on = RIGHTS_ON[need.resource]  # type: ignore[index]
        right = ",".join(on) if effect == "deny" else on[0]
    pattern = "*" if need.resource == "broker" else "any*" if need.name is None else origin_of(need.name)
    broker.allow("user:ben", right, need.resource, pattern, effect)


def told(broker: GuardedBroker, request: Any, user: str = "ben") -> str:
    """The code of the refusal that is there at once; `ok` if the request is taken."""
    answers = broker.begin(user, request)
    if not answers:
        return "ok"
    ((reply, _),) = answers
    return reply.code if isinstance(reply, Refusal) else "ok"


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_a_request_needs_each_of_its_rights_and_no_other(request_: Any) -> None:
    first = furnished()
    needs = needs_of(first, request_)
    if not needs:
        assert told(first, request_) not in ("denied", "unauthenticated")
        return
    for without in range(len(needs)):
        broker = furnished()
        for at, need in enumerate(needs):
            if at != without:
                grant(broker, need)
        if needs[without].right != "bear":
            assert told(broker, request_) == "denied", needs[without]
        grant(broker, needs[without])
        if needs[without].right not in ("manage", "bear") and needs[without].name is not None:
            everything = broker.engine.authority.identities
            grant(broker, needs[without], "deny")
            assert told(broker, request_) == "denied", needs[without]
            broker.engine.authority.put(everything)
        assert told(broker, request_) not in ("denied", "unauthenticated"), needs


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_a_refusal_does_not_tell_what_exists(
    request_: Any, closed: GuardedBroker, empty: GuardedBroker
) -> None:
    said = []
    for broker in (closed, empty):
        if not needs_of(broker, request_):
            return
        ((reply, _),) = broker.begin("ben", request_)
        assert isinstance(reply, Refusal), reply
        assert reply.code == "denied"
        said.append(reply)
    assert said[0] == said[1]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_users_of_a_tenant_get_nothing_outside_of_it(request_: Any) -> None:
    """Not even where everybody may do everything, nor as administrators of the tenant."""
    broker = furnished()
    for resource, rights in RIGHTS_ON.items():
        broker.allow("everyone", ",".join(rights), resource)
    needs = needs_of(broker, request_, "acme/x")
    own = [
        need
        for need in needs
        if need.right == "manage" and (need.name is None or need.name.startswith("acme/"))
    ]
    for administrator in (False, True):
        broker.users(User(name="acme/x", administrator=administrator))
        if not needs or (administrator and own == needs):
            assert told(broker, request_, "acme/x") not in ("denied", "unauthenticated")
        elif [need for need in needs if need.name is not None or need.right == "manage"]:
            assert told(broker, request_, "acme/x") == "denied"


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_who_is_not_known_gets_nothing(request_: Any, closed: GuardedBroker) -> None:
    broker = closed
    assert told(broker, request_, "nobody") == "unauthenticated"
    for caller in (Caller("", "open"), Caller("", "token"), Caller("root", "open")):
        ((reply, _),) = broker.submit(request_, gate=OpenGate(caller))
        assert isinstance(reply, Refusal)
        assert reply.code == "unauthenticated"


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_administrators_and_the_owner_may_everything(request_: Any) -> None:
    broker = furnished()
    assert told(broker, request_, "root") not in ("denied", "unauthenticated")
    answers = furnished().submit(request_, gate=OpenGate())
    assert not answers or getattr(answers[0][0], "code", "") not in ("denied", "unauthenticated")


def test_the_names_of_rights_on_things_are_those_of_the_rules() -> None:
    broker = furnished()
    rights = {need.right for request in REQUESTS for need in needs_of(broker, request)}
    assert rights - {"any", "ensure", "manage", "bear"} <= {
        right for rights in RIGHTS_ON.values() for right in rights
    }
    assert msgspec.structs.asdict(broker.engine.authority.identities)["sequence"] == 0
