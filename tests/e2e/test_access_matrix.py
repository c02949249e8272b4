"""Who may do what: every verb, through every door, by every kind of caller. A verb without a row fails.

    caller                             TCP           TLS             Unix socket     pages
    anonymous                          turned away   turned away     the owner       401
    wrong password, unknown user       turned away, in the same words                401
    expired token, revoked token       turned away; connections end                  401
    certificate of another authority   (no place)    no connection   (no place)      no connection
    right user without the right       denied                                        403
    right user on another tenant       denied                                        403
    right user                         let through, with just the rights of the row  200

Anonymous at a Unix socket is the system user that connects: that of the broker is its owner, and others are
turned away. At the door of a data folder (embedded brokers have it, and servers too) nothing else counts: the
own system user may do everything there, whatever it shows, because it could write the files themselves; all
others are turned away, whatever they show.
"""

import base64
import contextlib
import itertools
import os
import ssl
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.certificates import CertificateFiles
from tailrace.core.model.access import RIGHTS
from tailrace.core.model.access_commands import CallerInfo, CreateToken, RevokeToken, WhoAmI
from tailrace.core.model.commands import Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.wire import Credentials
from tests.e2e.access_rows import EVERY_RIGHT, PASSWORD, PUBLISH, ROWS, TOPIC
from tests.e2e.doors import Door, Session, TurnedAway, encoded, greeting
from tests.e2e.guarded_broker import (
    CERTIFIED,
    MIGHTY,
    REFUSED,
    ROOT_USER,
    STRANGER,
    TENANT_USER,
    Guarded,
    behind_tls,
    embedded,
    make_certificates,
    only_user,
    plain,
    state_of,
    without_user,
)

DOORS = ("native", "tls", "unix")
LET_IN_NO_MORE = {"denied", "unauthenticated"}
NUMBERS = itertools.count(1)

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("matrix")]


class Started(dict[str, Guarded]):
    """Brokers by door."""

    def __init__(self, start: Callable[[str], Guarded]) -> None:
        super().__init__()
        self._start = start

    def __missing__(self, name: str) -> Guarded:
        broker = self._start(name)
        self.update(dict.fromkeys(broker.doors, broker))
        return broker


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Guarded]]:
    """Each is started when a test first asks for it."""
    folder = tmp_path_factory.mktemp("guarded")
    made = make_certificates(folder)
    starts = {"tls": behind_tls, "unix": behind_tls, "native": plain, "embedded": embedded}
    with contextlib.ExitStack() as stack:
        yield Started(lambda name: stack.enter_context(starts[name](folder, made)))


@pytest.fixture(params=DOORS)
def place(request: pytest.FixtureRequest, brokers: dict[str, Guarded]) -> tuple[Guarded, Door]:
    broker = brokers[request.param]
    return broker, broker.doors[request.param]


def everything(broker: Guarded) -> list[bytes]:
    """One request of every row, as it travels."""
    with broker.root() as root:
        made = [row.request(root, next(NUMBERS)) for row in ROWS]
    return [encoded(request, body, number) for number, (request, body) in enumerate(made, 1)]


# -- the rows


def test_every_verb_has_a_row() -> None:
    named = {row.of for row in ROWS}
    assert {kind.__name__ for kind in get_args(Request)} == {kind.__name__ for kind in named}
    assert {right for right, _ in EVERY_RIGHT} == set(RIGHTS)


def test_every_row_says_who_may() -> None:
    for row in ROWS:
        assert (row.may == "rights") == (bool(row.rights) and row.shows is None), row.of
        assert row.may != "administrator" or not row.rights, row.of


# -- those whom nobody knows


def turned_away(door: Door, credentials: Credentials | None, requests: list[bytes]) -> Refusal:
    """Greet and send everything at once; what the broker says, which must be a refusal and nothing else."""
    with door.connect() as session:
        with contextlib.suppress(OSError):  # It may hang up before it has everything.
            session.write(greeting(credentials) + b"".join(requests))
        messages = list(session.rest())
    assert all(not body for _, _, body in messages)
    said = [codec.decode_reply(header) for _, header, _ in messages]
    assert said, "it hung up without a word"
    assert all(isinstance(reply, Refusal) for reply in said), said
    first = said[0]
    assert isinstance(first, Refusal)
    assert first.code == "unauthenticated", first
    return first


WRONG = {
    "wrong password": Credentials(MIGHTY, PASSWORD + "!"),
    "unknown user": Credentials("nobody-of-this-name", PASSWORD),
    "unknown token": Credentials(token="trt_0000000000000000_" + "0" * 43),
    "no token at all": Credentials(token="\x00 ../../etc/passwd"),
    "empty password": Credentials(MIGHTY, ""),
    "a token in the place of a user": Credentials("", PASSWORD),
}


