"""Configuration: which source wins, and that every problem is told at once with its source."""

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import config
from tailrace.config import (
    RANGES,
    ServerOptions,
    env_name,
    exposed,
    known_keys,
    load,
    split_address,
    to_toml,
)
from tailrace.errors import InvalidRequest
from tailrace.protocols.native import Limits
from tests.client.rpc.certificates import Authority


def problems(path: str | None = None, env: dict[str, str] | None = None, **flags: Any) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        load(path, env or {}, flags)
    found: list[str] = caught.value.problems
    assert all(text in caught.value.message for text in found)
    return found


def file(folder: Path, text: str) -> str:
    path = folder / "tailrace.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_are_the_promised_ones() -> None:
    assert load(None, {}, {}) == ServerOptions()
    assert ServerOptions().listen == "127.0.0.1:7400"
    assert ServerOptions().limits == Limits(10_000, 64 << 20, 32 << 20, 2 << 20, 90_000, 10_000)


def test_later_sources_win(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        'data = "file"\nlog_level = "debug"\nlisten = "127.0.0.1:1"\n[limits]\nidle_ms = 2000\n'
        "[topic_defaults]\npartitions = 7\nretention_ms = 5\n",
    )
    env = {
        "TAILRACE_DATA": "env",
        "TAILRACE_LISTEN": "127.0.0.1:2",
        "TAILRACE_LIMITS_DRAIN_MS": "1_500",
        "TAILRACE_TOPIC_DEFAULTS_PARTITIONS": "8",
    }
    options = load(path, env, {"data": "flag", "http_listen": None})
    assert (options.data, options.listen, options.log_level) == ("flag", "127.0.0.1:2", "debug")
    assert (options.limits.idle_ms, options.limits.drain_ms) == (2000, 1500)
    assert options.topic_defaults == {"partitions": 8, "retention_ms": 5}


def test_every_problem_is_told_with_its_source(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        'listn = "x"\nlog_level = 3\nlimits.idle_ms = 5\n[limit]\na = 1\n\n[storage]\nsegment_bytes = "x"\n'
        "storage_treads = 3\n[topic_defaults]\npartitons = 4\ndurability = 'never'\n",
    )
    env = {"TAILRACE_LIMITS_IDLE_M": "3", "TAILRACE_LIMITS_DRAIN_MS": "soon"}
    found = problems(path, env, log_level="loud", listen="0.0.0.0:1")
    expected = [
        (f"{path}:4 limit", "did you mean limits?"),
        ("TAILRACE_LIMITS_IDLE_M", "did you mean TAILRACE_LIMITS_IDLE_MS?"),
        (f"{path}:1 listn", "did you mean listen?"),
        (f"{path}:2 log_level", "must be text, is 3"),
        (f"{path}:3 [limits] idle_ms", "must be from 1000 to 86400000, is 5"),
        (f"{path}:8 [storage] segment_bytes", "must be a whole number, is 'x'"),
        (f"{path}:9 [storage] storage_treads", "did you mean storage.storage_threads?"),
        ("TAILRACE_LIMITS_DRAIN_MS", "must be a whole number, is 'soon'"),
        ("--log-level", "must be one of debug, info, warning, error"),
        (f"{path}:11 [topic_defaults] partitons", "did you mean 'partitions'?"),
        (f"{path}:12 [topic_defaults] durability", "not 'never'"),
        ("--listen", "can be reached from other machines"),
    ]
    assert len(found) == len(expected), found
    for text, (source, what) in zip(found, expected, strict=True):
        assert text.startswith(source + ":"), text
        assert what in text, text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"data = ", "end of document"),
        (b"data = 1\n=", "line 2"),
        (b"\xff = 1", "utf-8"),
        (None, "No such file"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    (found,) = problems(str(path))
    assert found.startswith(f"{path}:")
    assert words in found


def test_topic_defaults_are_judged_together_when_each_is_right() -> None:
    env = {"TAILRACE_TOPIC_DEFAULTS_STORAGE": "memory", "TAILRACE_TOPIC_DEFAULTS_DURABILITY": "fsync"}
    (found,) = problems(env=env)
    assert "does not go with" in found
    env["TAILRACE_TOPIC_DEFAULTS_DURABILITY"] = "memory"
    assert load(None, env, {}).topic_defaults == {"storage": "memory", "durability": "memory"}


def test_variables_of_kubernetes_and_of_clients_are_not_ours() -> None:
    env = {
        "TAILRACE_PORT": "tcp://10.0.0.1:7400",
        "TAILRACE_PORT_7400_TCP_ADDR": "10.0.0.1",
        "TAILRACE_SERVICE_HOST": "10.0.0.1",
        "TAILRACE_SERVICE_PORT_HTTP": "7480",
        "TAILRACE_URL": "tailrace://x",
        "TAILRACE_CONFIG": "x.toml",
        "PATH": "/bin",
    }
    assert load(None, env, {}) == ServerOptions()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.9.10:7400", "localhost:7400"])
def test_loopback_is_accepted(address: str) -> None:
    assert load(None, {}, {"listen": address}).listen == address


def test_ipv6_loopback_where_there_is_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        assert "no IPv6" in problems(listen="[::1]:7400")[0]
    else:
        assert load(None, {}, {"listen": "[::1]:7400"}).listen == "[::1]:7400"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0.0.0.0:7400", "can be reached from other machines"),
        ("[::]:7400", "can be reached from other machines"),
        ("192.0.2.1:7400", "can be reached from other machines"),
        ("[::ffff:8.8.8.8]:7400", "can be reached from other machines"),
        ("7400", "not HOST:PORT"),
        (":7400", "not HOST:PORT"),
        ("::1:7400", "in brackets"),
        ("127.0.0.1:", "0 to 65535"),
        ("127.0.0.1:65536", "0 to 65535"),
        ("127.0.0.1:-1", "0 to 65535"),
        ("127.0.0.1:٣", "0 to 65535"),
        ("no such host.invalid:1", "cannot be resolved"),
        ("a..b:1", "cannot be resolved"),
    ],
)
def test_addresses_that_are_refused(address: str, words: str) -> None:
    (found,) = problems(listen=address)
    assert found.startswith("--listen: ")
    assert words in found


