"""`client.access`: users, tokens, rules, quotas and tenants as typed results, in both forms of the SDK.

Covers `sync/blocking_access.py`.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import tailrace
import tailrace.sync
from tailrace.client.admin.access_admin import AccessAdmin
from tailrace.core.model.access_commands import ListUsers, UserList
from tailrace.errors import AlreadyExists, InvalidRequest, NotFound
from tailrace.ports import Respond
from tailrace.testing import LocalBroker

PASSWORD = "correct horse battery"


def test_results_are_typed(tailrace_broker: LocalBroker) -> None:
    async def main() -> None:
        async with tailrace_broker.client() as client:
            access = client.access()
            caller = await access.whoami()
            assert (caller.user, caller.proof, caller.administrator) == ("", "owner", True)
            assert (caller.teams, caller.tenant, caller.expires) == ([], "", None)
            assert await access.list_users() == []

            anna = await access.add_user("anna", password=PASSWORD, teams=["shop"])
            assert isinstance(anna, tailrace.AccessUser)
            assert (anna.name, anna.teams, anna.administrator, anna.has_password) == (
                "anna",
                ["shop"],
                True,
                True,
            )
            assert anna.created == tailrace_broker.clock.now
            ben = await access.add_user("ben", certificates=["DNS:ben"], system_users=["daemon"])
            assert (ben.administrator, ben.has_password) == (False, False)
            assert (ben.certificates, ben.system_users) == (["DNS:ben"], ["daemon"])
            assert await access.list_users() == [anna, ben]
            assert await access.list_users("b") == [ben]
            altered = await access.alter_user("ben", teams=["night"], certificates=[])
            assert (altered.teams, altered.certificates, altered.system_users) == (["night"], [], ["daemon"])

            rule = await access.add_rule("allow", "team:night", ["read", "publish"], "topic", "orders/*")
            assert rule == tailrace.Rule(
                id=1,
                effect="allow",
                subject="team:night",
                rights=("publish", "read"),
                resource="topic",
                pattern="orders/*",
            )
            assert await access.list_rules() == [rule]
            assert await access.list_rules("user:ben") == []
            found = await access.check("publish", "topic", "orders/eu", user="ben")
            assert (found.allowed, found.rule) == (True, 1)
            await access.remove_rule(1)
            found = await access.check("publish", "topic", "orders/eu", user="ben")
            assert (found.allowed, found.rule) == (False, None)
            assert found.why
            mine = await access.check("publish", "topic", "orders/eu")
            assert (mine.allowed, mine.rule) == (True, None)

            quota = await access.put_quota("user:ben", connections_max=2, bytes_per_second=1 << 20)
            assert quota == tailrace.Quota(subject="user:ben", connections_max=2, bytes_per_second=1 << 20)
            assert await access.list_quotas() == [quota]
            await access.remove_quota("user:ben")
            assert await access.list_quotas() == []

            tenant = await access.add_tenant("acme")
            assert (tenant.name, tenant.users) == ("acme", 0)
            await access.add_user("acme/carl")
            assert [(row.name, row.users) for row in await access.list_tenants()] == [("acme", 1)]
            with pytest.raises(InvalidRequest):
                await access.remove_tenant("acme")
            await access.remove_user("acme/carl")
            await access.remove_tenant("acme")
            assert await access.list_tenants() == []

            with pytest.raises(AlreadyExists):
                await access.add_user("anna")
            with pytest.raises(NotFound):
                await access.remove_user("carl")

    asyncio.run(main())


def test_tokens(tailrace_broker: LocalBroker) -> None:
    async def main() -> None:
        async with tailrace_broker.client() as client:
            access = client.access()
            await access.add_user("anna", password=PASSWORD)
            made = await access.create_token("ci", user="anna", expires=timedelta(days=90))
            assert isinstance(made, tailrace.NewToken)
            assert (made.user, made.name) == ("anna", "ci")
            assert made.expires == tailrace_broker.clock.now + timedelta(days=90)
            assert made.secret not in repr(made)
            assert made.secret not in str([made])
            at = datetime(2090, 1, 1, tzinfo=UTC)
            dated = await access.create_token("dated", user="anna", expires=at)
            lasting = await access.create_token("lasting", user="anna")
            assert (dated.expires, lasting.expires) == (at, None)
            assert len({made.secret, dated.secret, lasting.secret}) == 3
            listed = {token.id: token for token in await access.list_tokens()}
            assert {token.name for token in listed.values()} == {"ci", "dated", "lasting"}
            assert listed[made.id].expires == made.expires
            assert listed[made.id].created == tailrace_broker.clock.now
            assert all(made.secret not in repr(token) for token in listed.values())
            await access.revoke_token(made.id)
            assert made.id not in {token.id for token in await access.list_tokens("anna")}

    asyncio.run(main())


def test_in_the_blocking_form(tailrace_broker: LocalBroker) -> None:
    with tailrace.sync.connect() as client:
        access = client.access(timeout=10)
        assert access.add_user("anna", password=PASSWORD).administrator
        assert access.create_token("ci", user="anna").secret
        assert access.add_rule("deny", "everyone", ["read"], "topic").pattern == "*"
        access.add_user("ben")
        assert not access.check("read", "topic", "x", user="ben").allowed
        with pytest.raises(NotFound):
            access.check("read", "topic", "x", user="nobody")
        assert access.whoami().proof == "owner"


# -- without a broker


class Pages:
    """Verbs of a broker that answers with pages, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.clock = self

    def wall_ns(self) -> int:
        return 1_800_000_000_000_000_000

    def elapsed_ms(self) -> float:
        return 0.0

    def submit(self, request: Any, body: Any, respond: Respond) -> None:
        self.asked.append(request)
        rows: dict[str, tuple[list[dict[str, Any]], str | None]] = {
            "": ([{"name": "a"}, {"name": "b"}], "b"),
            "b": ([{"name": "c"}], "c"),
            "c": ([], None),
        }
        users, after = rows[request.after]
        respond(UserList(users, after), ())