@pytest.mark.parametrize("kind", ["anonymous", "expired token", *WRONG])
def test_whom_nobody_knows_does_nothing(place: tuple[Guarded, Door], kind: str) -> None:
    broker, door = place
    if kind == "anonymous" and door.name == "unix":
        with door.enter() as session:
            assert session.do(WhoAmI()).proof == "owner"
        return
    shown = {**WRONG, "anonymous": None, "expired token": Credentials(token=broker.expired)}[kind]
    requests = everything(broker)
    with broker.root() as root:
        before = state_of(root)
        said = turned_away(door, shown, requests)
        assert PASSWORD not in repr(said)
        assert state_of(root) == before


def test_wrong_password_and_unknown_user_are_told_the_same(place: tuple[Guarded, Door]) -> None:
    _, door = place
    words = {turned_away(door, WRONG[kind], []).message for kind in ("wrong password", "unknown user")}
    assert len(words) == 1, words


@pytest.mark.parametrize("kind", ["anonymous", "expired token"])
def test_no_verb_is_let_through_alone(place: tuple[Guarded, Door], kind: str) -> None:
    """Each on a connection of its own, before and after the greeting."""
    broker, door = place
    if kind == "anonymous" and door.name == "unix":
        return
    if kind != "anonymous" and door.name == "tls":
        return  # Behind the handshake, which takes its time, it is the same as `native`.
    shown = None if kind == "anonymous" else Credentials(token=broker.expired)
    for request in everything(broker):
        turned_away(door, shown, [request])
        with door.connect() as session:
            session.write(request)
            said = [codec.decode_reply(header) for _, header, _ in session.rest()]
            assert all(isinstance(reply, Refusal) for reply in said), said


# -- certificates


def test_a_certificate_of_another_authority_opens_nothing(brokers: dict[str, Guarded]) -> None:
    broker = brokers["tls"]
    door = broker.doors["tls"]
    foreign = Door(
        name="tls",
        address=door.address,
        authority=door.authority,
        shown=broker.certificates.foreign,
    )
    requests = everything(broker)
    with broker.root() as root:
        before = state_of(root)
        heard = b""
        for credentials in (None, broker.shown(ROOT_USER)):
            try:
                with foreign.connect() as session:
                    session.write(greeting(credentials) + b"".join(requests))
                    heard += b"".join(header for _, header, _ in session.rest())
            except OSError:
                continue
        assert heard == b""
        assert state_of(root) == before


def test_certificates_of_the_own_authority(brokers: dict[str, Guarded]) -> None:
    broker = brokers["tls"]
    door = broker.doors["tls"]

    def showing(shown: Any) -> Door:
        return Door(name="tls", address=door.address, authority=door.authority, shown=shown)

    with showing(broker.certificates.known).enter() as session:
        info = session.do(WhoAmI())
        assert (info.user, info.proof) == (CERTIFIED, "certificate")
    with pytest.raises(TurnedAway, match="unauthenticated"):
        showing(broker.certificates.unknown).enter()
    # Credentials that are given count alone.
    with pytest.raises(TurnedAway, match="unauthenticated"):
        showing(broker.certificates.known).enter(Credentials(token=broker.expired))


def test_whoever_shows_another_certificate_than_the_name_says_is_no_broker(
    brokers: dict[str, Guarded],
) -> None:
    """A client with the wrong authority in its hand does not get as far as its greeting."""
    broker = brokers["tls"]
    door = broker.doors["tls"]
    wrong = Door(name="tls", address=door.address, authority=broker.certificates.foreign.authority)
    with pytest.raises(ssl.SSLCertVerificationError):
        wrong.connect()


# -- those whose token is taken from them


def test_revoked_while_connected(place: tuple[Guarded, Door]) -> None:
    broker, door = place
    with broker.root() as root:
        made = root.do(CreateToken(f"revoked-{door.name}", MIGHTY))
        requests = [row.request(root, next(NUMBERS)) for row in ROWS]
        sessions = [door.enter(Credentials(token=made.secret)) for _ in requests]
        for session in sessions:
            assert session.do(WhoAmI()).user == MIGHTY
        root.do(RevokeToken(made.id))
        before = state_of(root)
        for session, (request, body) in zip(sessions, requests, strict=True):
            with session:
                with contextlib.suppress(OSError):
                    session.post(request, body)
                said = [codec.decode_reply(header) for _, header, _ in session.rest()]
                assert said, "it was told nothing"
                assert {getattr(reply, "code", reply) for reply in said} <= {"unauthenticated", "unavailable"}
                assert said[0].code == "unauthenticated"  # type: ignore[union-attr]
        assert state_of(root) == before
        with pytest.raises(TurnedAway):
            door.enter(Credentials(token=made.secret))


# -- those who are known


