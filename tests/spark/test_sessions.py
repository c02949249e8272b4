"""Sessions: their settings by master, and what is said where Java or PySpark is missing or too old."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import InvalidRequest
from tailrace.spark import sessions


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", "1"),
        ("local[3]", "3"),
        ("local[2,3]", "2"),
        ("local[*]", str(len(os.sched_getaffinity(0)))),
        ("local-cluster[2,3,1024]", "6"),
    ],
)
def test_a_local_master_stays_on_this_machine(master: str, cores: str) -> None:
    found = sessions.settings(master)
    assert found["spark.sql.shuffle.partitions"] == cores
    assert found["spark.driver.bindAddress"] == "127.0.0.1"
    assert found["spark.sql.session.timeZone"] == "UTC"


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host:6443"])
def test_another_master_has_to_reach_the_driver(master: str) -> None:
    assert sessions.settings(master) == sessions.EVERYWHERE


def java(folder: Path, text: str) -> None:
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("""echo 'openjdk version "11.0.22" 2024-01-16' >&2""", "is 11. Spark needs Java 17"),
        ("""echo 'java version "1.8.0_402"' >&2""", "is 1. Spark needs Java 17"),
        ("echo 'no room for the heap' >&2; exit 1", "no room for the heap"),
    ],
)
def test_a_java_that_does_not_do(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java(tmp_path, text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(InvalidRequest, match=words):
        sessions.session("tests")


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"no Java by PATH.*openjdk-17-jre-headless"):
        sessions.session("tests")


def test_a_new_java_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(tmp_path, """echo 'openjdk version "21" 2023-09-19' >&2""")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    sessions.check_java()


def test_no_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(InvalidRequest, match=r"install tailrace\[spark\]"):
        sessions.session("tests")


def test_an_old_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.0.1")
    with pytest.raises(InvalidRequest, match=r"4\.0\.1 is too old, 4\.3 is needed"):
        sessions.session("tests")


def test_the_session_of_the_tests_has_the_settings(spark: Any) -> None:
    for name, value in sessions.settings("local[2]").items():
        assert spark.conf.get(name) == value
    assert spark.sparkContext.master == "local[2]"
