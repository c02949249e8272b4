"""The first start with TLS: after any crash, the next one leaves a token in the file that works."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from tailrace.broker.access.first_administrator import NAME
from tailrace.broker.engine import Engine
from tailrace.broker.node import AUDIT_FILE, LoopHost
from tailrace.broker.runtime.clock import ManualClock
from tailrace.cluster.embedded import MemoryCoordinator
from tailrace.cluster.identity_file import (
    FILE,
    TOKEN_FILE,
    FileIdentities,
    FirstToken,
)
from tailrace.config import ServerOptions
from tailrace.core.access.tokens import fits, parse_token
from tailrace.core.model.access import Identities, User
from tailrace.errors import StorageFault
from tailrace.sim.sim_disk import Crash, SimDisk
from tailrace.storage.memory_log import MemoryStore
from tests.broker.held_engine import HeldThreads


def start(disk: SimDisk, random: Random) -> Identities:
    """A broker that speaks TLS begins on this disk; it does not come to listen."""
    engine = Engine(
        ManualClock(),
        HeldThreads(),
        {"file": MemoryStore()},
        MemoryCoordinator(),
        entropy=random.randbytes,
        identities=FileIdentities(disk),
    )
    engine.access.load(FirstToken(disk, lambda path: True))
    return engine.authority.identities


def works(disk: SimDisk, identities: Identities) -> bool:
    """Whether the token in the file is that of the administrator."""
    token = parse_token(FirstToken(disk, lambda path: True).load() or "")
    assert token is not None
    (stored,) = identities.tokens.values()
    return fits(token, stored) and identities.users[NAME].administrator and stored.user == NAME


def test_the_administrator_of_a_first_start_has_the_token_in_the_file() -> None:
    disk = SimDisk(1)
    identities = start(disk, Random(1))
    assert works(disk, identities)
    assert start(disk, Random(2)) == identities, "the next start makes nothing"


def test_after_a_crash_at_any_step_the_token_in_the_file_works() -> None:
    cuts: set[object] = set()
    for seed in range(30):
        for step in range(18):
            disk = SimDisk(seed)
            random = Random(seed)
            disk.crash_in = step
            try:
                start(disk, random)
            except Crash:
                cuts.add("cut")
            else:
                cuts.add("whole")
            disk.crash_in = None
            disk.crash()
            stored = FileIdentities(disk).load()
            cuts.add((disk.exists(TOKEN_FILE), stored is not None and bool(stored.users)))
            if stored is not None and stored.users:
                assert works(disk, stored)
            assert works(disk, start(disk, random))
    assert cuts == {"cut", "whole", (False, False), (True, False), (True, True)}


def test_a_file_that_holds_no_token_is_told() -> None:
    disk = SimDisk(1)
    FirstToken(disk, lambda path: True).save("something else")
    with pytest.raises(StorageFault, match=r"admin\.token does not hold a token"):
        start(disk, Random(1))


def test_a_folder_that_everybody_can_change_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        host = LoopHost(ServerOptions(data=str(tmp_path)))
        try:
            host.load_identities()
        finally:
            await host.close()

    asyncio.run(play())
    assert caplog.messages == []
    tmp_path.chmod(0o777)
    asyncio.run(play())
    (text,) = caplog.messages
    assert text.startswith("every user of this machine can change")


def test_a_token_is_made_on_real_disks_for_the_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "data"

    async def play(speaks_tls: bool) -> Path | None:
        host = LoopHost(ServerOptions(data=str(folder)), speaks_tls=speaks_tls)
        try:
            host.load_identities()
            return host.admin_token
        finally:
            await host.close()

    assert asyncio.run(play(False)) is None
    assert not (folder / TOKEN_FILE).exists()
    path = asyncio.run(play(True))
    assert path == folder / TOKEN_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert (folder / AUDIT_FILE).read_text().count("an administrator was made") == 1
    assert asyncio.run(play(True)) is None, "there is an administrator"
    # A crash before the administrator was stored: the token that is there counts, if nobody else can know it.
    text = path.read_text()
    for name in (FILE, "access.expected"):
        (folder / name).unlink()
    path.chmod(0o644)
    with pytest.raises(StorageFault, match="can be read by others"):
        asyncio.run(play(True))
    path.chmod(0o600)
    assert asyncio.run(play(True)) == path
    assert path.read_text() == text
    assert parse_token(text.strip()) is not None


def test_users_that_are_there_are_left_alone() -> None:
    disk = SimDisk(1)
    known = Identities(users={"root": User(name="root", administrator=True, password="$")})
    FileIdentities(disk).save(known)
    assert start(disk, Random(1)) == known
    assert not disk.exists(TOKEN_FILE)
