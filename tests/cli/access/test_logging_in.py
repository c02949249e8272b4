"""A real broker that has users: who logs in how, what the commands say, and that no secret leaks.

Covers `cli/access/user.py` and `cli/access/token.py` from the side of clients that have to log in.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.errors import EDGES
from tests.cli.access.test_password_entry import PROMPTS, Terminal
from tests.cli.conftest import Broker, Done, invoke

PASSWORD = "MARKER correct horse"
UNAUTHENTICATED, DENIED = EDGES["unauthenticated"].exit, EDGES["denied"].exit


def encoded(password: str) -> str:
    return password.replace(" ", "%20")


class Guarded(Broker):
    """A broker with the administrator anna, and ben, who may do nothing yet."""

    def __init__(self, data: Path) -> None:
        super().__init__(data, "--log-level", "debug")
        self.secrets = ["MARKER"]
        self.first = self._added("anna", self.url)
        self.second = self._added("ben", self.url_of("anna"))

    def _added(self, name: str, url: str) -> Done:
        typed = f"{PASSWORD}\n".encode()
        done = invoke("user", "add", name, "--password-stdin", stdin=typed, TAILRACE_URL=url)
        assert done.status == 0, done.err
        return done

    def url_of(self, name: str, password: str = PASSWORD) -> str:
        return f"tailrace://{name}:{encoded(password)}@{self.ready['listen']}"

    def by(self, name: str, *arguments: str, stdin: bytes = b"", password: str = PASSWORD) -> Done:
        """Run a command line as a user."""
        return invoke(*arguments, stdin=stdin, TAILRACE_URL=self.url_of(name, password))

    def token(self, token: str, *arguments: str, stdin: bytes = b"") -> Done:
        """Run a command line with a token."""
        return invoke(*arguments, stdin=stdin, TAILRACE_URL=self.url, TAILRACE_TOKEN=token)

    def new_token(self, name: str, *arguments: str) -> dict[str, str]:
        """A new token."""
        done = self.by(name, "token", "create", *arguments, "--json")
        assert done.status == 0, done.err
        (made,) = done.rows
        self.secrets.append(made["secret"])
        return made


pytestmark = pytest.mark.xdist_group("logging-in")  # One broker for all of its tests.


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """One broker for all tests; when they are over, no secret of them is in its log or on its disk."""
    data = tmp_path_factory.mktemp("guarded")
    with Guarded(data) as running:
        yield running
        place = Path(f"/proc/{running.process.pid}")
        visible = b"".join((place / name).read_bytes() for name in ("cmdline", "environ", "comm"))
        status, err = running.stop()
        assert status == 0, err
        files = [path for path in data.rglob("*") if path.is_file() and path.name != "reserve"]
        assert any(path.name == "access.json" for path in files)
        everything = visible + err.encode() + b"".join(path.read_bytes() for path in files)
        assert b"anna" in everything, "the search finds what is there"
        assert [secret for secret in running.secrets if secret.encode() in everything] == []


def test_the_first_user_is_told_how_everybody_logs_in(guarded: Guarded) -> None:
    place = guarded.ready["listen"]
    assert "anna is the first user, and an administrator" in guarded.first.err
    assert f"TAILRACE_URL=tailrace://anna:PASSWORD@{place}" in guarded.first.err
    assert f'["{place}"]' in guarded.first.err
    assert guarded.second.err == ""
    for told in (guarded.first, guarded.second):
        assert "MARKER" not in told.out + told.err


def test_the_file_that_was_told_logs_in(guarded: Guarded, tmp_path: Path) -> None:
    lines = [line.strip() for line in guarded.first.err.splitlines()]
    start = lines.index(f'["{guarded.ready["listen"]}"]')
    text = "\n".join(lines[start : start + 3]).replace("...", PASSWORD)
    file = tmp_path / "credentials"
    file.touch(0o600)
    file.write_text(text, encoding="utf-8")
    env = {"TAILRACE_URL": guarded.url, "TAILRACE_CREDENTIALS": str(file)}
    done = invoke("whoami", "--json", **env)
    assert done.status == 0, done.err
    assert (done.rows[0]["user"], done.rows[0]["proof"]) == ("anna", "password")
    file.chmod(0o644)
    open_to_all = invoke("whoami", "--json", **env)
    assert open_to_all.status == EDGES["invalid_request"].exit
    assert "MARKER" not in open_to_all.err


def test_who_does_not_log_in_gets_nowhere(guarded: Guarded) -> None:
    for arguments in (("whoami",), ("user", "list"), ("topic", "list"), ("user", "add", "eve", "--generate")):
        done = invoke(*arguments, TAILRACE_URL=guarded.url)
        assert (done.status, done.out) == (UNAUTHENTICATED, ""), arguments
        assert "needs credentials" in done.err
        assert "TAILRACE_TOKEN" in done.err


def test_wrong_passwords_and_unknown_users_look_the_same(guarded: Guarded) -> None:
    """Once each: more failures make all logins from this address slow."""
    told = []
    for name in ("anna", "nobody"):
        done = guarded.by(name, "whoami", "--json", password="MARKER wrong")
        assert (done.status, done.out) == (UNAUTHENTICATED, "")
        assert "MARKER" not in done.err
        told.append(done.err.replace(name, "NAME"))
    assert told[0] == told[1]


def test_everybody_learns_who_they_are(guarded: Guarded) -> None:
    (anna,) = guarded.by("anna", "whoami", "--json").rows
    assert (anna["user"], anna["administrator"], anna["proof"]) == ("anna", True, "password")
    (ben,) = guarded.by("ben", "whoami", "--json").rows
    assert (ben["user"], ben["administrator"], ben["teams"]) == ("ben", False, [])
    assert guarded.by("ben", "whoami").out.split() == ["user", "ben", "proof", "password"]


def test_what_a_denial_suggests_can_be_run(guarded: Guarded) -> None:
    denied = guarded.by("ben", "topic", "create", "orders", "--partitions", "1")
    assert denied.status == DENIED
    (command,) = re.findall(r"`tailrace (acl add [^`]*)`", denied.err)
    assert guarded.by("ben", *shlex.split(command)).status == DENIED
    done = guarded.by("anna", *shlex.split(command))
    assert done.status == 0, done.err
    assert guarded.by("ben", "topic", "create", "orders", "--partitions", "1").status == 0
    publish = guarded.by("ben", "publish", "orders", "hello")
    assert publish.status == DENIED
    check = guarded.by("ben", "acl", "check", "publish", "topic", "orders")
    assert (check.status, check.out[:8]) == (DENIED, "denied: ")
    guarded.by("anna", "acl", "add", "allow", "user:ben", "publish", "topic", "ord*")
    assert guarded.by("ben", "publish", "orders", "hello").status == 0
    allowed = guarded.by("anna", "acl", "check", "--user", "ben", "publish", "topic", "orders", "--json")
    assert (allowed.status, allowed.rows[0]["allowed"]) == (0, True)
    (rule,) = [row for row in guarded.by("anna", "acl", "list", "--json").rows if row["pattern"] == "ord*"]
    assert allowed.rows[0]["rule"] == rule["rule"]


def test_who_is_no_administrator_changes_nothing_of_others(guarded: Guarded) -> None:
    before = guarded.by("anna", "user", "list", "--json").out
    for arguments in (
        ("user", "add", "eve", "--generate"),
        ("user", "alter", "ben", "--administrator"),
        ("user", "remove", "anna"),
        ("user", "passwd", "anna", "--generate"),
        ("token", "create", "t", "--user", "anna"),
        ("acl", "add", "allow", "user:ben", "read", "topic", "*"),
        ("quota", "put", "everyone", "--connections-max", "1"),
        ("tenant", "add", "acme"),
        ("acl", "check", "--user", "anna", "read", "topic", "x"),
    ):
        done = guarded.by("ben", *arguments)
        assert (done.status, done.out) == (DENIED, ""), arguments
    assert guarded.by("anna", "user", "list", "--json").out == before


def test_a_token_logs_in_until_it_is_revoked(guarded: Guarded) -> None:
    made = guarded.new_token("ben", "laptop", "--expires", "1h")
    (caller,) = guarded.token(made["secret"], "whoami", "--json").rows
    assert (caller["user"], caller["proof"], caller["credential"]) == ("ben", "token", made["id"])
    assert caller["expires"] == made["expires"]
    theirs = guarded.new_token("anna", "office")
    mine = [row["id"] for row in guarded.by("ben", "token", "list", "--json").rows]
    assert (made["id"] in mine, theirs["id"] in mine) == (True, False)
    assert guarded.by("ben", "token", "revoke", theirs["id"]).status == DENIED
    assert guarded.token(made["secret"], "token", "revoke", made["id"]).status == 0
    gone = guarded.token(made["secret"], "whoami")
    assert gone.status == UNAUTHENTICATED
    assert made["secret"] not in gone.err
    assert made["secret"] not in guarded.token(made["secret"], "whoami", "--json").err


def test_people_change_their_own_password(guarded: Guarded) -> None:
    carl = "MARKER of carl"
    added = guarded.by("anna", "user", "add", "carl", "--password-stdin", stdin=carl.encode())
    assert added.status == 0, added.err
    token = guarded.new_token("anna", "of-carl", "--user", "carl")["secret"]
    changed = guarded.token(token, "user", "passwd", "--generate")
    assert (changed.status, changed.out) == (DENIED, "")
    done = guarded.by("carl", "user", "passwd", "--generate", password=carl)
    assert done.status == 0, done.err
    new = done.out.strip()
    guarded.secrets.append(new)
    assert guarded.by("carl", "whoami", password=carl).status == UNAUTHENTICATED
    assert guarded.by("carl", "whoami", password=new).status == 0


def test_a_typed_password_logs_in(guarded: Guarded) -> None:
    terminal = Terminal("user", "add", "dora", "--url", guarded.url_of("anna"))
    for prompt in PROMPTS:
        terminal.wait_for(prompt.replace("anna", "dora"))
        terminal.type("MARKER of dora\n")
    assert terminal.end() == 0
    assert "user dora is added" in terminal.shown
    assert "MARKER of dora" not in terminal.shown
    assert guarded.by("dora", "whoami", password="MARKER of dora").status == 0


def test_an_administrator_of_a_tenant_rules_there_and_nowhere_else(guarded: Guarded) -> None:
    assert guarded.by("anna", "tenant", "add", "acme").status == 0
    assert guarded.by("anna", "user", "add", "acme/root", "--administrator", "--no-password").status == 0
    token = guarded.new_token("anna", "acme", "--user", "acme/root")["secret"]
    (caller,) = guarded.token(token, "whoami", "--json").rows
    assert (caller["user"], caller["tenant"], caller["administrator"]) == ("acme/root", "acme", True)
    for arguments in (
        ("user", "add", "acme/worker", "--no-password"),
        ("acl", "add", "allow", "user:acme/worker", "publish", "topic", "acme/*"),
        ("topic", "create", "acme/jobs", "--partitions", "1"),
        ("acl", "check", "--user", "acme/worker", "publish", "topic", "acme/jobs"),
    ):
        done = guarded.token(token, *arguments)
        assert done.status == 0, (arguments, done.err)
    for arguments in (
        ("user", "add", "worker", "--no-password"),
        ("user", "add", "other/worker", "--no-password"),
        ("user", "remove", "ben"),
        ("acl", "add", "allow", "user:acme/worker", "publish", "topic", "*"),
        ("acl", "add", "allow", "user:ben", "publish", "topic", "acme/*"),
        ("topic", "create", "jobs", "--partitions", "1"),
        ("quota", "put", "user:acme/worker", "--connections-max", "1"),
        ("tenant", "add", "other"),
        ("tenant", "remove", "acme"),
    ):
        done = guarded.token(token, *arguments)
        assert (done.status, done.out) == (DENIED, ""), arguments
    seen = [row["user"] for row in guarded.token(token, "user", "list", "--json").rows]
    assert seen == ["acme/root", "acme/worker"]
    topics = [row["topic"] for row in guarded.token(token, "topic", "list", "--json").rows]
    assert topics == ["acme/jobs"]
