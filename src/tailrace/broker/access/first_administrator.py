"""The first start of a broker that speaks TLS and has no users: it makes an administrator with a token.

Such a broker may be reached from other machines, so nobody may be first there just by being quick. The user
is called `admin`, and its token lies in `admin.token` in the data folder, for whoever may read that. Its path
is printed, the token never. The order of the steps, each durable before the next:

    admin.token.new ──▶ its real name, admin.token ──▶ access.json with the digest of that token

A crash before the real name leaves nothing that counts: the next start makes another token. A crash behind it
leaves a token that does not work yet, and a broker without users: the next start takes the token that it
finds, and makes the administrator for it. In the other order, a crash would leave an administrator whose
token nobody has.

A file that is found is only taken if it belongs to the user of the broker and nobody else can read it: who
can write to the folder must not be able to choose the token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tailrace.core.access.identity_changes import first_administrator
from tailrace.core.access.tokens import new_token, parse_token
from tailrace.core.model.access import Identities, Token
from tailrace.errors import StorageFault

NAME = "admin"
TOKEN_NAME = "first-start"


class FirstTokenFile(Protocol):
    """Where the token of the first administrator is left; both methods block."""

    def load(self) -> str | None:
        """The token in the file; None without a file. Raises `StorageFault` if others can read it."""
        ...

    def save(self, token: str) -> None:
        """Store it durably and whole."""
        ...


def with_administrator(
    identities: Identities, file: FirstTokenFile, entropy: Callable[[int], bytes], now_us: int
) -> Identities:
    """The identities with their first user, whose token is in the file by then; blocking. They are still to
    be stored."""
    text = file.load()
    token = new_token(entropy) if text is None else parse_token(text)
    if token is None:
        raise StorageFault("admin.token does not hold a token: remove it, and start again", outcome="none")
    if text is None:
        file.save(token.text)
    stored = Token(id=token.id, user=NAME, name=TOKEN_NAME, digest=token.digest, created_us=now_us)
    return first_administrator(identities, NAME, stored)
