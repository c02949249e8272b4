"""`tailrace user`, `token`, `tenant`, `quota` and `whoami` against a broker in the same process.

Covers `cli/access/token.py`, `cli/access/tenant.py` and `cli/access/quota.py`.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tailrace.errors import EDGES
from tests.cli.access.conftest import Local
from tests.cli.conftest import invoke

PASSWORD = b"correct horse battery\n"


def add(local: Local, name: str, *more: str) -> dict[str, object]:
    (added,) = local.rows("user", "add", name, "--password-stdin", *more, stdin=PASSWORD)
    return added


# -- users


def test_the_first_user_changes_everything_and_is_told_so(local: Local) -> None:
    done = local.run("user", "add", "anna", "--password-stdin", stdin=PASSWORD)
    assert (done.status, done.out) == (0, "user anna is added\n")
    assert "anna is the first user, and an administrator" in done.err
    assert "From now on everybody has to log in" in done.err
    assert "TAILRACE_TOKEN" in done.err
    assert "~/.config/tailrace/credentials" in done.err
    (listed,) = local.rows("user", "list")
    assert listed["administrator"] is True
    second = local.run("user", "add", "ben", "--password-stdin", stdin=PASSWORD)
    assert (second.status, second.err) == (0, "")
    assert [row["administrator"] for row in local.rows("user", "list")] == [True, False]


def test_life_of_a_user(local: Local) -> None:
    first = add(local, "anna", "--administrator")
    assert (first["first"], first["administrator"], first["has_password"]) == (True, True, True)
    added = add(local, "ben", "--team", "shop", "--team", "night", "--certificate", "DNS:ben")
    assert added["created"] is not None
    assert {name: added[name] for name in ("user", "teams", "certificates", "system_users", "first")} == {
        "user": "ben",
        "teams": ["shop", "night"],
        "certificates": ["DNS:ben"],
        "system_users": [],
        "first": False,
    }
    (altered,) = local.rows("user", "alter", "ben", "--team", "day", "--clear", "certificates")
    assert (altered["teams"], altered["certificates"], altered["has_password"]) == (["day"], [], True)
    (altered,) = local.rows("user", "alter", "ben", "--administrator", "--clear", "system-users")
    assert (altered["administrator"], altered["teams"]) == (True, ["day"])
    assert [row["user"] for row in local.rows("user", "list", "b")] == ["ben"]
    assert local.rows("user", "remove", "ben") == [{"user": "ben", "state": "removed"}]
    gone = local.run("user", "remove", "ben")
    assert gone.status == EDGES["not_found"].exit
    assert "hint: `tailrace user list` shows what is there" in gone.err


def test_users_for_people(local: Local) -> None:
    assert local.run("user", "list").err == "no users yet: whoever can connect may do everything\n"
    add(local, "anna")
    local.rows("user", "add", "worker", "--certificate", "DNS:worker", "--system-user", "daemon")
    lines = local.run("user", "list").out.splitlines()
    assert lines[0].split("  ")[0] == "USER"
    assert lines[1].split() == ["anna", "-", "yes", "yes", "-", "-"]
    assert lines[2].split() == ["worker", "-", "-", "-", "DNS:worker", "daemon"]
    assert local.run("user", "list", "x").err == "no such users\n"
    assert local.run("user", "alter", "worker", "--team", "a").out == "user worker is altered: teams\n"
    assert local.run("user", "remove", "worker").out == "user worker is removed\n"


def test_a_user_without_a_password_logs_in_by_what_else_it_has(local: Local) -> None:
    (certified,) = local.rows("user", "add", "root", "--certificate", "DNS:root")
    assert (certified["has_password"], certified["first"]) == (False, True)
    (bare,) = local.rows("user", "add", "job", "--no-password")
    assert bare["has_password"] is False
    (both,) = local.rows(
        "user", "add", "both", "--certificate", "DNS:both", "--password-stdin", stdin=PASSWORD
    )
    assert both["has_password"] is True


def test_a_first_user_who_could_not_log_in_is_refused(local: Local) -> None:
    done = local.run("user", "add", "anna", "--no-password")
    assert done.status == EDGES["invalid_request"].exit
    assert local.rows("user", "list") == []


def test_a_generated_password_is_printed_once_and_alone(local: Local) -> None:
    done = local.run("user", "add", "anna", "--generate")
    assert done.status == 0
    password = done.out.strip()
    assert len(password) == 29
    assert done.out == password + "\n"
    assert "user anna is added" in done.err
    assert password not in done.err
    (changed,) = local.rows("user", "passwd", "anna", "--generate")
    assert changed["user"] == "anna"
    assert len(changed["password"]) == 29
    assert changed["password"] != password
    assert changed["password"] not in str(local.rows("user", "list"))


def test_passwords_are_changed(local: Local) -> None:
    add(local, "anna")
    done = local.run("user", "passwd", "anna", "--password-stdin", stdin=b"another one\n")
    assert done.out == "user anna has a new password\n"
    whose = local.run("user", "passwd", "--password-stdin", stdin=b"another one\n")
    assert whose.status == EDGES["invalid_request"].exit
    assert "name the user" in whose.err
    assert local.run("user", "passwd", "ben", "--generate").status == EDGES["not_found"].exit


@pytest.mark.parametrize(
    "arguments",
    [
        ("user", "add", "anna"),
        ("user", "add", "anna", "--password-stdin", "--generate"),
        ("user", "add", "anna", "--no-password", "--generate"),
        ("user", "add", "anna", "--no-password", "--password-stdin"),
        ("user", "add", "a b", "--generate"),
        ("user", "add", "anna", "--generate", "--certificate", "worker"),
        ("user", "alter", "anna"),
        ("user", "alter", "anna", "--clear", "everything"),
        ("user", "alter", "anna", "--clear", "teams", "--team", "x"),
    ],
)
def test_what_cannot_be_meant(local: Local, arguments: tuple[str, ...]) -> None:
    done = local.run(*arguments, stdin=PASSWORD)
    assert done.status == EDGES["invalid_request"].exit, done
    assert done.out == ""
    assert local.rows("user", "list") == []


@pytest.mark.parametrize("password", [b"MARKER", b"MARKER\x00MARKER", b"MARKER\nMARKER", b"MARKER" * 500])
def test_a_password_that_is_refused_is_not_in_the_error(local: Local, password: bytes) -> None:
    for command in (("user", "add", "anna", "--password-stdin"), ("user", "passwd", "x", "--password-stdin")):
        for form in ((), ("--json",)):
            done = local.run(*command, *form, stdin=password)
            assert done.status != 0
            assert "MARKER" not in done.out + done.err


def test_a_user_that_is_there(local: Local) -> None:
    add(local, "anna")
    done = local.run("user", "add", "anna", "--password-stdin", "--json", stdin=b"MARKER-of-secret\n")
    assert done.status == EDGES["already_exists"].exit
    assert "MARKER" not in done.err
    assert "`tailrace user list` shows what is there" in done.err


def test_who_runs_the_broker_is_its_owner(local: Local) -> None:
    (caller,) = local.rows("whoami")
    assert (caller["user"], caller["proof"], caller["expires"]) == ("", "owner", None)
    done = local.run("whoami")
    assert [line.split() for line in done.out.splitlines()] == [["proof", "owner"], ["administrator", "on"]]
    assert done.err == "whoever runs the broker may do everything\n"


def test_a_lost_password_is_replaced_on_the_folder(tmp_path: Path) -> None:
    """As docs/operations.md says."""
    url = f"embedded:{tmp_path}"
    first = invoke("user", "add", "anna", "--generate", "--url", url)
    second = invoke("user", "passwd", "anna", "--generate", "--url", url)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "tailrace://anna:PASSWORD@HOST:7400" in first.err
    assert first.out != second.out
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("a*") if path.is_file())
    assert b"anna" in stored
    assert first.out.strip().encode() not in stored
    assert second.out.strip().encode() not in stored


# -- tokens


def test_a_token_is_printed_once_and_alone(local: Local) -> None:
    add(local, "anna")
    done = local.run("token", "create", "ci", "--user", "anna")
    secret = done.out.strip()
    assert done.out == secret + "\n"
    assert len(secret) > 20
    assert " " not in secret
    assert "of anna never ends" in done.err
    assert "it is not shown again" in done.err
    assert secret not in done.err
    assert secret not in str(local.rows("token", "list"))


def test_life_of_a_token(local: Local) -> None:
    add(local, "anna")
    (made,) = local.rows("token", "create", "ci", "--user", "anna", "--expires", "90d")
    assert sorted(made) == ["expires", "id", "name", "secret", "user"]
    end = datetime.fromisoformat(made["expires"])
    assert abs(end - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=10)
    at = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=0)
    (dated,) = local.rows("token", "create", "day", "--user", "anna", "--expires", at.isoformat())
    assert datetime.fromisoformat(dated["expires"]) == at
    listed = {row["id"]: row for row in local.rows("token", "list", "--user", "anna")}
    assert sorted(listed) == sorted([made["id"], dated["id"]])
    assert listed[made["id"]]["expires"] == made["expires"]
    assert "secret" not in listed[made["id"]]
    assert local.rows("token", "revoke", made["id"]) == [{"id": made["id"], "state": "revoked"}]
    assert [row["id"] for row in local.rows("token", "list")] == [dated["id"]]
    again = local.run("token", "revoke", made["id"])
    assert again.status == EDGES["not_found"].exit
    assert "`tailrace token list`" in again.err


def test_tokens_for_people(local: Local) -> None:
    assert local.run("token", "list").err == "no tokens: `tailrace token create NAME` makes one\n"
    add(local, "anna")
    (made,) = local.rows("token", "create", "ci", "--user", "anna")
    lines = local.run("token", "list").out.splitlines()
    assert lines[0].split() == ["ID", "USER", "NAME", "CREATED", "EXPIRES"]
    assert lines[1].split()[:3] == [made["id"], "anna", "ci"]
    assert lines[1].split()[-1] == "-"
    done = local.run("token", "revoke", made["id"])
    assert done.out == f"token {made['id']} is revoked\n"


@pytest.mark.parametrize(
    "expires", ["0d", "90", "tomorrow", "2001-01-01", "-1h", "9999999999d", "999999999d", ""]
)
def test_ends_that_are_none(local: Local, expires: str) -> None:
    add(local, "anna")
    done = local.run("token", "create", "ci", "--user", "anna", f"--expires={expires}")
    assert done.status == EDGES["invalid_request"].exit, done
    assert done.out == ""
    assert "Traceback" not in done.err
    assert local.rows("token", "list") == []


def test_whose_token_has_to_be_said_by_the_owner(local: Local) -> None:
    add(local, "anna")
    assert local.run("token", "create", "ci").status == EDGES["invalid_request"].exit
    assert local.run("token", "create", "ci", "--user", "nobody").status == EDGES["not_found"].exit


# -- tenants and quotas


def test_life_of_a_tenant(local: Local) -> None:
    add(local, "root")
    done = local.run("tenant", "add", "acme")
    assert done.out == "tenant acme is added\n"
    assert "tailrace user add acme/root --administrator" in done.err
    add(local, "acme/root", "--administrator")
    (row,) = local.rows("tenant", "list")
    assert (row["tenant"], row["users"]) == ("acme", 1)
    assert row["created"].endswith("Z")
    assert local.run("tenant", "list").out.splitlines()[1].split()[:2] == ["acme", "1"]
    inhabited = local.run("tenant", "remove", "acme")
    assert inhabited.status == EDGES["invalid_request"].exit
    local.rows("user", "remove", "acme/root")
    assert local.rows("tenant", "remove", "acme") == [{"tenant": "acme", "state": "removed"}]
    gone = local.run("tenant", "remove", "acme")
    assert (gone.status, "`tailrace tenant list`" in gone.err) == (EDGES["not_found"].exit, True)
    assert local.run("tenant", "list").err == "no tenants: `tailrace tenant add NAME` makes one\n"
    assert local.run("tenant", "add", "a/b").status == EDGES["invalid_request"].exit


def test_life_of_a_quota(local: Local) -> None:
    add(local, "anna")
    none = dict.fromkeys(
        (
            "connections_max",
            "requests_per_second",
            "bytes_per_second",
            "in_flight_max",
            "topics_max",
            "storage_bytes_max",
        )
    )
    (made,) = local.rows(
        "quota",
        "put",
        "user:anna",
        "--connections-max",
        "3",
        "--bytes-per-second",
        "10MiB",
        "--topics-max",
        "1",
    )
    assert made == {
        **none,
        "subject": "user:anna",
        "connections_max": 3,
        "bytes_per_second": 10 << 20,
        "topics_max": 1,
    }
    (other,) = local.rows(
        "quota", "put", "user:anna", "--requests-per-second", "7", "--storage-bytes-max", "5gib"
    )
    assert other == {
        **none,
        "subject": "user:anna",
        "requests_per_second": 7,
        "storage_bytes_max": 5 << 30,
    }
    assert local.rows("quota", "list") == [other]
    done = local.run("quota", "put", "everyone", "--in-flight-max", "100")
    assert done.out == "quota of everyone: in_flight_max = 100\n"
    lines = local.run("quota", "list").out.splitlines()
    assert lines[1].split() == ["everyone", "-", "-", "-", "100", "-", "-"]
    assert local.rows("quota", "remove", "user:anna") == [{"subject": "user:anna", "state": "removed"}]
    gone = local.run("quota", "remove", "user:anna")
    assert (gone.status, "`tailrace quota list`" in gone.err) == (EDGES["not_found"].exit, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("user:anna",),
        ("user:anna", "--connections-max", "0"),
        ("user:anna", "--bytes-per-second", "ten"),
        ("user:anna", "--bytes-per-second", "1.5MiB"),
        ("user:anna", "--bytes-per-second", "0"),
        ("user:anna", "--bytes-per-second", "9" * 18 + "TiB"),
        ("user:nobody", "--connections-max", "1"),
        ("anna", "--connections-max", "1"),
        ("address:nowhere", "--connections-max", "1"),
    ],
)
def test_quotas_that_are_none(local: Local, arguments: tuple[str, ...]) -> None:
    add(local, "anna")
    done = local.run("quota", "put", *arguments)
    assert done.status == EDGES["invalid_request"].exit, done
    assert "Traceback" not in done.err
    assert local.rows("quota", "list") == []


def test_a_quota_of_topics_says_what_helps(local: Local) -> None:
    add(local, "root")
    local.rows("tenant", "add", "acme")
    local.rows("quota", "put", "tenant:acme", "--topics-max", "1")
    assert local.run("topic", "create", "acme/a").status == 0
    done = local.run("topic", "create", "acme/b")
    assert done.status == EDGES["overloaded"].exit
    assert "tenant 'acme' is at its quota of 1 topics: delete some first" in done.err
    assert "hint: an administrator can raise the quota" in done.err
    assert "wait" not in done.err
