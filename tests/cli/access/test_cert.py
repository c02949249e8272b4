"""`tailrace cert init`: files, names and ends, second runs, and TLS connections with what it makes.

Covers `cli/access/private_ca.py`.
"""

import json
import os
import shlex
import socket
import ssl
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tailrace.cli.access.private_ca import AUTHORITY_LIFE, LIFE, PrivateAuthority
from tailrace.errors import EDGES, AlreadyExists, InvalidRequest, NotFound
from tests.cli.conftest import RUN, Broker, Done, environment, invoke

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)


def init(folder: Path, *arguments: str) -> Done:
    return invoke("cert", "init", str(folder), *arguments)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> tuple[list[str], list[str]]:
    """Names of hosts and addresses, exactly as the certificate has them."""
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    assert len(found) == len(found.get_values_for_type(x509.DNSName)) + len(addresses)
    return found.get_values_for_type(x509.DNSName), addresses


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_names_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "certs"
    mask = os.umask(0)
    try:
        done = init(folder, "--host", "Broker.example.com", "--host", "[FD00::7]", "--client", "worker")
    finally:
        os.umask(mask)
    assert done.status == 0, done.err
    assert sorted(contents(folder)) == [
        "ca.key",
        "ca.pem",
        "client-worker.key",
        "client-worker.pem",
        "server.key",
        "server.pem",
    ]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    assert names(folder / "server.pem") == (
        ["localhost", "broker.example.com"],
        ["127.0.0.1", "::1", "fd00::7"],
    )
    assert names(folder / "client-worker.pem") == (["worker"], [])
    now = datetime.now(UTC)
    for name, life in (("ca", AUTHORITY_LIFE), ("server", LIFE), ("client-worker", LIFE)):
        found = certificate(folder / f"{name}.pem")
        assert now - timedelta(hours=2) < found.not_valid_before_utc < now
        assert abs(found.not_valid_after_utc - now - life) < timedelta(minutes=5)
        key = found.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
    assert timedelta(days=365) <= LIFE <= timedelta(days=825)
    assert "PRIVATE KEY" not in done.out + done.err


def test_what_to_do_next_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "my certs"
    (told,) = init(folder, "--host", "b.example", "--client", "acme/worker", "--json").rows
    assert [(file["what"], file["made"]) for file in told["files"]] == [
        ("authority", True),
        ("server", True),
        ("client", True),
    ]
    assert told["files"][2]["certificate"] == str(folder / "client-acme,worker.pem")
    assert told["files"][2]["names"] == ["acme/worker"]
    serve = shlex.split(told["serve"])
    assert f"TAILRACE_TLS_CERTIFICATE={folder / 'server.pem'}" in serve
    assert f"TAILRACE_TLS_CLIENT_CA={folder / 'ca.pem'}" in serve
    (connect,) = told["connect"]
    assert shlex.split(connect)[0] == "TAILRACE_URL=tailraces://b.example:7400"
    assert f"TAILRACE_KEY={folder / 'client-acme,worker.key'}" in shlex.split(connect)
    done = init(folder, "--client", "acme/worker")
    assert done.out.splitlines()[0].split() == ["FILE", "WHAT", "NAMES", "ENDS", "STATE"]
    assert [line.split()[-1] for line in done.out.splitlines()[1:]] == ["kept"] * 3
    assert told["serve"] in done.err
    assert connect in done.err
    (know,) = told["know"]
    assert shlex.split(know)[-5:] == ["user", "add", "acme/worker", "--certificate", "DNS:acme/worker"]
    assert f"TAILRACE_CA={folder / 'ca.pem'}" in shlex.split(know)
    assert know in done.err
    assert "data/admin.token" in done.err
    (alone,) = init(tmp_path / "other", "--json").rows
    assert "TAILRACE_KEY" not in alone["connect"][0]
    assert "tailraces://localhost:7400" in alone["connect"][0]


def test_a_second_run_keeps_what_is_there_and_adds_a_client(tmp_path: Path) -> None:
    init(tmp_path, "--host", "b.example", "--client", "one")
    before = contents(tmp_path)
    done = init(tmp_path, "--client", "two", "--client", "one")
    assert done.status == 0, done.err
    after = contents(tmp_path)
    assert sorted(after.keys() - before.keys()) == ["client-two.key", "client-two.pem"]
    assert {name: after[name] for name in before} == before
    authority = certificate(tmp_path / "ca.pem")
    for name in ("one", "two", "../server"):
        path = tmp_path / f"client-{name}.pem" if name[0] != "." else tmp_path / "server.pem"
        certificate(path).verify_directly_issued_by(authority)


