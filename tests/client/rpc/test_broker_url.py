"""Addresses: every form is read, mistakes are told with what may be meant, and no secret is ever shown."""

from __future__ import annotations

import contextlib
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.rpc.broker_url import HostPort, is_loopback, parse_hosts, parse_url, shown
from tailrace.errors import InvalidRequest

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "kind", "fields"),
    [
        ("tailrace://host", "tcp", {"hosts": (("host", 7400),)}),
        ("tailrace://host:1/", "tcp", {"hosts": (("host", 1),)}),
        ("tailraces://a,b:2", "tls", {"hosts": (("a", 7400), ("b", 2))}),
        ("tailraces://[::1]:3,[fe80::1%25eth0]", "tls", {"hosts": (("::1", 3), ("fe80::1%eth0", 7400))}),
        ("tailrace://anna:p%40ss%3A%2F%25@host", "tcp", {"user": "anna", "password": "p@ss:/%"}),
        ("tailrace://anna:a:b/c@host", "tcp", {"user": "anna", "password": "a:b/c"}),
        ("tailrace://acme%2Fanna:x@host", "tcp", {"user": "acme/anna"}),
        ("tailrace://anna@host", "tcp", {"user": "anna", "password": ""}),
        ("tailrace://host?token=t%20t", "tcp", {"token": "t t"}),
        ("tailrace://host?token=a@b", "tcp", {"token": "a@b"}),
        ("tailraces://host/?ca=/a/b&cert=c&key=k", "tls", {"ca": "/a/b", "cert": "c", "key": "k"}),
        ("unix:/run/x.sock", "unix", {"path": "/run/x.sock"}),
        ("unix:///run/x.sock", "unix", {"path": "/run/x.sock"}),
        ("unix:./x", "unix", {"path": "./x"}),
        ("embedded:./data", "embedded", {"path": "./data"}),
        ("embedded:~/data", "embedded", {"path": "~/data"}),
        ("local:7", "local", {"path": "7"}),
        (" tailrace://host ", "tcp", {"hosts": (("host", 7400),)}),
    ],
)
def test_every_form_is_read(text: str, kind: str, fields: dict[str, object]) -> None:
    url = parse_url(text)
    assert url.kind == kind
    assert {name: getattr(url, name) for name in fields} == fields
    assert parse_url(url.spelled()) == url
    assert pickle.loads(pickle.dumps(url)) == url
    assert hash(url) == hash(parse_url(url.spelled()))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("host:7400", "tailrace://host:7400 may be meant"),
        ("localhost", "tailrace://localhost may be meant"),
        ("tailrac://host", "tailrace://host may be meant"),
        ("tailracess://host", "tailraces://host may be meant"),
        ("TAILRACES://host", "tailraces://host may be meant"),
        ("https://host:1", "tailraces://host:1 may be meant"),
        ("tls://host", "tailraces://host may be meant"),
        ("http://host", "tailrace://host may be meant"),
        ("tailrace:/host", "tailrace://host may be meant"),
        ("unx:/run/x", "unix:/run/x may be meant"),
        ("embeded:./data", "embedded:./data may be meant"),
        ("file:///data", "embedded:/data may be meant"),
        ("embedded:", "needs a folder"),
        ("unix:", "needs the path of a socket"),
        ("tailrace://", "is not host:port"),
        ("tailrace://:7400", "is not host:port"),
        ("tailrace://fe80::1", "IPv6 addresses in brackets"),
        ("tailrace://host:99999", "the port must be a number from 1 to 65535"),
        ("tailrace://host/path", "is not host:port"),
        ("tailrace://host?ca=x", "ca is for encrypted connections: tailraces://"),
        ("tailrace://host?cert=x", "cert is for encrypted connections"),
        ("tailraces://host?key=x", "key is given without cert"),
        ("tailraces://host?ca=", "ca is empty"),
        ("tailraces://host?ca=x&ca=y", "ca is given twice"),
        ("tailraces://host?cacert=x", "'cacert' is no option of an address"),
        ("tailraces://host?tokn=x", "did you mean token"),
        ("tailrace://@host", "the user is missing"),
        ("tailrace://:x@host", "the user is missing"),
        ("tailrace://anna:@host", "the password of 'anna' is empty"),
        ("tailrace://a%zz:x@host", "two hexadecimal digits"),
        ("tailrace://a%ff:x@host", "not UTF-8"),
        ("tailrace://a%00:x@host", "control character"),
        ("tailrace://host\0", "NUL"),
        ("embedded:./data?ca=x", "takes nothing behind"),
        (f"tailrace://{'a' * 2000}:x@host", "longer than 1024 bytes"),
        ("tailrace://" + ",".join(["h"] * 101), "at most 100 hosts"),
    ],
)
def test_what_cannot_be_read_is_told_with_what_may_be_meant(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_url(text)
    assert told in caught.value.message
    assert caught.value.message.startswith("url: ")


GOOD = (
    f"tailrace://anna:{SECRET}@host",
    f"tailraces://anna:{SECRET}@host:1,other:2?ca=x",
    f"tailrace://host?token={SECRET}",
)
BAD = (
    f"http://anna:{SECRET}@host",
    f"anna:{SECRET}@host",
    f"tailrace:/anna:{SECRET}@host",
    f"tailrace:anna:{SECRET}@host",
    f"tailrace://anna:{SECRET}",
    f"tailrace://anna:{SECRET}@host:port",
    f"tailrace://anna:{SECRET}@",
    f"tailrace://anna:x?{SECRET}@host",
    f"tailrace://anna:x@{SECRET}@host",
    f"tailrace://host?tokn={SECRET}",
    f"tailrace://host?{SECRET}",
    f"tailrace://host?token={SECRET}%zz",
    f"tailrace://a:b@host?token={SECRET}",
    f"tailrace://host?token={SECRET}&token={SECRET}",
    f"unix:/run/x?token={SECRET}",
    f"embedded:x?token={SECRET}",
    f"tailrac://host?token=a@{SECRET}",
    f"mysql://anna:{SECRET}@host/db?x=y",
)


@pytest.mark.parametrize("text", GOOD)
def test_an_address_shows_no_secret(text: str) -> None:
    url = parse_url(text)
    for told in (str(url), repr(url), f"{url}", shown(text), repr([url]), repr({"url": url})):
        assert SECRET not in told
    assert SECRET in url.spelled()
    assert SECRET in msgspec.json.encode(url).decode()  # It is there, for whoever has to have it.


@pytest.mark.parametrize("text", BAD)
def test_an_error_about_an_address_shows_no_secret(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_url(text)
    assert SECRET not in f"{caught.value.message} {caught.value!r} {caught.value.details}"


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)


@given(user=words, password=words)
def test_any_user_and_password_come_back(user: str, password: str) -> None:
    url = msgspec.structs.replace(parse_url("tailraces://host:1"), user=user, password=password)
    assert parse_url(url.spelled()) == url


FORMS = (
    "{s}://u:{x}@{h}",
    "{s}:u:{x}@{h}",
    "{s}://{h}?token={x}",
    "{s}://{h}?tok={x}",
    "{s}:/{h}?{x}",
    "u:{x}@{h}",
)


@given(
    form=st.sampled_from(FORMS),
    scheme=st.sampled_from(["tailrace", "tailraces", "unix", "embedded", "http", "tailrac", "redis"]),
    before=st.text("/:@?&=%,. ab", max_size=6),
    after=st.text("/:@?&=%,. ab", max_size=6),
    host=st.sampled_from(["h", "h:1", "h:port", "[::1]", "", "h/path", "a,b"]),
)
def test_no_mistake_shows_a_secret(form: str, scheme: str, before: str, after: str, host: str) -> None:
    """Whatever stands around the secret, also what should have been encoded."""
    text = form.format(s=scheme, x=f"{before}{SECRET}{after}", h=host)
    with contextlib.suppress(InvalidRequest):
        url = parse_url(text)
        if url.hosts or "@" in form:  # What stands behind `?` may belong to the path of a socket or folder.
            assert SECRET not in f"{url} {url!r}"
    try:
        parse_url(text)
    except InvalidRequest as error:
        told = error.message
    else:
        told = ""
    assert SECRET not in told, text


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    for candidate in (text, f"tailrace://{text}", f"tailraces://host?{text}", f"tailrace://u:{text}@host"):
        with contextlib.suppress(InvalidRequest):
            parse_url(candidate)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host", [("host", 7400)]),
        ("host:1, other:65535", [("host", 1), ("other", 65535)]),
        ("[::1]:9", [("::1", 9)]),
        ("[fe80::1]", [("fe80::1", 7400)]),
        ("127.0.0.1:7400", [("127.0.0.1", 7400)]),
    ],
)
def test_hosts(text: str, hosts: list[tuple[str, int]]) -> None:
    assert list(parse_hosts(text)) == hosts


NO_HOSTS = "|:7400|host:|host:0|host:65536|host:x|host:\u00b2|::1|fe80::1|[]:1|a,,b|[::1|a b|h%20|h#1"


@pytest.mark.parametrize("text", NO_HOSTS.split("|"))
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("address", "near"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
        ("fe80::1%eth0", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback(address: str, near: bool) -> None:
    assert is_loopback(address) is near


def test_hosts_are_written_as_they_are_read() -> None:
    assert str(HostPort("::1", 7)) == "[::1]:7"
    assert HostPort("LocalHost", 1).near
    assert not HostPort("127.evil.example", 1).near
