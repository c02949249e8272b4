"""The text of a token: `trt_ID_SECRET`, of which the broker keeps the id and the SHA-256 of the secret.

The secret has 256 random bits, so its digest needs neither salt nor a slow hash. The prefix lets scanners of
source code find tokens that were published by mistake.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import NamedTuple

from tailrace.core.model.access import Token

PREFIX = "trt"
ID_BYTES = 8
SECRET_BYTES = 32
_TEXT = re.compile(r"trt_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_NOBODY = "0" * 64
"""A digest that no secret has."""


class TokenText(NamedTuple):
    """The parts of a token's text. Its `repr` shows no secret."""

    id: str
    secret: str

    def __repr__(self) -> str:
        return f"TokenText(id={self.id!r})"

    @property
    def text(self) -> str:
        """What a client logs in with."""
        return f"{PREFIX}_{self.id}_{self.secret}"

    @property
    def digest(self) -> str:
        """What the broker keeps of the secret."""
        return hashlib.sha256(self.secret.encode()).hexdigest()


def new_token(entropy: Callable[[int], bytes]) -> TokenText:
    """A token of random bytes."""
    secret = urlsafe_b64encode(entropy(SECRET_BYTES)).decode().rstrip("=")
    return TokenText(entropy(ID_BYTES).hex(), secret)


def parse_token(text: str) -> TokenText | None:
    """The parts of a text; None if it is no token."""
    found = _TEXT.fullmatch(text)
    return None if found is None else TokenText(*found.groups())


def fits(given: TokenText, token: Token | None) -> bool:
    """Whether a secret is that of a stored token; takes the same time if there is none."""
    same = hmac.compare_digest(given.digest, _NOBODY if token is None else token.digest)
    return same and token is not None
