"""Secrets among the options of Spark: they work, in driver and workers, and no plan, error or log shows them.

Covers `spark/link.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace import sync
from tailrace.errors import InvalidRequest
from tailrace.spark.options import read_options, write_options
from tests.e2e.broker_process import BrokerProcess

PASSWORD = "hunter2-in-the-options-of-spark"


@pytest.fixture
def login(own_broker: BrokerProcess) -> Iterator[dict[str, str]]:
    """A broker with one user, a topic, and a token."""
    with sync.connect(own_broker.url) as nobody:
        nobody.admin().create_topic("t", partitions=2)
        nobody.access().add_user("root", password=PASSWORD)
    url = own_broker.url.replace("://", f"://root:{PASSWORD}@")
    with sync.connect(url) as root:
        yield {"plain": own_broker.url, "url": url, "token": root.access().create_token("spark").secret}


def told(frame: Any) -> str:
    """All that Spark says about a query."""
    execution = frame._jdf.queryExecution()
    return "\n".join(
        [execution.toString(), execution.explainString(_extended(frame)), str(frame), repr(frame)]
    )


def _extended(frame: Any) -> Any:
    mode = frame.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode
    return mode.fromString("extended")


def test_secrets_work_and_are_not_shown(
    spark: Any, login: dict[str, str], own_broker: BrokerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for given in ({"url": login["plain"], "token": login["token"]}, {"url": login["url"]}):
        rows = spark.createDataFrame([("a",), ("b",)], "value string").selectExpr(
            "cast(value as binary) value"
        )
        rows.write.format("tailrace").options(**given, topic="t").mode("append").save()
        frame = spark.read.format("tailrace").options(**given).load("t")
        assert frame.count() in (2, 4)
        shown.append(told(frame))
    for wrong in ({"token": login["token"] + "x"}, {"url": login["url"].replace(PASSWORD, PASSWORD + "x")}):
        frame = spark.read.format("tailrace").options(**{"url": login["plain"], **wrong})
        with pytest.raises(Exception, match=r"Unauthenticated|credentials") as caught:
            frame.load("t").count()
        shown.append(f"{caught.value} {caught.value!r}")
    captured = capfd.readouterr()
    written = "\n".join([*shown, captured.out, captured.err, own_broker.words()])
    assert "tailrace" in written
    assert PASSWORD not in written
    assert login["token"] not in written


def test_checked_options_hold_secrets_and_do_not_show_them() -> None:
    given = {"topic": "t", "url": f"tailraces://anna:{PASSWORD}@host", "ca": "ca.pem"}
    for options in (read_options(given), write_options(given)):
        assert PASSWORD not in f"{options} {options!r} {options.url}"
        assert (options.url.user, options.url.password, options.url.ca) == ("anna", PASSWORD, "ca.pem")
    by_token = read_options({**given, "token": "a-token"}).url
    assert (by_token.user, by_token.password, by_token.token) == ("", "", "a-token")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"url": "tailrace://host", "ca": "x"}, "ca: it is for encrypted connections"),
        ({"url": "tailraces://host", "key": "x"}, "key: cert is missing"),
        ({"url": f"embedded:./data?token={PASSWORD}"}, "takes nothing behind"),
        ({"url": "embedded:./data"}, "tailrace://host:port is needed"),
        ({"url": f"http://anna:{PASSWORD}@host"}, r"tailrace://\*\*\*@host may be meant"),
    ],
)
def test_options_that_make_no_sense_are_refused_without_secrets(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        read_options({"topic": "t", **given})
    assert PASSWORD not in caught.value.message


def test_certificates_are_read_where_they_are(tmp_path: Path) -> None:
    """The options name files, which are looked at when a process connects."""
    options = read_options({"topic": "t", "url": "tailraces://host", "cert": str(tmp_path / "missing")})
    assert options.url.cert == str(tmp_path / "missing")
