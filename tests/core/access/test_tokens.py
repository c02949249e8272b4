"""Tokens: their text is read back, nothing else fits, and no `repr` shows a secret."""

from random import Random

import pytest

from tailrace.core.access.tokens import fits, new_token, parse_token
from tailrace.core.model.access import Token


def stored(digest: str) -> Token:
    return Token(id="0" * 16, user="anna", name="ci", digest=digest, created_us=1)


def test_a_token_is_read_back_and_fits_itself_only() -> None:
    random = Random(1)
    tokens = [new_token(random.randbytes) for _ in range(200)]
    assert len({token.id for token in tokens}) == len({token.secret for token in tokens}) == 200
    for token in tokens:
        assert token.text.startswith("trt_")
        assert parse_token(token.text) == token
        assert fits(token, stored(token.digest))
        assert not fits(token, stored(tokens[0].digest)) or token is tokens[0]
        assert not fits(token, None)
        assert token.secret not in repr(token)
        assert token.secret not in token.digest


@pytest.mark.parametrize(
    "text",
    ["", "trt_", "trt__", "trt_00_x", "anna", "trt_" + "0" * 16 + "_" + "é" * 43, "x" * 5000],
)
def test_other_texts_are_no_tokens(text: str) -> None:
    assert parse_token(text) is None


def test_a_token_with_more_or_less_is_none() -> None:
    text = new_token(Random(1).randbytes).text
    for other in (text + "x", text[:-1], " " + text, text + "\n", text.upper()):
        assert parse_token(other) is None
