"""The suite of encryption and identities: every bar has a case, and what its clients show leaves no trace."""

import os
import ssl
from pathlib import Path

import pytest

from bench import certificates
from bench.identified import address, configuration, showing
from bench.roles.logins import ASK, whole
from bench.security import BARS, SUITE
from tailrace.format.wire import PREFIX_BYTES


def test_every_bar_is_measured() -> None:
    measured = [name for case in SUITE.cases for name in case.figures]
    assert sorted(measured) == sorted(bar.name for bar in BARS)


def test_certificates_are_of_one_authority(tmp_path: Path) -> None:
    made = certificates.make(tmp_path)
    assert Path(made.key).stat().st_mode & 0o777 == 0o600
    context = ssl.create_default_context(cafile=made.authority)
    assert context.cert_store_stats()["x509_ca"] == 1
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(made.certificate, made.key)
    flag, path = configuration(tmp_path, made)
    assert flag == "--config"
    assert made.key in Path(path).read_text(encoding="utf-8")


def test_variables_are_shown_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_CA", "mine")
    with showing(ca="theirs", token="secret"):
        assert (os.environ["TAILRACE_CA"], os.environ["TAILRACE_TOKEN"]) == ("theirs", "secret")
    assert os.environ["TAILRACE_CA"] == "mine"
    assert "TAILRACE_TOKEN" not in os.environ


def test_addresses_of_all_schemes() -> None:
    assert address("tailraces://127.0.0.1:7400") == ("127.0.0.1", 7400)


@pytest.mark.parametrize("cut", [0, PREFIX_BYTES - 1, PREFIX_BYTES, len(ASK) - 1])
def test_an_answer_counts_when_all_of_it_is_there(cut: int) -> None:
    assert whole(ASK[:cut]) is None
    assert whole(ASK) == ASK[PREFIX_BYTES:]
