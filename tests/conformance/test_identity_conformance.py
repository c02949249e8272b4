"""One suite for every `IdentityStore`: what was saved last is loaded, and damage never looks like no users.

Covers `cluster/identity_file.py`.
"""

import os
from pathlib import Path

import msgspec
import pytest

from tailrace.cluster.identity_file import (
    EXPECTED,
    FILE,
    TOKEN_FILE,
    FileIdentities,
    FirstToken,
    MemoryIdentities,
)
from tailrace.core.model.access import Identities, Quota, Rule, Tenant, Token, User
from tailrace.errors import Corrupt, Full, StorageFault
from tailrace.ports import IdentityStore
from tailrace.sim.sim_disk import Crash, SimDisk
from tailrace.storage.disk import RealDisk

HASH = "$argon2id$v=19$m=8,t=1,p=1$c29tZXNhbHQ$aGFzaA"


@pytest.fixture(params=["file on a real disk", "file on a simulated disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> IdentityStore:
    if request.param == "memory":
        return MemoryIdentities()
    return FileIdentities(RealDisk(tmp_path) if "real" in request.param else SimDisk(1))


def identities(count: int) -> Identities:
    users = {f"acme/{n}": User(name=f"acme/{n}", password=HASH, teams=("a", "b")) for n in range(count)}
    tokens = {
        str(n): Token(id=str(n), user=f"acme/{n}", name="ci", digest="ab" * 32, created_us=n, expires_us=5)
        for n in range(count)
    }
    rules = tuple(
        Rule(id=n, effect="deny", subject="everyone", rights=("read", "publish"), resource="topic")
        for n in range(count)
    )
    quotas = {"address:*": Quota(subject="address:*", connections_max=3)} if count else {}
    tenants = {"acme": Tenant(name="acme", created_us=7)} if count else {}
    return Identities(users, tokens, rules, quotas, tenants, next_rule=count + 1, sequence=count)


def test_there_are_none_at_first(store: IdentityStore) -> None:
    assert store.load() is None


def test_what_was_saved_last_is_loaded(store: IdentityStore) -> None:
    for count in (0, 1, 40, 3):
        store.save(identities(count))
        assert store.load() == identities(count)
        assert store.load() == identities(count)


def test_what_was_saved_is_durable_and_a_save_is_whole_or_not_there() -> None:
    """Power fails at every step of the first save and of a later one, on disks that keep what they like of
    what was not synced. Once a save has returned, a lost file is noticed."""
    found = set()
    for seed in range(30):
        for before in (0, 1):
            for step in range(16):
                disk = SimDisk(seed)
                if before:
                    FileIdentities(disk).save(identities(before))
                disk.crash_in = step
                try:
                    FileIdentities(disk).save(identities(2))
                    expected = {2}
                except Crash:
                    expected = {before, 2}
                disk.crash()
                loaded = FileIdentities(disk).load()
                users = len(loaded.users) if loaded is not None else 0
                found.add((before, users))
                assert users in expected
                if users:
                    assert disk.exists(EXPECTED)
                    disk.remove(FILE)
                    with pytest.raises(Corrupt, match="is missing, and this broker had users"):
                        FileIdentities(disk).load()
    assert found == {(0, 0), (0, 2), (1, 1), (1, 2)}


def test_a_save_that_fails_changes_nothing_or_says_that_nobody_knows() -> None:
    told = set()
    for step in range(2):
        for kind in ("sync_fails_in", "write_fails_in"):
            if (kind, step) == ("write_fails_in", 1):
                continue  # There is one write.
            disk = SimDisk(step)
            store = FileIdentities(disk)
            store.save(identities(1))
            setattr(disk, kind, step)
            with pytest.raises(StorageFault) as caught:
                store.save(identities(2))
            told.add(caught.value.outcome)
            loaded = store.load()
            assert loaded is not None
            assert len(loaded.users) == 1 or caught.value.outcome == "unknown"
            store.save(identities(3))
            assert store.load() == identities(3)
    assert told == {"none", "unknown"}


def test_a_full_disk_is_told_as_such() -> None:
    disk = SimDisk(1)
    store = FileIdentities(disk)
    store.save(identities(1))
    disk.capacity = 10
    with pytest.raises(Full):
        store.save(identities(2))
    disk.capacity = None
    assert store.load() == identities(1)


@pytest.mark.parametrize("count", [1, 3])
def test_no_flipped_or_missing_byte_is_taken_for_an_answer(tmp_path: Path, count: int) -> None:
    """Neither for no users, nor for other users; and what the file holds is not in the error."""
    store = FileIdentities(RealDisk(tmp_path))
    store.save(identities(count))
    good = (tmp_path / FILE).read_bytes()
    for position in range(0, len(good), 7):
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        for bad in (bytes(flipped), good[:position]):
            (tmp_path / FILE).write_bytes(bad)
            with pytest.raises(Corrupt) as caught:
                store.load()
            assert "argon2" not in str(caught.value)
            assert caught.value.path == FILE
    (tmp_path / FILE).write_bytes(good)
    assert store.load() == identities(count)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    store = FileIdentities(RealDisk(tmp_path))
    store.save(identities(1))
    stored = msgspec.json.decode((tmp_path / FILE).read_bytes())
    (tmp_path / FILE).write_bytes(msgspec.json.encode(stored | {"version": 2}))
    with pytest.raises(Corrupt, match="version 2"):
        store.load()


def test_the_way_out_when_the_file_is_lost(tmp_path: Path) -> None:
    store = FileIdentities(RealDisk(tmp_path))
    store.save(identities(1))
    (tmp_path / FILE).unlink()
    with pytest.raises(Corrupt, match="is missing") as caught:
        store.load()
    assert f"remove {EXPECTED}" in caught.value.hint
    (tmp_path / EXPECTED).unlink()
    assert store.load() is None


def test_a_file_of_before_is_protected_by_its_next_load(tmp_path: Path) -> None:
    store = FileIdentities(RealDisk(tmp_path))
    store.save(identities(1))
    (tmp_path / EXPECTED).unlink()
    assert store.load() == identities(1)
    assert (tmp_path / EXPECTED).exists()


def test_without_users_nothing_is_expected(tmp_path: Path) -> None:
    FileIdentities(RealDisk(tmp_path)).save(Identities(tenants={"acme": Tenant(name="acme")}))
    assert not (tmp_path / EXPECTED).exists()


def test_nobody_else_may_read_the_files(tmp_path: Path) -> None:
    """Not even if somebody has put a readable file where the new one is going to be."""
    for name in (FILE, TOKEN_FILE):
        (tmp_path / f"{name}.new").write_bytes(b"here")
        (tmp_path / f"{name}.new").chmod(0o666)
    before = os.umask(0)
    try:
        FileIdentities(RealDisk(tmp_path)).save(identities(1))
        FirstToken(RealDisk(tmp_path), lambda path: True).save("trt_1_secret")
    finally:
        os.umask(before)
    for name in (FILE, EXPECTED, TOKEN_FILE):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert FirstToken(RealDisk(tmp_path), lambda path: True).load() == "trt_1_secret"


def test_the_file_of_the_first_token_is_whole_or_not_there() -> None:
    found: set[str | None] = set()
    for seed in range(20):
        for step in range(8):
            disk = SimDisk(seed)
            disk.crash_in = step
            try:
                FirstToken(disk, lambda path: True).save("trt_1_secret")
                expected: set[str | None] = {"trt_1_secret"}
            except Crash:
                expected = {"trt_1_secret", None}
            disk.crash()
            token = FirstToken(disk, lambda path: True).load()
            found.add(token)
            assert token in expected
    assert found == {"trt_1_secret", None}