class Sessions(dict[str, Session]):
    """Sessions by user, opened when they are first needed."""

    def __init__(self, broker: Guarded, door: Door, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._open = lambda user: stack.enter_context(door.enter(broker.shown(user)))

    def __missing__(self, user: str) -> Session:
        self[user] = self._open(user)
        return self[user]


def denied(session: Session, user: str, request: Any, body: Any) -> None:
    """A user may not do this: it is told so, and gets nothing."""
    reply, rest = session.ask_for(request, body)
    assert rest == b"", (user, request)
    assert isinstance(reply, Refusal), (user, request, reply)
    assert reply.code == "denied", (user, request, reply)
    assert reply.message, (user, request)


@pytest.mark.parametrize("user", [STRANGER, REFUSED, TENANT_USER])
def test_without_a_right_on_it(place: tuple[Guarded, Door], user: str) -> None:
    """A user without any rule; one that is allowed everything and denied this; one of another tenant that the
    rules allow everything."""
    broker, door = place
    with broker.root() as root, door.enter(broker.shown(user)) as session:
        made = [(row, *row.request(root, next(NUMBERS))) for row in ROWS if row.may != "everybody"]
        before = state_of(root)
        for _, request, body in made:
            denied(session, user, request, body)
        assert state_of(root) == before
        for row in ROWS:
            if row.may == "everybody":
                request, body = row.request(root, next(NUMBERS))
                reply = session.do(request, body)
                # It may ask, and is not told of what it has no right on.
                assert row.shows is None or row.shows(reply) == [], (user, request)


def test_one_right_too_few(place: tuple[Guarded, Door]) -> None:
    """Who has all rights but one of those that a verb needs may not use it."""
    broker, door = place
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(broker.root())
        sessions = Sessions(broker, door, stack)
        for row in ROWS:
            pairs = row.rights if row.may == "rights" else (PUBLISH,) * (row.may == "administrator")
            for pair in pairs:
                user = without_user(pair)
                request, body = row.request(root, next(NUMBERS))
                denied(sessions[user], user, request, body)


def test_just_enough(place: tuple[Guarded, Door]) -> None:
    """Who has the rights of the row, and no others, is let through; so is an administrator."""
    broker, door = place
    done = 0
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(broker.root())
        sessions = Sessions(broker, door, stack)
        for row in ROWS:
            right = only_user(row.rights) if row.rights else STRANGER
            for user in [MIGHTY] if row.may == "administrator" else [right, MIGHTY]:
                request, body = row.request(root, next(NUMBERS))
                reply, _ = sessions[user].ask_for(request, body)
                code = reply.code if isinstance(reply, Refusal) else ""
                assert code not in LET_IN_NO_MORE, (user, request, reply)
                done += not code
                if row.shows is not None and row.rights and user != STRANGER:
                    assert row.shows(reply), (user, request, "sees nothing of what it may see")
    assert done > 1.5 * len(ROWS), "most of the verbs have to have worked"


def test_everybody_is_who_it_is(place: tuple[Guarded, Door]) -> None:
    broker, door = place
    for user in broker.tokens:
        if user == ROOT_USER:
            continue
        with door.enter(broker.shown(user)) as session:
            info = session.do(WhoAmI())
            assert isinstance(info, CallerInfo)
            assert (info.user, info.proof) == (user, "token")
            assert info.administrator == (user == MIGHTY)
            assert info.tenant == ("acme" if user == TENANT_USER else "")


# -- users of the operating system


@pytest.mark.parametrize("kind", ["anonymous", "right token", "stranger", "revoked token", *WRONG])
def test_the_own_system_user_does_everything_at_the_door_of_its_folder(
    brokers: dict[str, Guarded], kind: str
) -> None:
    broker = brokers["embedded"]
    door = broker.doors["embedded"]
    shown = {
        **WRONG,
        "anonymous": None,
        "right token": broker.shown(ROOT_USER),
        "stranger": broker.shown(STRANGER),
        "revoked token": Credentials(token=broker.expired),
    }[kind]
    with door.enter(shown) as session:
        assert session.do(WhoAmI()).proof == "owner"
        done = 0
        for row in ROWS if kind == "anonymous" else ROWS[:1]:
            if row.of is CreateToken and row.may == "everybody":
                continue  # The owner is no user, and has no tokens.
            reply, _ = session.ask_for(*row.request(session, next(NUMBERS)))
            assert not isinstance(reply, Refusal) or reply.code not in LET_IN_NO_MORE, (row.of, reply)
            done += not isinstance(reply, Refusal)
        assert done > 0.7 * len(ROWS) or kind != "anonymous"


@pytest.mark.parametrize("name", ["unix", "embedded"])
def test_other_system_users_are_turned_away(brokers: dict[str, Guarded], name: str) -> None:
    """The modes of files keep them out. Where those are changed, and the test may pose as another user, they
    are refused by their number; at the door of a folder also with the best of tokens."""
    broker = brokers[name]
    path = Path(str(broker.doors[name].address))
    # The group of a server's socket may try its users; nobody else gets as far as that.
    assert stat.S_IMODE(path.stat().st_mode) == {"unix": 0o660, "embedded": 0o600}[name]
    assert stat.S_IMODE(broker.data.stat().st_mode) & 0o077 == 0
    if os.geteuid() != 0:
        return
    with another_user(path) as door:
        turned_away(door, None, everything(broker))
        if name == "embedded":
            turned_away(door, broker.shown(ROOT_USER), everything(broker))
        else:
            with door.enter(broker.shown(MIGHTY)) as session:
                assert session.do(WhoAmI()).proof == "token"


@contextlib.contextmanager
def another_user(path: Path) -> Iterator[Door]:
    """A socket that everybody may connect to, and this thread as a user that has no other rights."""
    modes = {place: place.stat().st_mode for place in (path, path.parent)}
    before = os.getcwd()
    os.chdir(path.parent)  # Nobody may look into the folders above.
    for place in modes:
        place.chmod(0o777)

    class Posing(Door, frozen=True):
        def connect(self) -> Session:
            os.seteuid(65534)
            try:
                return super().connect()
            finally:
                os.seteuid(0)

    try:
        yield Posing(name="posing", address=path.name)
    finally:
        os.chdir(before)
        for place, mode in modes.items():
            place.chmod(mode)


# -- pages


PAGES = {
    "/healthz": "everybody",
    "/readyz": "everybody",
    "/metrics": "operate",
    "/": "nobody",
    "/topics": "nobody",
}
"""Which right shows a page; `nobody`: there is none, whoever asks."""
PAGE_CALLERS = (
    "anonymous",
    "wrong password",
    "unknown user",
    "expired token",
    "revoked token",
    "certificate of another authority",
    "right user without the right",
    "right user on another tenant",
    "right user",
)


def get(
    broker: Guarded, page: str, login: str = "", shown: CertificateFiles | None = None
) -> tuple[int, str]:
    """Status and text of a page."""
    context = None
    if broker.pages.startswith("https"):
        context = ssl.create_default_context(cafile=broker.certificates.server.authority)
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.key)
    request = urllib.request.Request(broker.pages + page)
    if login:
        request.add_header("Authorization", login)
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def login_of(broker: Guarded, kind: str) -> str:
    """What a caller of a page shows."""
    tokens = {
        "expired token": broker.expired,
        "right user without the right": broker.tokens[without_user(("operate", "broker"))],
        "right user on another tenant": broker.tokens[TENANT_USER],
        "right user": broker.tokens[only_user((("operate", "broker"),))],
    }
    if kind in tokens:
        return f"Bearer {tokens[kind]}"
    if kind == "revoked token":
        with broker.root() as root:
            made = root.do(CreateToken(f"page-{next(NUMBERS)}", MIGHTY))
            root.do(RevokeToken(made.id))
        return f"Bearer {made.secret}"
    return {
        "wrong password": basic(MIGHTY, PASSWORD + "!"),
        "unknown user": basic("nobody-of-this-name", PASSWORD),
    }.get(kind, "")