def test_a_server_with_other_names_is_not_overwritten(tmp_path: Path) -> None:
    init(tmp_path, "--host", "b.example")
    before = contents(tmp_path)
    done = init(tmp_path, "--host", "b.example", "--host", "c.example", "--client", "never")
    assert done.status == EDGES["already_exists"].exit
    assert "without c.example" in done.err
    assert "remove server.pem and server.key" in done.err
    assert contents(tmp_path) == before
    for name in ("server.pem", "server.key"):
        (tmp_path / name).unlink()
    assert init(tmp_path, "--host", "b.example", "--host", "c.example").status == 0
    assert names(tmp_path / "server.pem")[0] == ["localhost", "b.example", "c.example"]
    assert (tmp_path / "ca.pem").read_bytes() == before["ca.pem"]


@pytest.mark.parametrize("missing", ["ca.key", "ca.pem", "server.key", "client-one.pem"])
def test_half_a_pair_is_an_error_and_nothing_is_written(tmp_path: Path, missing: str) -> None:
    init(tmp_path, "--client", "one")
    (tmp_path / missing).unlink()
    before = contents(tmp_path)
    done = init(tmp_path, "--client", "one")
    assert done.status == EDGES["not_found"].exit
    assert missing in done.err
    assert "hint: a key and its certificate belong together" in done.err
    assert contents(tmp_path) == before


def test_keys_that_do_not_fit_are_refused_and_never_shown(tmp_path: Path) -> None:
    init(tmp_path)
    init(tmp_path / "other")
    secret = (tmp_path / "other" / "ca.key").read_bytes()
    (tmp_path / "ca.key").write_bytes(secret)
    done = init(tmp_path)
    assert (done.status, "is not the key of" in done.err) == (EDGES["invalid_request"].exit, True)
    (tmp_path / "ca.key").write_bytes(secret[:120] + b"\nMARKER-OF-THE-SECRET\n" + secret[120:])
    done = init(tmp_path, "--json")
    assert done.status == EDGES["invalid_request"].exit
    assert "MARKER" not in done.err + done.out
    (tmp_path / "ca.pem").write_bytes(b"no certificate")
    assert "cannot be read as a certificate" in init(tmp_path).err


def test_what_a_link_points_to_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    folder = tmp_path / "certs"
    folder.mkdir()
    (folder / "server.key").symlink_to(tmp_path / "target" / "key")
    assert init(folder).status == EDGES["not_found"].exit
    assert list((tmp_path / "target").iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = init(tmp_path / "file")
    assert done.status == EDGES["invalid_request"].exit
    assert "cannot be made" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--client", ""),
        ("--client", "../server"),
        ("--client", "a b"),
        ("--client", "ä"),
        ("--client", "x" * 201),
        ("--host", ""),
        ("--host", "a b"),
        ("--host", "*.example.com"),
        ("--host", "bücher.example"),
        ("--host", "a..b"),
        ("--host", "https://b.example"),
    ],
)
def test_names_that_cannot_stand_in_a_certificate(tmp_path: Path, arguments: tuple[str, str]) -> None:
    done = init(tmp_path, *arguments)
    assert done.status == EDGES["invalid_request"].exit
    assert arguments[0] in done.err
    assert list(tmp_path.glob("client*")) == []


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    authority = PrivateAuthority(tmp_path, NOW)
    end = NOW + AUTHORITY_LIFE
    assert authority.server([]).ends == NOW + LIFE
    late = PrivateAuthority(tmp_path, end - timedelta(days=30))
    made = late.client("late")
    assert (made.ends, made.made) == (end, True)
    with pytest.raises(InvalidRequest, match="has ended"):
        PrivateAuthority(tmp_path, end)


def test_errors_name_what_is_there(tmp_path: Path) -> None:
    authority = PrivateAuthority(tmp_path, NOW)
    authority.server(["a.example"])
    with pytest.raises(AlreadyExists):
        authority.server(["b.example"])
    (tmp_path / "client-x.key").write_bytes(b"")
    with pytest.raises(NotFound, match=r"client-x\.pem is not"):
        authority.client("x")


def test_without_the_package_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    done = init(tmp_path / "certs")
    assert done.status == EDGES["error"].exit
    assert "install tailrace[security]" in done.err
    assert "pip install 'tailrace[security]'" in done.err
    assert not (tmp_path / "certs").exists()


