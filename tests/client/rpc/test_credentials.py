"""What a client proves itself with: which source wins, what a file must be like; nothing is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tailrace
from tailrace.client.rpc.broker_url import HostPort, parse_url
from tailrace.client.rpc.credentials import AccessSource, GivenAccess, HostAccess, check_given, read_file
from tailrace.errors import InvalidRequest
from tailrace.format.wire import Credentials

SECRET = "hunter2-in-a-file"
HOST = HostPort("host", 7400)


def credentials_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "credentials"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def access(
    url: str, env: dict[str, str] | None = None, host: HostPort | None = HOST, **given: str
) -> HostAccess:
    return AccessSource(parse_url(url), GivenAccess(**given), env or {"HOME": "/nonexistent"}).at(host)


@pytest.fixture(autouse=True)
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_the_first_source_wins(tmp_path: Path) -> None:
    path = credentials_file(tmp_path, '[host]\ntoken = "of-the-file"\nca = "/file/ca"\ncert = "/file/cert"\n')
    env = {
        "TAILRACE_CREDENTIALS": str(path),
        "TAILRACE_TOKEN": " of-the-environment\n",
        "TAILRACE_CA": "/env/ca",
        "TAILRACE_CERT": "/env/cert",
        "TAILRACE_KEY": "/env/key",
    }
    url = "tailraces://host?token=of-the-url&ca=/url/ca&cert=/url/cert&key=/url/key"
    given = {"token": "of-the-call", "ca": "/call/ca", "cert": "/call/cert", "key": "/call/key"}
    for place, found in (
        ("call", access(url, env, **given)),
        ("url", access(url, env)),
        ("env", access("tailraces://host", env)),
    ):
        names = (found.ca, found.cert, found.key)
        assert names == (f"/{place}/ca", f"/{place}/cert", f"/{place}/key")
    told = [
        (access(url, env, token="of-the-call"), "of-the-call", "the argument token"),
        (access(url, env), "of-the-url", "the url"),
        (access("tailraces://host", env), "of-the-environment", "TAILRACE_TOKEN"),
        (access("tailraces://host", {"TAILRACE_CREDENTIALS": str(path)}), "of-the-file", str(path)),
    ]
    for found, token, source in told:
        assert (found.credentials, found.source) == (Credentials(token=token), source)
    only_file = told[-1][0]
    assert (only_file.ca, only_file.cert, only_file.key) == ("/file/ca", "/file/cert", "")


def test_a_key_never_goes_with_the_certificate_of_another_source() -> None:
    env = {"TAILRACE_CERT": "/env/cert", "TAILRACE_KEY": "/env/key"}
    found = access("tailraces://host", env, cert="/call/cert")
    assert (found.cert, found.key) == ("/call/cert", "")
    with pytest.raises(InvalidRequest, match="TAILRACE_KEY: a key is given"):
        access("tailraces://host", {"TAILRACE_KEY": "/env/key"})


def test_a_user_of_the_url_may_have_the_password_in_the_file(tmp_path: Path) -> None:
    path = credentials_file(tmp_path, f'[host]\nuser = "anna"\npassword = "{SECRET}"\n')
    env = {"TAILRACE_CREDENTIALS": str(path), "TAILRACE_TOKEN": "a-token"}
    assert access("tailrace://anna@host", env).credentials == Credentials(user="anna", password=SECRET)
    with pytest.raises(InvalidRequest, match="the password of 'ben' is missing") as caught:
        access("tailrace://ben@host", env)
    assert SECRET not in caught.value.message


def test_hosts_have_tables_of_their_own(tmp_path: Path) -> None:
    path = credentials_file(
        tmp_path,
        '["host:7400"]\ntoken = "a"\n["host"]\ntoken = "b"\n[Broker.example.com]\ntoken = "c"\n'
        '["unix:/run/x"]\ntoken = "d"\n["[::1]:7400"]\ntoken = "e"\n[127.0.0.1]\ntoken = "f"\n',
    )
    env = {"TAILRACE_CREDENTIALS": str(path)}

    def token(url: str, host: HostPort | None) -> str | None:
        found = access(url, env, host).credentials
        return None if found is None else found.token

    assert token("tailrace://host", HOST) == "a"
    assert token("tailrace://host:1", HostPort("host", 1)) == "b"
    assert token("tailrace://x", HostPort("broker.EXAMPLE.com", 1)) == "c"
    assert token("unix:/run/x", None) == "d"
    assert token("tailrace://[::1]", HostPort("::1", 7400)) == "e"
    assert token("tailrace://127.0.0.1", HostPort("127.0.0.1", 7)) == "f"
    assert token("tailrace://other", HostPort("other", 7)) is None


def test_the_file_is_found_at_home_and_need_not_be_there(tmp_path: Path) -> None:
    assert access("tailrace://host", {}).credentials is None
    folder = tmp_path / "home" / ".config" / "tailrace"
    folder.mkdir(parents=True)
    credentials_file(folder, '[host]\ntoken = "t"\n')
    assert access("tailrace://host", {}).credentials == Credentials(token="t")
    with pytest.raises(InvalidRequest, match="TAILRACE_CREDENTIALS: there is no file"):
        access("tailrace://host", {"TAILRACE_CREDENTIALS": str(tmp_path / "missing")})


def test_a_new_token_in_the_file_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    path = credentials_file(tmp_path, '[host]\ntoken = "old"\n')
    source = AccessSource(parse_url("tailrace://host"), GivenAccess(), {"TAILRACE_CREDENTIALS": str(path)})
    assert source.at(HOST).credentials == Credentials(token="old")
    path.write_text('[host]\ntoken = "new"\n', encoding="utf-8")
    assert source.at(HOST).credentials == Credentials(token="new")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_read_is_refused_with_the_command_that_helps(
    tmp_path: Path, mode: int
) -> None:
    path = credentials_file(tmp_path, f'[host]\ntoken = "{SECRET}"\n', mode)
    with pytest.raises(InvalidRequest) as caught:
        read_file(str(path), must_exist=True)
    assert f"run `chmod 600 {path}`" in caught.value.message
    assert SECRET not in repr(caught.value)
    path.chmod(0o400)
    assert read_file(str(path), must_exist=True) == {"host": {"token": SECRET}}


def test_what_is_no_file_of_this_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("folder", "pipe"):
        with pytest.raises(InvalidRequest, match="is not a file"):
            read_file(str(tmp_path / name), must_exist=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f'[host]\ntokn = "{SECRET}"', "[host]: unknown key tokn, did you mean token?"),
        (
            f'[host]\ncolour = "{SECRET}"',
            "unknown key colour; there are token, user, password, ca, cert, key",
        ),
        ("[host]\ntoken = 5", "token has to be a text"),
        ('[host]\ntoken = ""', "token has to be a text that is not empty"),
        (f'[host]\ntoken = "{SECRET}"\nuser = "a"\npassword = "b"', "a user and a token are both given"),
        (f'[host]\npassword = "{SECRET}"', "user and password go together"),
        ('[host]\nuser = "a"', "user and password go together"),
        ('[host]\nkey = "a"', "key is given without cert"),
        (f'token = "{SECRET}"', "token stands outside of a table"),
        (f'[host\ntoken = "{SECRET}"', "is not TOML (at line 1"),
        (f"[host]\ntoken = {SECRET}", "is not TOML (at line 2"),
        (f'[host]\ntoken = "{SECRET} x"', "no space"),
        (f'[host]\ntoken = "{SECRET}"\n[HOST]\ntoken = "x"', "this host has two tables"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_without_its_secrets(tmp_path: Path, text: str, told: str) -> None:
    path = credentials_file(tmp_path, text)
    with pytest.raises(InvalidRequest) as caught:
        read_file(str(path), must_exist=True)
    assert told in caught.value.message
    assert str(path) in caught.value.message
    assert SECRET not in f"{caught.value!r}{caught.value.__cause__!r}{caught.value.details}"


def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path: Path) -> None:
    path = credentials_file(tmp_path, "")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_file(str(path), must_exist=True)
    path.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(InvalidRequest, match="larger than"):
        read_file(str(path), must_exist=True)


@pytest.mark.parametrize(
    ("url", "given", "told"),
    [
        ("tailrace://host", {"ca": "x"}, "ca: it is for encrypted connections"),
        ("unix:/x", {"cert": "x"}, "cert: it is for encrypted connections"),
        ("embedded:x", {"key": "x"}, "key: it is for encrypted connections"),
        ("tailraces://host", {"key": "x"}, "key: cert is missing"),
        ("tailraces://host", {"ca": ""}, "ca: it is empty"),
        ("tailraces://host", {"token": 5}, "token: a text, not int"),
        ("tailraces://host", {"token": f"{SECRET}\n"}, "no space or line break"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(url: str, given: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_given(GivenAccess(**given), parse_url(url))
    assert told in caught.value.message
    assert SECRET not in caught.value.message
    with pytest.raises(InvalidRequest, match="ca"):
        tailrace.connect("tailrace://host", ca="x")


def test_nothing_shows_a_secret() -> None:
    given = GivenAccess(token=SECRET)
    found = access("tailrace://host", {}, token=SECRET)
    client = tailrace.connect(f"tailrace://anna:{SECRET}@127.0.0.1:1", token=SECRET)
    for value in (given, found, found.credentials, client, vars(client)):
        assert SECRET not in repr(value)