def test_several_places_to_listen() -> None:
    listen = "127.0.0.1:7400, [::1]:7401,unix:/run/tailrace.sock,127.0.0.1:0,127.0.0.1:0"
    assert config.listen_places(listen) == [
        ("127.0.0.1", 7400),
        ("::1", 7401),
        "/run/tailrace.sock",
        ("127.0.0.1", 0),
        ("127.0.0.1", 0),
    ]
    assert load(None, {}, {"listen": "unix:broker.sock"}).listen == "unix:broker.sock"


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("unix:", "followed by the path"),
        ("unix:/" + "x" * 107, "at most 107 bytes"),
        ("unix:/" + "ä" * 54, "at most 107 bytes"),
        ("127.0.0.1:1,", "not HOST:PORT"),
        ("127.0.0.1:1,127.0.0.1:1", "listed twice"),
        ("unix:a,unix:a", "listed twice"),
        ("127.0.0.1:1,0.0.0.0:2", "can be reached from other machines"),
        ("unix:a,127.0.0.1:7480", "the same address as listen"),
    ],
)
def test_places_that_are_refused(listen: str, words: str) -> None:
    (found,) = problems(listen=listen)
    assert words in found


def test_pages_have_one_address_and_no_unix_socket() -> None:
    assert "have one HOST:PORT" in problems(http_listen="unix:/run/x")[0]
    assert "have one HOST:PORT" in problems(http_listen="127.0.0.1:1,127.0.0.1:2")[0]


def test_beyond_loopback_with_tls_or_insecure_only(tmp_path: Path) -> None:
    certificate, key = map(str, Authority(tmp_path).sign("server"))
    away = {"listen": "0.0.0.0:7400", "http_listen": "[::ffff:192.0.2.1]:7480"}
    assert len(problems(**away)) == 2
    options = load(None, {}, {**away, "tls.certificate": certificate, "tls.key": key})
    assert exposed(options) == ["0.0.0.0", "::ffff:192.0.2.1"]
    assert load(None, {"TAILRACE_INSECURE": "true"}, away).insecure
    assert exposed(load(None, {}, {"listen": "unix:x,127.0.0.1:1"})) == []


