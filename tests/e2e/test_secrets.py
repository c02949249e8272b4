"""No secret is in any output: every secret of a run is searched for in all that the run has left and said.

A run logs in rightly and wrongly in every way, makes and revokes tokens, changes passwords, uses the command
line, asks the pages, and makes the broker fail. Secrets may be in `admin.token`, where the first of them is
handed over, and nowhere else: neither as they are, nor as base64 or hex.
"""

import base64
import contextlib
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.core.model import access_commands as access
from tailrace.core.model.commands import CreateTopic
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.wire import Credentials
from tests.e2e.broker_process import SRC, BrokerProcess
from tests.e2e.doors import Door, Session, TurnedAway, encoded, greeting
from tests.e2e.guarded_broker import make_certificates
from tests.e2e.raw_client import publish

pytestmark = pytest.mark.xdist_group("secrets")  # one broker for all of its tests
PASSWORDS = {
    "right": "correct-horse-battery-0001",
    "changed": "correct-horse-battery-0002",
    "wrong": "correct-horse-battery-0003",
    "too short": "sh0rt-1",
    "of nobody": "correct-horse-battery-0004",
    "by command": "correct-horse-battery-0005",
    "in a url": "correct-horse-battery-0006",
}


class Run:
    """What is said, and the secrets that must not be in it."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {f"password, {what}": text for what, text in PASSWORDS.items()}
        self.said: list[tuple[str, bytes]] = []

    def hear(self, what: str, said: object) -> None:
        """Take down what came out."""
        data = said if isinstance(said, bytes) else repr(said).encode()
        self.said.append((what, data))

    def token(self, what: str, text: str) -> str:
        """A token that must not occur again, as a whole or its secret part."""
        self.secrets[f"token, {what}"] = text
        self.secrets[f"secret of the token, {what}"] = text.rpartition("_")[2]
        return text

    def forms(self) -> Iterator[tuple[str, bytes]]:
        """Every secret in every form in which it could be found."""
        for what, text in self.secrets.items():
            data = text.encode()
            yield what, data
            yield f"{what}, in hex", data.hex().encode()
            yield f"{what}, in base64", base64.b64encode(data).rstrip(b"=")
            yield f"{what}, in base64 of a login", base64.b64encode(b":" + data)[4:-4]

    def found(self, where: str, data: bytes) -> list[str]:
        """Which secrets are in something."""
        return [f"{what} is in {where}" for what, form in self.forms() if len(form) > 5 and form in data]


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


@pytest.fixture(scope="module")
def traces(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run that is over."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "certificates").mkdir()
    made = make_certificates(folder / "certificates")
    config = folder / "broker.toml"
    config.write_text(
        f'[tls]\ncertificate = "{made.server.certificate}"\nkey = "{made.server.key}"\n'
        f'client_ca = "{made.known.authority}"\nclient_certificates = "optional"\n'
    )
    for path in (made.server.key, made.known.key):
        lines = Path(path).read_text().splitlines()[1:-1]
        run.secrets |= {f"line {number} of {Path(path).name}": line for number, line in enumerate(lines)}
    broker = BrokerProcess(folder / "data", "--config", str(config), "--log-level", "debug")
    broker.listen = f"127.0.0.1:0,unix:{folder / 'unix.sock'}"
    with broker.start():
        door = Door(name="tls", address=broker.address, authority=made.server.authority)
        first = run.token("first", (broker.data / "admin.token").read_text().strip())
        with door.enter(Credentials(token=first)) as root:
            make_users(run, root)
            fail_to_log_in(run, door)
            change_passwords(run, door, root)
            send_nonsense(run, door)
        use_commands(run, broker, made.server.authority, first)
        ask_pages(run, broker, made.server.authority, first)
        assert broker.stop() == 0
        # A second start reads everything again.
        broker.start()
        assert broker.stop() == 0
    return folder


def make_users(run: Run, root: Session) -> None:
    """Users, tokens, and requests that fail with secrets in them."""
    root.do(CreateTopic("orders", {"partitions": 1}))
    root.do(*publish("orders", [b"x"]))
    requests = [
        access.AddUser("anna", PASSWORDS["right"]),
        access.AddUser("anna", PASSWORDS["right"]),
        access.AddUser("short", PASSWORDS["too short"]),
        access.AddUser("no good name", PASSWORDS["right"]),
        access.AlterUser("nobody", PASSWORDS["right"]),
        access.AddUser("bob", PASSWORDS["in a url"]),
        access.ListUsers(),
        access.ListTokens(),
    ]
    for request in requests:
        run.hear(type(request).__name__, request)
        run.hear(f"answer to {type(request).__name__}", root.ask(request))
    made = root.do(access.CreateToken("first", "anna"))
    run.token("of anna", made.secret)
    run.hear("TokenMade", made)
    doomed = root.do(access.CreateToken("second", "anna"))
    run.token("revoked", doomed.secret)
    root.do(access.RevokeToken(doomed.id))


def fail_to_log_in(run: Run, door: Door) -> None:
    """In every way."""
    tokens = run.secrets
    wrong = [
        Credentials("anna", PASSWORDS["wrong"]),
        Credentials("nobody", PASSWORDS["of nobody"]),
        Credentials("", PASSWORDS["wrong"]),
        Credentials(token=tokens["token, revoked"]),
        Credentials(token=tokens["token, of anna"][:-1] + "!"),
        Credentials(token=tokens["token, of anna"] + " "),
        Credentials(token=PASSWORDS["wrong"]),
        Credentials("anna\n\x1b[31m", PASSWORDS["wrong"]),
    ]
    for credentials in wrong:
        run.hear("repr of credentials", credentials)
        with pytest.raises(TurnedAway) as caught:
            door.enter(credentials)
        run.hear("refused login", str(caught.value))


def change_passwords(run: Run, door: Door, root: Session) -> None:
    """An old password is as secret as a new one."""
    with door.enter(Credentials("anna", PASSWORDS["right"])) as anna:
        run.hear("WhoAmI", anna.do(access.WhoAmI()))
        run.hear("AlterUser", root.do(access.AlterUser("anna", PASSWORDS["changed"])))
        run.hear("end of a connection", [header for _, header, _ in anna.rest()])
    door.enter(Credentials("anna", PASSWORDS["changed"])).close()


def send_nonsense(run: Run, door: Door) -> None:
    """Secrets in places where they do not belong: their names are wrong, and the answers repeat none."""
    token = run.secrets["token, of anna"]
    broken = greeting(Credentials("anna", PASSWORDS["wrong"], token))
    for data in (broken[:40] + broken[41:], broken.replace(b"hello", b"hallo"), broken + broken):
        with door.connect() as session:
            with contextlib.suppress(OSError):
                session.write(data)
                session.link.settimeout(5.0)
                session.link.shutdown(1)
            with contextlib.suppress(OSError, TimeoutError):
                run.hear("answer to nonsense", list(session.rest()))
    with door.enter(Credentials(token=token)) as anna:
        request = encoded(access.AddUser("x", PASSWORDS["wrong"]), b"", 1)
        anna.write(request.replace(b"add_user", b"add_uzer"))
        _, reply = anna.reply()
        assert isinstance(reply, Refusal)
        run.hear("answer to an unknown verb", codec.encode_reply(reply))


def use_commands(run: Run, broker: BrokerProcess, authority: str, token: str) -> None:
    """The command line, with secrets in variables, files and on standard input."""
    url = f"tailraces://{broker.listen.partition(',')[0]}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    login = {**clean, "PYTHONPATH": SRC, "TAILRACE_CA": authority, "TAILRACE_URL": url}

    def tailrace(*words: str, given: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [sys.executable, "-m", "tailrace.cli", *words],
            input=given.encode(),
            capture_output=True,
            env={**login, **variables},
            timeout=60,
        )
        run.hear("errors of " + " ".join(words[:2]), done.stderr)
        return done

    made = tailrace("token", "create", "third", "--user", "anna", "--json", TAILRACE_TOKEN=token)
    assert made.returncode == 0, made.stderr
    outputs = [
        tailrace(
            "user",
            "add",
            "carl",
            "--password-stdin",
            given=PASSWORDS["by command"] + "\n",
            TAILRACE_TOKEN=token,
        ),
        tailrace("whoami", "--json", TAILRACE_TOKEN=token),
        tailrace("user", "list", "--json", TAILRACE_TOKEN=token),
        tailrace("token", "list", TAILRACE_TOKEN=token),
        tailrace("whoami", TAILRACE_TOKEN=run.secrets["token, revoked"]),
        tailrace("whoami", TAILRACE_TOKEN=run.secrets["token, of anna"][:-2]),
        tailrace("whoami", TAILRACE_URL=url.replace("://", f"://bob:{PASSWORDS['in a url']}@")),
        tailrace("whoami", TAILRACE_URL=url.replace("://", f"://bob:{PASSWORDS['wrong']}@")),
        tailrace("whoami", TAILRACE_URL=f"tailrace://bob:{PASSWORDS['in a url']}@broker.invalid:1"),
        tailrace("whoami", TAILRACE_URL=f"tailraces://bob:{PASSWORDS['in a url']}@localhost:1"),
        tailrace("whoami", TAILRACE_URL=f"tailrace:/bob:{PASSWORDS['in a url']}@localhost"),
    ]
    for done in outputs:
        run.hear("output of a command", done.stdout)
    assert [done.returncode == 0 for done in outputs] == [True] * 4 + [False] * 2 + [True] + [False] * 4


def ask_pages(run: Run, broker: BrokerProcess, authority: str, token: str) -> None:
    """Pages, with and without a login."""
    import ssl

    context = ssl.create_default_context(cafile=authority)
    logins = [
        "",
        f"Bearer {token}",
        f"Bearer {run.secrets['token, revoked']}",
        "Basic " + base64.b64encode(f"bob:{PASSWORDS['in a url']}".encode()).decode(),
        "Basic " + base64.b64encode(f"anna:{PASSWORDS['wrong']}".encode()).decode(),
    ]
    for page in (
        "healthz",
        "readyz",
        "metrics",
        f"metrics?token={PASSWORDS['wrong']}",
        PASSWORDS["of nobody"],
    ):
        for login in logins:
            asked = urllib.request.Request(f"https://{broker.http_listen}/{page}")
            if login:
                asked.add_header("Authorization", login)
            try:
                with urllib.request.urlopen(asked, timeout=20, context=context) as answer:
                    run.hear(f"page {page.partition('?')[0]}", answer.read())
            except urllib.error.HTTPError as error:
                run.hear(f"refused page {page[:7]}", error.read() + str(error.headers).encode())


def test_no_answer_holds_a_secret(run: Run, traces: Path) -> None:
    assert len(run.said) > 60
    assert len(run.secrets) > 15
    found = [line for what, data in run.said for line in run.found(what, data)]
    assert found == []


def test_no_file_holds_a_secret(run: Run, traces: Path) -> None:
    """Logs, the data folder, what was written for an audit."""
    handed_over = (traces / "data" / "admin.token").read_bytes()
    assert run.found("admin.token", handed_over), "what is there is found"
    looked_at: dict[str, int] = {}
    found = []
    for path in sorted(traces.rglob("*")):
        if not path.is_file() or path.name == "admin.token" or "certificates" in path.parts:
            continue
        data = path.read_bytes()
        looked_at[path.name] = len(data)
        found += run.found(str(path.relative_to(traces)), data)
    assert found == []
    assert {"data.log", "access.json", "audit.log", "catalog.json"} <= set(looked_at)
    assert looked_at["data.log"] > 200, "the log of the broker says something"


def test_files_with_identities_are_for_the_owner_only(traces: Path) -> None:
    for name in ("access.json", "audit.log", "admin.token"):
        assert (traces / "data" / name).stat().st_mode & 0o077 == 0, name


def test_no_control_character_of_others_is_in_a_log(traces: Path) -> None:
    for path in (traces / "data.log", traces / "data" / "audit.log"):
        data = path.read_bytes()
        assert not set(data) & (set(range(32)) - {10}), path.name
        assert b"\x7f" not in data
        assert b"\x9b" not in data.replace(b"\xc2\x9b", b"\x9b") or "\x9b" not in data.decode()
