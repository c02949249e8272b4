"""New passwords: from standard input, generated, or typed twice; no error shows one."""

import os
import pty
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.cli.access.password_entry import LETTERS, PASSWORD_BYTES_MAX, generated, new_password
from tailrace.errors import EDGES, InvalidRequest
from tests.cli.conftest import RUN, environment, invoke


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


# -- on a terminal


class Terminal:
    """A command on a terminal, and what that has shown so far."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self._here, there = pty.openpty()
        # A session of its own: the terminal of whoever runs the tests is not its controlling one.
        self.process = subprocess.Popen(
            [*RUN, *arguments],
            stdin=there,
            stdout=there,
            stderr=there,
            env=environment(**env),
            start_new_session=True,
        )
        os.close(there)
        self.shown = ""

    def wait_for(self, text: str, times: int = 1) -> None:
        """Read until the text was shown so many times."""
        while self.shown.count(text) < times:
            assert self._read(), self.shown

    def type(self, text: str) -> None:
        """Type something."""
        os.write(self._here, text.encode())

    def end(self) -> int:
        """Read to the end; its exit status."""
        while self._read():
            pass
        os.close(self._here)
        return self.process.wait(30)

    def visible(self) -> str:
        """What everybody on the machine, and what its user, can read about the process in /proc."""
        folder = Path(f"/proc/{self.process.pid}")
        files = ("cmdline", "environ", "comm", "status")
        return "".join((folder / name).read_bytes().decode("utf-8", "replace") for name in files)

    def _read(self) -> bool:
        if not select.select([self._here], [], [], 60)[0]:
            return False
        try:
            data = os.read(self._here, 65_536)
        except OSError:
            return False  # The other side is closed: the command has ended.
        self.shown += data.decode("utf-8")
        return bool(data)


NOWHERE = "tailrace://127.0.0.1:1"
PROMPTS = ("New password of anna: ", "The same once more: ")


def test_typed_passwords_are_not_shown_and_in_no_argument() -> None:
    terminal = Terminal("user", "add", "anna", "--url", NOWHERE)
    terminal.wait_for(PROMPTS[0])
    terminal.type("MARKER secret\n")
    terminal.wait_for(PROMPTS[1])
    assert "MARKER" not in terminal.visible()
    terminal.type("MARKER secret\n")
    assert terminal.end() == EDGES["unavailable"].exit
    assert "MARKER" not in terminal.shown
    assert "no broker" in terminal.shown


def test_typed_passwords_that_differ_change_nothing() -> None:
    terminal = Terminal("user", "passwd", "--url", NOWHERE)
    for prompt, typed in zip(("New password: ", PROMPTS[1]), ("MARKER one", "MARKER two"), strict=True):
        terminal.wait_for(prompt)
        terminal.type(f"{typed}\n")
    assert terminal.end() == EDGES["invalid_request"].exit
    assert "the two passwords differ: nothing was changed" in terminal.shown
    assert "MARKER" not in terminal.shown


@pytest.mark.parametrize("end", ["interrupt", "end of input"])
def test_who_stops_typing_ends_the_command(end: str) -> None:
    terminal = Terminal("user", "passwd", "anna", "--url", NOWHERE)
    terminal.wait_for(PROMPTS[0])
    if end == "interrupt":
        terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.type("\x04")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown


# -- on the command line


@pytest.mark.parametrize(
    "arguments",
    [
        ("user", "passwd", "anna", "MARKER"),
        ("user", "add", "anna", "MARKER", "MARKER"),
        ("user", "add", "anna", "--password", "MARKER"),
        ("user", "add", "anna", "--password=MARKER"),
        ("user", "add", "anna", "--password-stdin=MARKER"),
        ("user", "add", "anna", "--generate", "--url", "tailrace://anna:MARKER@127.0.0.1:1"),
        ("whoami", "--url", "tailrace://127.0.0.1:1?token=MARKER"),
        ("whoami", "--url", "tailrace://anna:MARKER@127.0.0.1:one"),
        ("whoami", "--url", "http://anna:MARKER@127.0.0.1"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_errors_repeat_no_secret_of_the_command_line(
    arguments: tuple[str, ...], form: tuple[str, ...]
) -> None:
    done = invoke(*arguments, *form)
    assert done.status != 0
    assert "MARKER" not in done.out + done.err


def test_secrets_in_arguments_are_told_to_be_seen() -> None:
    given = ("tailrace://anna:pw@127.0.0.1:1", "tailrace://anna:p/w@127.0.0.1:1")
    for url in (*given, "tailraces://127.0.0.1:1?ca=x&token=t"):
        for arguments in (("--url", url), (f"--url={url}",)):
            assert "note: everybody on this machine could read" in invoke("whoami", *arguments).err
            assert "everybody" not in invoke("whoami", *arguments, "--json").err
    for url in (NOWHERE, "tailrace://anna@127.0.0.1:1", "embedded:./a:b@c"):
        assert "everybody" not in invoke("topic", "--url", url, "--help").err
    assert "never an argument" in invoke("user", "passwd", "anna", "secret").err
