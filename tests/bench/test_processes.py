"""Child processes of a benchmark: what they say is heard, what goes wrong is told."""

from pathlib import Path

import pytest

from bench.processes import AnonymousPeak, BenchmarkFailed, Child

ECHO = "import sys\nprint('{}', flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"
GROW = """
import sys
print("{}", flush=True)
sys.stdin.readline()
held = bytearray(b"x" * 30_000_000)
print("{}", flush=True)
sys.stdin.readline()
"""


def test_lines_go_both_ways(tmp_path: Path) -> None:
    with Child("echo", ["-c", ECHO], log=tmp_path / "log") as child:
        assert child.answer(dict, 30) == {}
        child.tell('{"a": 1}')
        assert child.answer(dict[str, int], 30) == {"a": 1}
        child.tell('"text"')
        with pytest.raises(BenchmarkFailed, match="is not"):
            child.answer(int, 30)


def test_last_words_of_a_failed_child(tmp_path: Path) -> None:
    with (
        Child("failing", ["-c", "raise SystemExit('out of luck')"], log=tmp_path / "log") as child,
        pytest.raises(BenchmarkFailed, match="out of luck"),
    ):
        child.answer(dict, 30)


def test_silence_is_an_error(tmp_path: Path) -> None:
    with (
        Child("silent", ["-c", "import sys; sys.stdin.read()"], log=tmp_path / "log") as child,
        pytest.raises(BenchmarkFailed, match="no answer"),
    ):
        child.answer(dict, 0.01)


def test_peak_of_anonymous_memory(tmp_path: Path) -> None:
    with Child("growing", ["-c", GROW], log=tmp_path / "log") as child:
        child.answer(dict, 30)
        with AnonymousPeak(child.pid) as peak:
            child.tell("grow")
            child.answer(dict, 30)
        assert peak.mb >= peak.first_mb + 29
