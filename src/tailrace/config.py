"""Configuration of a broker: a TOML file, the environment and flags; every problem is reported at once.

A later source wins: built-in default < file < environment < flag. `load` checks every value of every source
(so a mistake is reported even where something else overrides it) and raises one `InvalidRequest` that lists
all problems, each with its source: the line of the file, the name of the variable or the flag.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import parse_options
from tailrace.errors import InvalidRequest
from tailrace.protocols.native import Limits
from tailrace.protocols.tls import CLIENT_CERTIFICATES, TlsOptions, tls_problem

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

LOG_LEVELS = ("debug", "info", "warning", "error")
UNIX = "unix:"
UNIX_PATH_BYTES_MAX = 107
"""What the address of a socket has room for."""

Place = tuple[str, int] | str
"""Where to listen: host and port, or the path of a Unix socket."""


class Storage(msgspec.Struct, frozen=True):
    """Options of storage on disk."""

    segment_bytes: int = 64 * MIB
    storage_threads: int = 8
    scrub_period_hours: int = 168
    free_bytes_low: int = 1 * GIB


class AuditFiles(msgspec.Struct, frozen=True):
    """Options of the audit log."""

    bytes_max: int = 10 * MIB
    files_max: int = 5


class ServerOptions(msgspec.Struct, frozen=True):
    """All options of a broker."""

    data: str = "./data"
    listen: str = "127.0.0.1:7400"
    http_listen: str = "127.0.0.1:7480"
    log_level: str = "info"
    insecure: bool = False
    tls: TlsOptions = TlsOptions()
    limits: Limits = Limits()
    storage: Storage = Storage()
    audit: AuditFiles = AuditFiles()
    topic_defaults: dict[str, Any] = {}


TABLES: dict[str, type[msgspec.Struct]] = {
    "tls": TlsOptions,
    "limits": Limits,
    "storage": Storage,
    "audit": AuditFiles,
}

WORDS: dict[str, tuple[str, ...]] = {
    "log_level": LOG_LEVELS,
    "tls.client_certificates": CLIENT_CERTIFICATES,
}

RANGES: dict[str, tuple[int, int]] = {
    "limits.connections_max": (1, 1_000_000),
    "limits.frame_bytes_max": (64 * KIB, 64 * MIB),
    "limits.in_flight_bytes_max": (1 * MIB, 64 * GIB),
    "limits.connection_in_flight_bytes_max": (64 * KIB, 64 * GIB),
    "limits.idle_ms": (1_000, 86_400_000),
    "limits.drain_ms": (0, 600_000),
    "storage.segment_bytes": (1 * MIB, 4 * GIB),
    "storage.storage_threads": (1, 64),
    "storage.scrub_period_hours": (0, 8760),
    "storage.free_bytes_low": (0, 1024 * GIB),
    "audit.bytes_max": (64 * KIB, 1 * GIB),
    "audit.files_max": (1, 1_000),
}

# Variables that are no options of the broker: the client's address and what it proves itself with, the path
# of the file, and the variables that Kubernetes sets in every pod of a namespace with a service called
# "tailrace".
_NOT_OPTIONS = re.compile(
    r"TAILRACE_(URL|CONFIG|TOKEN|CA|CERT|KEY|CREDENTIALS|(SERVICE_(HOST|PORT)|PORT)(_.*)?)"
)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Given(NamedTuple):
    """One value and its source."""

    key: str
    value: Any
    source: str


def known_keys() -> dict[str, Any]:
    """Every option by its dotted name, with its default; options of topics (`topic_defaults`) are left
    out."""
    defaults = ServerOptions()
    keys: dict[str, Any] = {
        name: getattr(defaults, name)
        for name in ServerOptions.__struct_fields__
        if name not in TABLES and name != "topic_defaults"
    }
    for table, struct in TABLES.items():
        keys.update({f"{table}.{name}": getattr(struct(), name) for name in struct.__struct_fields__})
    return keys


def env_name(key: str) -> str:
    """The environment variable of a dotted name."""
    return "TAILRACE_" + key.replace(".", "_").upper()


def load(path: str | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> ServerOptions:
    """Load the options of a broker. `flags` are by option name (`http_listen`); None means not given."""
    problems: list[str] = []
    given = [
        *_from_file(path, problems),
        *_from_environment(env, problems),
        *(_Given(key, value, _flag(key)) for key, value in flags.items() if value is not None),
    ]
    values = known_keys()
    sources = dict.fromkeys(values, "default")
    topic_options: list[_Given] = []
    for item in given:
        if item.key.startswith("topic_defaults."):
            topic_options.append(item._replace(key=item.key.removeprefix("topic_defaults.")))
        elif item.key not in values:
            problems.append(f"{item.source}: unknown option{_suggestion(item.key, list(values))}")
        elif problem := _problem(item.key, item.value):
            problems.append(f"{item.source}: {problem}")
        else:
            values[item.key] = item.value
            sources[item.key] = item.source
    problems += _topic_problems(topic_options)
    problems += _relations(values, sources)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listing = "".join(f"\n  - {text}" for text in problems)
        raise InvalidRequest(f"{count} in the configuration:{listing}", problems=problems)
    return _build(values, {item.key: item.value for item in topic_options})


def option_value(text: str) -> Any:
    """The value of a text, for an option whose type is not known here: JSON if it parses, else the text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; raises `InvalidRequest` if the text is malformed."""
    host, colon, port_text = text.rpartition(":")
    if not colon or not host:
        raise InvalidRequest(f"{text!r} is not HOST:PORT, such as 127.0.0.1:7400 or [::1]:7400")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidRequest(f"{text!r}: write an IPv6 address in brackets, such as [::1]:7400")
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) <= 65_535):
        raise InvalidRequest(f"{text!r}: the port must be a number from 0 to 65535")
    return host, int(port_text)


def listen_places(text: str) -> list[Place]:
    """The places of `listen`: `host:port` and `unix:PATH`, separated by commas."""
    places: list[Place] = []
    for item in text.split(","):
        item = item.strip()
        place = _unix_path(item) if item.startswith(UNIX) else split_address(item)
        if place in places and not (isinstance(place, tuple) and place[1] == 0):
            raise InvalidRequest(f"{item!r} is listed twice")
        places.append(place)
    return places


def _web_address(text: str) -> tuple[str, int]:
    if text.startswith(UNIX) or "," in text:
        raise InvalidRequest(f"{text!r}: the pages of health and metrics have one HOST:PORT")
    return split_address(text)


def _unix_path(text: str) -> str:
    path = text.removeprefix(UNIX)
    size = len(os.fsencode(path))
    if not path:
        raise InvalidRequest("'unix:' is followed by the path of the socket, such as unix:/run/tailrace.sock")
    if size > UNIX_PATH_BYTES_MAX:
        raise InvalidRequest(
            f"the path of a Unix socket has at most {UNIX_PATH_BYTES_MAX} bytes, {path!r} has {size}"
        )
    return path


def exposed(options: ServerOptions) -> list[str]:
    """The addresses among `listen` and `http_listen` that other machines can reach."""
    hosts = [place[0] for place in listen_places(options.listen) if isinstance(place, tuple)]
    hosts.append(split_address(options.http_listen)[0])
    return [host for host in dict.fromkeys(hosts) if _outside(_resolved(host))]


def to_toml(options: ServerOptions) -> str:
    """Write the options as a configuration file that gives the same options again."""
    tables = msgspec.to_builtins(options)
    lines = [f"{key} = {_toml_value(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict) and table:
            # TOML has no null; a topic option that is None is the default anyway.
            rows = [f"{key} = {_toml_value(value)}" for key, value in table.items() if value is not None]
            lines += ["", f"[{name}]", *rows]
    return "\n".join(lines) + "\n"


def _build(values: Mapping[str, Any], topic_defaults: dict[str, Any]) -> ServerOptions:
    tables: dict[str, Any] = {
        table: struct(**{name: values[f"{table}.{name}"] for name in struct.__struct_fields__})
        for table, struct in TABLES.items()
    }
    plain = {key: value for key, value in values.items() if "." not in key}
    return ServerOptions(**plain, **tables, topic_defaults=topic_defaults)


# ------------------------------------------------------------------------------------------------ sources


def _from_file(path: str | None, problems: list[str]) -> list[_Given]:
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(f"{path}: {reason}")
        return []
    given = []
    tables = {*TABLES, "topic_defaults"}
    for name, value in document.items():
        where = _place(path, text, "", name)
        if name in tables and isinstance(value, dict):
            given += [
                _Given(f"{name}.{key}", item, _place(path, text, name, key)) for key, item in value.items()
            ]
        elif name in tables:
            problems.append(f"{where}: {name} is a table, write [{name}]")
        elif isinstance(value, dict):
            problems.append(f"{where}: unknown table{_suggestion(name, sorted(tables))}")
        else:
            given.append(_Given(name, value, where))
    return given


def _from_environment(env: Mapping[str, str], problems: list[str]) -> list[_Given]:
    names = {env_name(key): key for key in known_keys()}
    prefix = env_name("topic_defaults.")
    given = []
    for variable in sorted(env):
        if not variable.startswith("TAILRACE_") or _NOT_OPTIONS.fullmatch(variable):
            continue
        text = env[variable]
        if variable.startswith(prefix) and len(variable) > len(prefix):
            option = "topic_defaults." + variable.removeprefix(prefix).lower()
            given.append(_Given(option, option_value(text), variable))
        elif variable in names:
            key = names[variable]
            given.append(_Given(key, _typed(text, known_keys()[key]), variable))
        else:
            problems.append(f"{variable}: unknown variable{_suggestion(variable, list(names))}")
    return given


def _typed(text: str, default: Any) -> Any:
    """Convert a text to the type of the option. Text that does not parse stays text, and is refused later
    as a value of the wrong type.
    """
    if isinstance(default, bool):
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if isinstance(default, int) and re.fullmatch(r"-?[0-9]{1,18}", text.replace("_", "")):
        return int(text.replace("_", ""))
    return text


def _place(path: str, text: str, table: str, key: str) -> str:
    """`file:line [table] key`; without the line if the file writes the key in an unusual way."""
    name = re.escape(key)
    patterns = [rf'\s*(["\']?){name}\1\s*[=.]', rf"\s*\[+\s*{name}\s*\]"]
    dotted = re.compile(rf"\s*{re.escape(table)}\s*\.\s*{name}\s*=") if table else None
    assignment = re.compile(patterns[0] if table else "|".join(patterns))
    current = ""
    line = ""
    for number, row in enumerate(text.splitlines(), 1):
        if (current == table and assignment.match(row)) or (dotted and not current and dotted.match(row)):
            line = f":{number}"
            break
        if header := re.match(r"\s*\[+\s*([^\]\s]+)\s*\]", row):
            current = header.group(1)
            if not table and current == key:
                line = f":{number}"
                break
    return f"{path}{line} [{table}] {key}" if table else f"{path}{line} {key}"


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-").replace(".", "-")


# ------------------------------------------------------------------------------------------------- checks


def _problem(key: str, value: Any) -> str | None:
    default = known_keys()[key]
    if isinstance(default, str):
        if not isinstance(value, str):
            return f"must be text, is {_shown(value)}"
        if (not value and default) or "\0" in value:
            return "must not be empty" if not value else "must not contain a NUL byte"
        words = WORDS.get(key)
        if words is not None and value not in words:
            return f"must be one of {', '.join(words)}, is {_shown(value)}"
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else f"must be true or false, is {_shown(value)}"
    if not isinstance(value, int) or isinstance(value, bool):
        return f"must be a whole number, is {_shown(value)}"
    low, high = RANGES[key]
    if not low <= value <= high:
        return f"must be from {low} to {high}, is {value}"
    return None


def _topic_problems(given: list[_Given]) -> list[str]:
    """Problems of the topic defaults: of each option by itself or, if there are none, of all together."""
    problems = []
    for item in given:
        checked = parse_options({item.key: item.value}, "default")
        # An option that only fits together with another (durability = "memory") is judged below.
        alone = isinstance(checked, Refusal) and "does not go with" not in checked.message
        if isinstance(checked, Refusal) and alone:
            problems += [f"{item.source}: {text}" for text in checked.details["problems"]]
    if not problems:
        together = parse_options({item.key: item.value for item in given}, "default")
        if isinstance(together, Refusal):
            problems += [f"topic_defaults: {text}" for text in together.details["problems"]]
    return problems


def _relations(values: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Problems of the values in force: addresses, and options that contradict each other."""
    problems = []
    ports: dict[str, list[Place]] = {}
    tls = TlsOptions(**{name: values[f"tls.{name}"] for name in TlsOptions.__struct_fields__})
    covered = bool(tls.certificate) or values["insecure"]
    for key in ("listen", "http_listen"):
        try:
            ports[key] = [_web_address(values[key])] if key == "http_listen" else listen_places(values[key])
            hosts = [place[0] for place in ports[key] if isinstance(place, tuple)]
            found = [problem for host in hosts if (problem := _unsafe(host, covered))]
        except InvalidRequest as error:
            found = [error.message]
        problems += [f"{_named(key, sources)}: {text}" for text in found]
    web = ports.get("http_listen", [("", 0)])[0]
    if web in ports.get("listen", []) and web[1]:
        problems.append(
            f"{_named('http_listen', sources)}: is the same address as listen ({values['http_listen']})"
        )
    one, all_ = "limits.connection_in_flight_bytes_max", "limits.in_flight_bytes_max"
    if values[one] > values[all_]:
        problems.append(f"{_named(one, sources)}: is {values[one]}, above {all_} = {values[all_]}")
    if wrong := tls_problem(tls):
        option, text = wrong
        problems.append(f"{_named(f'tls.{option}', sources)}: {text}")
    return problems