@pytest.mark.parametrize("name", ["native", "tls"])
@pytest.mark.parametrize("kind", PAGE_CALLERS)
def test_pages(brokers: dict[str, Guarded], name: str, kind: str) -> None:
    broker = brokers[name]
    if kind.startswith("certificate"):
        if name == "tls":
            with pytest.raises(OSError):
                get(broker, "/metrics", shown=broker.certificates.foreign)
        return  # Without TLS none can be shown.
    login = login_of(broker, kind)
    for page, right in PAGES.items():
        status, text = get(broker, page, login)
        if right == "nobody":
            assert status == 404, (page, status, text)
        elif right == "everybody":
            # Whether it lives and is ready is no secret; wrong credentials may be refused all the same.
            assert status in (200, 401), (page, status, text)
        elif kind == "right user":
            assert status == 200
            assert "tailrace_published_messages_total" in text
        else:
            assert status in (401, 403), (page, status, text)
        if kind != "right user":
            assert TOPIC not in text, (page, kind, text)
            assert "tailrace_" not in text, (page, kind)


def test_a_page_takes_nothing_but_get(brokers: dict[str, Guarded]) -> None:
    """No verb of the broker can be reached through its pages."""
    broker = brokers["native"]
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        request = urllib.request.Request(broker.pages + "/metrics", method=method)
        request.add_header("Authorization", f"Bearer {broker.tokens[ROOT_USER]}")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=20)
        assert caught.value.code == 405
        caught.value.close()