def test_insecure_is_true_or_false(tmp_path: Path) -> None:
    assert load(file(tmp_path, "insecure = true\n"), {}, {}).insecure
    assert not load(file(tmp_path, "insecure = true\n"), {"TAILRACE_INSECURE": "0"}, {}).insecure
    for text in ("yes", "", "2"):
        assert "must be true or false" in problems(env={"TAILRACE_INSECURE": text})[0]
    assert "must be true or false" in problems(file(tmp_path, "insecure = 1\n"))[0]


def test_tls_problems_are_told_with_the_source_of_the_option(tmp_path: Path) -> None:
    path = file(tmp_path, '[tls]\ncertificate = "none.pem"\nkey = "none.key"\n')
    (found,) = problems(path)
    assert found.startswith(f"{path}:2 [tls] certificate: none.pem: No such file")
    (found,) = problems(env={"TAILRACE_TLS_CLIENT_CERTIFICATES": "sometimes"})
    assert "must be one of none, optional, required" in found
    (found,) = problems(**{"tls.certificate": "a.pem"})
    assert found == "default tls.key: is missing: TLS needs a certificate and its key"


def test_the_printed_configuration_names_files_and_shows_no_secret(tmp_path: Path) -> None:
    import tomllib

    certificate, key = map(str, Authority(tmp_path).sign("server"))
    options = load(None, {}, {"tls.certificate": certificate, "tls.key": key, "insecure": True})
    printed = to_toml(options)
    document = tomllib.loads(printed)
    assert document["tls"]["key"] == key
    assert document["insecure"] is True
    assert "PRIVATE" not in printed
    assert load(file(tmp_path, printed), {}, {}) == options


def test_two_listeners_need_two_addresses() -> None:
    assert "same address" in problems(listen="127.0.0.1:7480")[0]
    assert load(None, {}, {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"})


def test_one_connection_cannot_hold_more_than_all() -> None:
    (found,) = problems(env={"TAILRACE_LIMITS_IN_FLIGHT_BYTES_MAX": str(1 << 20)})
    assert "above limits.in_flight_bytes_max = 1048576" in found


@pytest.mark.parametrize("key", sorted(RANGES))
def test_bounds_of_every_number(key: str) -> None:
    low, high = RANGES[key]
    assert low <= known_keys()[key] <= high
    for value in (low - 1, high + 1, True, 1.5, "1", None):
        assert config._problem(key, value), value
    for value in (low, high):
        assert config._problem(key, value) is None


def test_every_number_has_bounds_and_every_option_a_variable() -> None:
    numbers = {key for key, default in known_keys().items() if type(default) is int}
    assert numbers == set(RANGES)
    variables = [env_name(key) for key in known_keys()]
    assert len(set(variables)) == len(variables)


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@given(
    data=text,
    level=st.sampled_from(config.LOG_LEVELS),
    idle=st.integers(*RANGES["limits.idle_ms"]),
    partitions=st.integers(1, 10_000),
)
def test_printed_configuration_reads_back(data: str, level: str, idle: int, partitions: int) -> None:
    import tomllib

    options = ServerOptions(
        data=data,
        log_level=level,
        limits=Limits(idle_ms=idle),
        topic_defaults={"partitions": partitions, "durability": "interval", "key_index": True},
    )
    document = tomllib.loads(to_toml(options))
    assert document["data"] == data
    assert document["limits"]["idle_ms"] == idle
    assert document["topic_defaults"] == options.topic_defaults


@given(st.text(max_size=30))
def test_any_address_is_split_or_refused(text: str) -> None:
    try:
        host, port = split_address(text)
    except InvalidRequest:
        return
    assert host
    assert 0 <= port <= 65_535


def test_operations_page_lists_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[1] / "docs" / "operations.md").read_text(encoding="utf-8")
    missing = [
        key
        for key, default in known_keys().items()
        if f"| `{key}` | `{default}` | `{env_name(key)}` |" not in page
    ]
    assert not missing
