"""The threads of a broker, and Arrow in it, share one heap of the C library."""

import os
import platform
import subprocess
import sys

import pytest

HEAPS = """
import ctypes, sys, tempfile, threading
from pathlib import Path
from tailrace.cli.commands import serve

if sys.argv[1] == "tamed":
    serve._tame_allocators()
kept, together = [], threading.Barrier(4)

def fill():
    together.wait()
    kept.extend(bytes([number % 256]) * 2000 for number in range(2000))
    together.wait()

threads = [threading.Thread(target=fill) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as told:
    file = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(Path(told.name).read_text().count("<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives each thread a heap")
def test_all_threads_allocate_from_one_heap() -> None:
    def heaps(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True, timeout=60
        )
        return int(done.stdout)

    assert heaps("as they are") > 1
    assert heaps("tamed") == 1


POOL = """
from tailrace.cli.commands import serve
serve._tame_allocators()
import pyarrow
print(pyarrow.default_memory_pool().backend_name)
"""


def test_arrow_has_a_heap_of_its_own_unless_it_was_told_otherwise() -> None:
    def pool(**environment: str) -> str:
        given = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
        command = [sys.executable, "-c", POOL]
        done = subprocess.run(
            command, env={**given, **environment}, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    assert pool() == "jemalloc"
    assert pool(ARROW_DEFAULT_MEMORY_POOL="mimalloc") == "mimalloc"
