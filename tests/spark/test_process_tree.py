"""Processes that a driver leaves behind are found and ended, also those in groups of their own."""

import subprocess
import sys

from tests.spark import process_tree

FAMILY = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_tree_is_seen_and_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        child = int(parent.stdout.readline())
        seen = process_tree.tree(parent.pid)
        assert [one.pid for one in seen] == [parent.pid, child]
        assert all(process_tree.alive(one) for one in seen)
        assert not process_tree.gone(seen, 0)
        process_tree.kill(seen)
        assert not any(process_tree.alive(one) for one in seen)
        assert process_tree.gone(seen, 0)
    assert parent.wait() == -9
    assert process_tree.tree(parent.pid) == []