def _named(key: str, sources: Mapping[str, str]) -> str:
    return f"default {key}" if sources[key] == "default" else sources[key]


def _resolved(host: str) -> list[Address]:
    """The addresses of a host; raises `InvalidRequest` if the name is not known."""
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequest(f"the host name {host!r} cannot be resolved ({reason})") from error
        return [ipaddress.ip_address(str(item[4][0]).partition("%")[0]) for item in found]


def _outside(addresses: list[Address]) -> list[Address]:
    return [address for address in addresses if not address.is_loopback]


def _unsafe(host: str, covered: bool) -> str | None:
    """Why the broker may not listen on a host; None if it may."""
    addresses = _resolved(host)
    outside = _outside(addresses)
    if outside and not covered:
        return (
            f"{host!r} ({outside[0]}) can be reached from other machines, which needs TLS: name a "
            "certificate and its key ([tls] certificate, key), or listen on 127.0.0.1; `insecure = true` "
            "allows it without, and then everybody on the way can read and change what is sent"
        )
    if all(address.version == 6 for address in addresses) and not _has_ipv6():
        return f"{host!r}: this machine has no IPv6, listen on 127.0.0.1"
    return None


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _suggestion(name: str, known: list[str]) -> str:
    """A closing phrase for an unknown name: the nearest known one, or nothing."""
    leaves = {key.rpartition(".")[2]: key for key in known}
    close = difflib.get_close_matches(name, known, 1, 0.7)
    if not close:
        close = [leaves[leaf] for leaf in difflib.get_close_matches(name.rpartition(".")[2], leaves, 1, 0.7)]
    return f", did you mean {close[0]}?" if close else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _toml_value(value: Any) -> str:
    # JSON's strings, numbers and booleans are valid TOML, except for DEL, which TOML wants escaped.
    return msgspec.json.encode(value).decode("utf-8").replace("\x7f", "\\u007f")
