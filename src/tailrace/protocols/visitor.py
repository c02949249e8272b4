"""A visitor of the pages: who sends the requests of one connection, by credentials or by certificate."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable
from functools import partial

from tailrace.core.model.access import Caller, Origin
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest
from tailrace.format.wire import Credentials
from tailrace.ports import Authenticator
from tailrace.protocols.tls import NO_CERTIFICATE

CHALLENGES = ('Basic realm="tailrace", charset="UTF-8"', 'Bearer realm="tailrace"')
"""What credentials a visitor may bring, as `WWW-Authenticate` says it."""


def credentials_of(field: str) -> Credentials:
    """The credentials of an `Authorization` field; raises `InvalidRequest` if there are none in it."""
    scheme, _, given = field.partition(" ")
    given = given.strip()
    if scheme.lower() == "bearer" and given:
        return Credentials(token=given)
    if scheme.lower() == "basic":
        try:
            user, colon, password = base64.b64decode(given, validate=True).decode("utf-8").partition(":")
        except (binascii.Error, UnicodeDecodeError):
            user = colon = password = ""
        if colon and user:
            return Credentials(user, password)
    raise InvalidRequest("Authorization: only Basic with user and password, and Bearer with a token")


class Visitor:
    """The client of one connection. What it has proved is kept for its next request, while it is good."""

    def __init__(self, origin: Origin, authenticator: Authenticator, wall_us: Callable[[], int]) -> None:
        self.origin = origin
        self.lacks_certificate = False
        """Whether a client certificate is required, and this visitor has shown none."""
        self._authenticator = authenticator
        self._wall_us = wall_us
        self._known: tuple[str | None, Caller] | None = None

    async def caller(self, field: str | None) -> Caller | Refusal:
        """Who sends a request with this `Authorization` field, or why that is not known."""
        if self.lacks_certificate:
            return Refusal("unauthenticated", NO_CERTIFICATE, "none")
        if self._known is not None and self._known[0] == field:
            caller = self._known[1]
            if self._authenticator.still(caller, self._wall_us()) is None:
                return caller
        self._known = None
        credentials = None if field is None else credentials_of(field)
        found: asyncio.Future[Caller | Refusal] = asyncio.get_running_loop().create_future()
        self._authenticator.authenticate(credentials, self.origin, partial(_found, found))
        outcome = await found
        if isinstance(outcome, Caller):
            self._known = field, outcome
        return outcome


def _found(found: asyncio.Future[Caller | Refusal], outcome: Caller | Refusal) -> None:
    if not found.done():  # The visitor may have gone meanwhile.
        found.set_result(outcome)
