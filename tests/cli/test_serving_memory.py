"""The threads of a broker share one heap of the C library."""

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
