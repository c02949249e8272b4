"""Unix sockets over real sockets: modes, what is in their place, who the peer is, and their end."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from tailrace.broker.runtime.clock import SystemClock
from tailrace.protocols.edge_tuning import OWNER_ONLY, WITH_GROUP
from tailrace.protocols.native import Limits, Listener
from tailrace.protocols.unix_socket import UnixSocket
from tests.protocols.test_tls import Noting, PongVerbs, greet, ping, play


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_mode_holds_whatever_the_umask_is(tmp_path: Path) -> None:
    for number, umask in enumerate((0o000, 0o077, 0o777)):
        before = os.umask(umask)
        try:
            place = UnixSocket(str(tmp_path / f"{number}"), WITH_GROUP)
        finally:
            os.umask(before)
        assert mode_of(tmp_path / f"{number}") == WITH_GROUP
        place.allow(OWNER_ONLY)
        assert mode_of(tmp_path / f"{number}") == OWNER_ONLY
        place.sock.close()


def test_a_dead_socket_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    dead = UnixSocket(str(path))
    dead.sock.close()
    living = UnixSocket(str(path))
    living.sock.listen()
    with pytest.raises(OSError, match="another process listens there") as caught:
        UnixSocket(str(path))
    assert caught.value.filename == str(path)
    dead.remove()
    assert path.exists(), "it is not the dead one's any more"
    living.remove()
    assert not path.exists()
    living.remove()
    living.sock.close()


def test_something_else_in_its_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("important")
    with pytest.raises(OSError, match="something else with that name"):
        UnixSocket(str(path))
    assert path.read_text() == "important"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="something else"):
        UnixSocket(str(link))
    with pytest.raises(OSError, match="No such file") as caught:
        UnixSocket(str(tmp_path / "none" / "socket"))
    assert caught.value.filename


def test_a_full_socket_counts_as_a_living_one(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        waiting = []
        for _ in range(5):
            peer = socket.socket(socket.AF_UNIX)
            peer.setblocking(False)
            waiting.append(peer)
            try:
                peer.connect(path)
            except BlockingIOError:
                break
        with pytest.raises(OSError, match="cannot be taken over"):
            UnixSocket(path)
        for peer in waiting:
            peer.close()


def test_the_system_tells_who_a_peer_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        noting = Noting()
        listener = Listener(PongVerbs(), SystemClock(), Limits(drain_ms=100), "node", authenticator=noting)
        path = tmp_path / "socket"
        listener.open_unix_sockets(to_group=True)
        await listener.start_unix(str(path))
        assert mode_of(path) == WITH_GROUP
        listener.open_unix_sockets(to_group=False)
        assert mode_of(path) == OWNER_ONLY
        reader, writer = await asyncio.open_unix_connection(path)
        await greet(reader, writer)
        await ping(reader, writer)
        writer.close()
        (origin,) = noting.origins
        assert (origin.uid, origin.address, origin.tls) == (os.getuid(), "", False)
        await listener.stop(0.1)
        assert not path.exists()

    play(scenario())