def test_lists_are_asked_for_page_by_page() -> None:
    verbs = Pages()
    found = asyncio.run(AccessAdmin(verbs, 10).list_users("x"))
    assert [user.name for user in found] == ["a", "b", "c"]
    assert [(request.prefix, request.after) for request in verbs.asked] == [("x", ""), ("x", "b"), ("x", "c")]
    assert all(isinstance(request, ListUsers) for request in verbs.asked)
    assert (found[0].has_password, found[0].administrator, found[0].created) == (False, False, None)


@pytest.mark.parametrize(
    ("verb", "arguments", "options"),
    [
        ("add_user", ("anna",), {"teams": "shop"}),
        ("alter_user", ("anna",), {"certificates": "DNS:x"}),
        ("add_rule", ("allow", "everyone", "read", "topic"), {}),
        ("put_quota", ("everyone",), {"connections_max": 0}),
        ("put_quota", ("everyone",), {"connections_max": True}),
        ("put_quota", ("everyone",), {"bytes_per_second": 1.5}),
        ("put_quota", ("everyone",), {"bytes_per_second": 1 << 60}),
        ("remove_rule", (0,), {}),
        ("remove_rule", ("1",), {}),
        ("remove_rule", (1 << 70,), {}),
        ("create_token", ("ci",), {"expires": timedelta(0)}),
        ("create_token", ("ci",), {"expires": timedelta(days=999_999_999)}),
        ("create_token", ("ci",), {"expires": datetime(2090, 1, 1)}),
        ("create_token", ("ci",), {"expires": datetime(2020, 1, 1, tzinfo=UTC)}),
        ("create_token", ("ci",), {"expires": 90}),
    ],
)
def test_what_cannot_be_meant_is_not_sent(verb: str, arguments: tuple[Any, ...], options: Any) -> None:
    verbs = Pages()
    with pytest.raises(InvalidRequest):
        asyncio.run(getattr(AccessAdmin(verbs, 10), verb)(*arguments, **options))
    assert verbs.asked == []