# -- connections


def server_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(trusted: Path, certificates: Path | None = None, name: str = "worker") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted / "ca.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if certificates is not None:
        stem = certificates / name
        context.load_cert_chain(f"{stem}.pem", f"{stem}.key")
    return context


def connected(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> Any:
    """Connect over loopback TCP; what the server knows of the client, or the error of either side."""
    seen: list[Any] = []

    def serve(listener: socket.socket) -> None:
        try:
            plain, _ = listener.accept()
            plain.settimeout(20)
            with server.wrap_socket(plain, server_side=True) as secured:
                seen.append(secured.getpeercert())
                secured.sendall(secured.recv(5))
        except (ssl.SSLError, OSError) as error:
            seen.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=20) as plain,
                client.wrap_socket(plain, server_hostname=host) as secured,
            ):
                secured.sendall(b"hello")
                if secured.recv(5) != b"hello":
                    raise ssl.SSLError("the server closed the connection")
        except (ssl.SSLError, OSError) as error:
            return error
        finally:
            thread.join(30)
    return seen[0]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert (
        init(folder, "--host", "broker.example.com", "--host", "10.0.0.7", "--client", "worker").status == 0
    )
    return folder


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "broker.example.com", "10.0.0.7"])
def test_both_sides_know_each_other(certs: Path, host: str) -> None:
    seen = connected(server_context(certs), client_context(certs, certs, "client-worker"), host)
    assert isinstance(seen, dict), seen
    assert seen["subjectAltName"] == (("DNS", "worker"),)


def test_who_is_not_of_this_authority_gets_nowhere(certs: Path, tmp_path: Path) -> None:
    init(tmp_path, "--client", "worker")
    server = server_context(certs)
    of_another = client_context(certs, tmp_path, "client-worker")
    refused = {
        "a name that the server does not have": (
            server,
            client_context(certs, certs, "client-worker"),
            "evil",
        ),
        "no certificate": (server, client_context(certs), "localhost"),
        "another authority's client": (server, of_another, "localhost"),
        "another authority's server": (server_context(tmp_path), of_another, "localhost"),
        "a server's certificate as a client's": (server, client_context(certs, certs, "server"), "localhost"),
    }
    for case, (serving, client, host) in refused.items():
        assert isinstance(connected(serving, client, host), OSError), case


# -- a broker


class Secured(Broker):
    """The broker that the printed command starts, on ports of the system's choice."""

    def __init__(self, command: str, folder: Path) -> None:
        line = command.replace("0.0.0.0:7400", "127.0.0.1:0 --json --http-listen 127.0.0.1:0")
        self.process = subprocess.Popen(
            words(line), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            pytest.fail(f"the broker did not start: {self.stop()}")
        self.ready = json.loads(answer)
        self.port = self.ready["listen"].rpartition(":")[2]


def words(command: str) -> list[str]:
    """What a shell makes of a printed command: variables, then the program."""
    at = shlex.split(command)
    program = at.index("tailrace")
    return ["env", *at[:program], *RUN, *at[program + 1 :]]


def test_the_printed_commands_work_one_after_the_other(tmp_path: Path) -> None:
    (told,) = init(tmp_path / "certs", "--client", "shop", "--client", "acme/worker", "--json").rows
    with Secured(told["serve"], tmp_path) as broker:

        def run_printed(command: str) -> subprocess.CompletedProcess[str]:
            token = (tmp_path / "data" / "admin.token").read_text(encoding="utf-8").strip()
            line = command.replace(":7400", f":{broker.port}").replace("$(cat data/admin.token)", token)
            return subprocess.run(
                [*words(line), "--json"], env=environment(), capture_output=True, text=True, timeout=60
            )

        unknown = run_printed(told["connect"][0])
        assert unknown.returncode == EDGES["unauthenticated"].exit, unknown.stderr
        no_tenant = run_printed(told["know"][1])
        assert "there is no tenant 'acme'" in no_tenant.stderr
        added = run_printed(told["know"][0])
        assert added.returncode == 0, added.stderr
        known = run_printed(told["connect"][0])
        assert known.returncode == 0, known.stderr
        caller = json.loads(known.stdout)
        assert (caller["user"], caller["proof"], caller["credential"]) == ("shop", "certificate", "DNS:shop")
        status, err = broker.stop()
        assert (status, "Traceback" in err) == (0, False), err
