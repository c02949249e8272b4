"""The image recipe and the systemd unit give a broker no more than it needs."""

import configparser
import json
import re
import tomllib
from pathlib import Path

import pytest

from tailrace.config import env_name, known_keys

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "tailrace.service"
EXEC_FORM = ("CMD", "ENTRYPOINT", "HEALTHCHECK")
"""Instructions that name a program and its arguments, so that no shell stands in between."""
CLIENT_VARIABLES = {"TAILRACE_URL"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text), lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(name.upper(), rest) for name, _, rest in (line.partition(" ") for line in joined if line)]


def last_stage() -> dict[str, str]:
    """The instructions of the image itself, the last of each name."""
    found = instructions()
    start = max(place for place, (name, _) in enumerate(found) if name == "FROM")
    return dict(found[start:])


def test_the_image_is_made_from_a_named_release() -> None:
    images = [text.split()[0] for name, text in instructions() if name == "FROM"]
    assert len(images) == 2
    assert all(re.fullmatch(r"python:3\.\d+-slim", image) for image in images)
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "requires-python"
    ]
    assert {image.removeprefix("python:").removesuffix("-slim") for image in images} == {oldest.lstrip(">=")}


def test_nothing_runs_as_root() -> None:
    uid, _, gid = last_stage()["USER"].partition(":")
    assert int(uid) >= 10_000
    assert int(gid) >= 10_000
    run = last_stage()["RUN"]
    assert f"--uid {uid} " in run
    assert f"--gid {gid} " in run
    assert "sudo" not in run


def test_only_the_volume_is_written_to() -> None:
    stage = last_stage()
    assert json.loads(stage["VOLUME"]) == ["/data"]
    assert stage["WORKDIR"] == "/data"
    assert "--mode 0700 /data" in stage["RUN"]
    variables = environment()
    assert variables["TAILRACE_DATA"] == "/data"
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in last_stage()["ENV"].split())


def test_programs_are_started_without_a_shell() -> None:
    for name in EXEC_FORM:
        text = last_stage()[name].rpartition("CMD ")[2] if name == "HEALTHCHECK" else last_stage()[name]
        words = json.loads(text)
        assert words[0] in ("tailrace", "serve"), (name, words)
    assert "HEALTHCHECK" in last_stage()
    assert last_stage()["STOPSIGNAL"] == "SIGTERM"


def test_the_variables_of_the_image_are_options() -> None:
    known = {env_name(key) for key in known_keys()} | CLIENT_VARIABLES
    assert {name for name in environment() if name.startswith("TAILRACE_")} - known == set()


def test_only_what_is_needed_is_copied_and_nothing_secret_is_kept() -> None:
    for name, text in instructions():
        assert name != "ADD"
        assert name != "ARG", "what is given when an image is built stays in it"
        if name == "COPY":
            assert not set(text.split()) & {".", "./", "*"} - {text.split()[-1]}, text
        if name == "ENV":
            assert not re.search(r"TOKEN|PASSWORD|SECRET", text)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*", "everything is left out that is not named"


def test_pinned_packages_only_and_no_compiler() -> None:
    for name, text in instructions():
        if name == "RUN" and "pip install" in text:
            assert "--only-binary :all: -r requirements/base.lock" in text or "--no-deps" in text
            assert "--no-cache-dir" in text
        assert "apt-get" not in text


@pytest.fixture(scope="module")
def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


STRICT = {
    "CapabilityBoundingSet": "",
    "AmbientCapabilities": "",
    "LockPersonality": "true",
    "MemoryDenyWriteExecute": "true",
    "NoNewPrivileges": "true",
    "PrivateDevices": "true",
    "PrivateMounts": "true",
    "PrivateTmp": "true",
    "ProcSubset": "pid",
    "ProtectClock": "true",
    "ProtectControlGroups": "true",
    "ProtectHome": "true",
    "ProtectHostname": "true",
    "ProtectKernelLogs": "true",
    "ProtectKernelModules": "true",
    "ProtectKernelTunables": "true",
    "ProtectProc": "invisible",
    "ProtectSystem": "strict",
    "RemoveIPC": "true",
    "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    "RestrictNamespaces": "true",
    "RestrictRealtime": "true",
    "RestrictSUIDSGID": "true",
    "StateDirectoryMode": "0700",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
    "User": "tailrace",
}


def test_the_unit_is_hardened(unit: configparser.RawConfigParser) -> None:
    service = dict(unit["Service"])
    assert {name: service.get(name) for name in STRICT} == STRICT
    filters = re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(encoding="utf-8"), re.M)
    assert filters[:2] == ["@system-service", "~@privileged @resources"]
    assert "setpriority" in filters[2], "threads that hash passwords step back with it"


def test_the_unit_stops_a_broker_after_its_drain(unit: configparser.RawConfigParser) -> None:
    assert int(unit["Service"]["TimeoutStopSec"]) * 1000 > 2 * known_keys()["limits.drain_ms"]
    assert "KillSignal" not in unit["Service"], "SIGTERM is what a broker waits for"


def test_the_unit_sends_no_signal_that_ends_a_broker(unit: configparser.RawConfigParser) -> None:
    assert "ExecReload" not in unit["Service"], "a broker has no handler of SIGHUP: it would end, for good"


def test_the_unit_opens_as_many_files_as_there_may_be_connections(unit: configparser.RawConfigParser) -> None:
    assert int(unit["Service"]["LimitNOFILE"]) > 2 * known_keys()["limits.connections_max"]
