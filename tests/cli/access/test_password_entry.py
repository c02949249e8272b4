"""New passwords: from standard input, generated, or typed twice; no error shows one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tailrace.cli.access.password_entry import LETTERS, PASSWORD_BYTES_MAX, generated, new_password
from tailrace.errors import InvalidRequest


@contextmanager
def stdin(data: bytes) -> Iterator[None]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        usual = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(usual, 0)
            os.close(usual)


@pytest.mark.parametrize(
    ("data", "password"),
    [
        (b"correct horse\n", "correct horse"),
        (b"correct horse", "correct horse"),
        (b" with spaces around \r\n", " with spaces around "),
        ("größe-ßß".encode(), "größe-ßß"),
        (b"x" * PASSWORD_BYTES_MAX + b"\n", "x" * PASSWORD_BYTES_MAX),
    ],
)
def test_one_line_of_standard_input(data: bytes, password: str) -> None:
    with stdin(data):
        assert new_password("anna", from_stdin=True, generate=False) == password


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"MARKER\nsecond line\n", "one line"),
        (b"MARKER\n\n", "one line"),
        (b"MARKER\x1b[2J\n", "control characters"),
        (b"MARKER\xff\n", "not UTF-8"),
        (b"MARKER" + b"x" * PASSWORD_BYTES_MAX, "longer than 1024 bytes"),
        (b"MARKER" + b"x" * 10_000_000, "longer than 1024 bytes"),
    ],
)
def test_what_is_no_password_is_told_without_it(data: bytes, problem: str) -> None:
    with stdin(data), pytest.raises(InvalidRequest, match=problem) as told:
        new_password("anna", from_stdin=True, generate=False)
    assert "MARKER" not in repr(told.value) + str(told.value) + repr(told.value.details)
    assert told.value.__cause__ is None


def test_generated_passwords_can_be_typed_and_are_all_different() -> None:
    made = {generated() for _ in range(200)}
    assert len(made) == 200
    for password in made:
        assert len(password) == 29
        assert set(password.replace("-", "")) <= set(LETTERS)
        assert password[0] != "-"
    assert not set("0o1il") & set(LETTERS)
    letters = {letter for password in made for letter in password}
    assert letters == {*LETTERS, "-"}


def test_one_way_at_a_time() -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        new_password("anna", from_stdin=True, generate=True)


def test_where_nobody_can_be_asked_the_ways_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open(os.devnull, encoding="utf-8"))  # noqa: SIM115
    with pytest.raises(InvalidRequest, match="nobody can be asked") as told:
        new_password("anna", from_stdin=False, generate=False)
    assert "--password-stdin" in told.value.hint
    assert "--generate" in told.value.hint
