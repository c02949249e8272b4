"""A held engine with users and rules, whose requests come from users."""

from typing import Any

import msgspec

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model.access import Caller, Rule, User
from tailrace.core.model.commands import Publish, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tests.broker.held_engine import HeldEngine

ROOT = User(name="root", administrator=True)


class GuardedBroker(HeldEngine):
    """A broker with users, who ask by name."""

    def users(self, *users: User) -> None:
        identities = self.engine.authority.identities
        self._put(users={**identities.users, **{user.name: user for user in users}})

    def remove_user(self, name: str) -> None:
        users = dict(self.engine.authority.identities.users)
        del users[name]
        self._put(users=users)

    def allow(self, subject: str, rights: str, what: str, pattern: str = "*", effect: str = "allow") -> int:
        identities = self.engine.authority.identities
        number = identities.next_rule
        rule = Rule(
            id=number,
            effect=effect,  # type: ignore[arg-type]
            subject=subject,
            rights=tuple(rights.split(",")),  # type: ignore[arg-type]
            resource=what,  # type: ignore[arg-type]
            pattern=pattern,
        )
        self._put(rules=(*identities.rules, rule), next_rule=number + 1)
        return number

    def take_back(self, number: int) -> None:
        rules = self.engine.authority.identities.rules
        self._put(rules=tuple(rule for rule in rules if rule.id != number))

    def _put(self, **fields: Any) -> None:
        self.engine.authority.put(msgspec.structs.replace(self.engine.authority.identities, **fields))
        self.settle()

    def begin(self, user: str, request: Any, body: Any = b"") -> list[tuple[Reply, bytes]]:
        """Send a request of a user; the list gets the answer when there is one."""
        return self.submit(request, body, gate=OpenGate(Caller(user, "password")))

    def tell(self, user: str, request: Any, body: Any = b"") -> Any:
        ((reply, _),) = self.begin(user, request, body)
        return reply

    def code(self, user: str, request: Any, body: Any = b"") -> str:
        reply = self.tell(user, request, body)
        return reply.code if isinstance(reply, Refusal) else "ok"

    def send(self, user: str, topic: str = "t") -> str:
        columns, body = arrow.encode([b"x"], ids=bytes(16), timestamps=self.clock.now_us(), dedup_ids=None)
        return self.code(user, Publish(topic, 0, columns, crc32c(body)), body)
