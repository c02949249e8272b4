"""TLS of the listeners: contexts made from files, which are looked at again and again, and names of peers.

A new pair of certificate and key is taken as soon as it is whole: connections that stand keep theirs, new
ones get the new one. A pair that cannot be used is told in the log once, and the old one stays. A pair is
looked at twice before it counts as broken, because its two files are replaced one after the other.

Versions are 1.2 and 1.3, with forward secrecy and authenticated encryption only. There are no session
tickets and no early data, so a recorded handshake is worth nothing, and a certificate that was replaced
ends with the connections that used it. A private key that every user of the machine may read is refused.

The beginning of a connection says what its peer speaks (`spoken`); `Tongue` has the words for those who
are at the wrong port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import stat
import time
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import msgspec

from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.format.wire import PREAMBLE, prefix
from tailrace.protocols.edge_tuning import CERTIFICATE_NAMES_MAX, CERTIFICATE_WARNING_S, TLS_HELLO_BYTES

log = logging.getLogger("tailrace.tls")

ClientCertificates = Literal["none", "optional", "required"]
CLIENT_CERTIFICATES: tuple[ClientCertificates, ...] = ("none", "optional", "required")
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2; all of TLS 1.3 are good."""
_KINDS = {"DNS": "DNS", "URI": "URI", "email": "email", "IP Address": "IP"}

_HANDSHAKE = 0x16
ALERT_PLAIN = bytes((21, 3, 1, 0, 2, 2, 40))
"""The alert `handshake_failure` for those who speak TLS to a port without it."""
ALERT_VERSION = bytes((21, 3, 1, 0, 2, 2, 70))
"""The alert `protocol_version`."""

NO_CERTIFICATE = "this broker wants to see a client certificate that its CA has signed"
"""What a client is told where one is required."""

Tongue = Literal["tls", "old tls", "native", "http", "unknown"]


class TlsOptions(msgspec.Struct, frozen=True):
    """The files of TLS, and whether clients show certificates. Without a certificate there is no TLS."""

    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    client_certificates: str = "none"


class Unusable(Exception):
    """Why a certificate or key cannot be used, and which option names it."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f"{option}: {text}")
        self.option = option
        self.text = text


class _Span(NamedTuple):
    """Whether clients take a certificate by its dates. `ends_s` is None where it is not known."""

    ends_s: float | None = None
    wrong: str = ""

    def remark(self) -> str | None:
        """What an operator has to know now."""
        if self.wrong:
            return f"clients refuse the certificate: {self.wrong}"
        if self.ends_s is None or self.ends_s - time.time() > CERTIFICATE_WARNING_S:
            return None
        day = datetime.fromtimestamp(self.ends_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
        if self.ends_s <= time.time():
            return f"clients refuse the certificate: it ended at {day}"
        return f"the certificate ends at {day}"


class _Look(NamedTuple):
    """What tells whether a file was replaced."""

    mtime_ns: int
    size: int
    inode: int


def _look(option: str, path: str) -> _Look:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise Unusable(option, f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise Unusable(option, f"{path} is not a file")
    if option == "key" and found.st_mode & stat.S_IROTH:
        raise Unusable(option, f"every user of this machine may read {path}: run `chmod o-rwx {path}`")
    return _Look(found.st_mtime_ns, found.st_size, found.st_ino)


def _no_password() -> str:
    raise ValueError("the key is encrypted, and a broker that starts by itself has nobody to ask")


def make_context(options: TlsOptions) -> ssl.SSLContext:
    """The context of the files as they are now; raises `Unusable`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    context.num_tickets = 0
    for option in ("certificate", "key"):
        _readable(option, getattr(options, option))
    try:
        context.load_cert_chain(options.certificate, options.key, _no_password)
    except ValueError as error:
        raise Unusable("key", f"{options.key}: {error}") from error
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        text = f"{options.certificate} and {options.key} are not a certificate and its key in PEM ({reason})"
        raise Unusable("certificate", text) from error
    if options.client_certificates != "none":
        _readable("client_ca", options.client_ca)
        try:
            context.load_verify_locations(options.client_ca)
        except ssl.SSLError as error:
            text = f"{options.client_ca} holds no certificates in PEM ({error.reason or error})"
            raise Unusable("client_ca", text) from error
        # Whoever shows none where one is required is told so in words, after the handshake.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


_DATES = {9: "it is not valid yet", 10: "it has expired"}
"""By the codes of OpenSSL."""
_FLIGHTS = 8
"""A handshake in memory is over after fewer exchanges."""


def _span_of(context: ssl.SSLContext, certificate: str) -> _Span:
    """The dates of a certificate, as a client sees them that knows it: by a handshake in memory, because the
    standard library reads the dates of peers only."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    peer, own = client.wrap_bio(back, there), context.wrap_bio(there, back, server_side=True)
    try:
        for side in (peer, own) * _FLIGHTS:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return _Span(None, _DATES.get(error.verify_code, ""))
    except ssl.SSLError:
        return _Span()  # Such as one that is not for servers: what clients say of it is theirs.
    found = peer.getpeercert() or {}
    return _Span(ssl.cert_time_to_seconds(str(found["notAfter"])) if "notAfter" in found else None)


def _readable(option: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise Unusable(option, f"{path}: {error.strerror}") from error


def tls_problem(options: TlsOptions) -> tuple[str, str] | None:
    """What is wrong with the options, as the name of one and a text; None if nothing is."""
    if bool(options.certificate) != bool(options.key):
        missing = "key" if options.certificate else "certificate"
        return missing, "is missing: TLS needs a certificate and its key"
    if not options.certificate and (options.client_ca or options.client_certificates != "none"):
        return "certificate", "is missing: client certificates are part of TLS"
    if bool(options.client_ca) != (options.client_certificates != "none"):
        if options.client_ca:
            text = 'is "none", and so tls.client_ca has no effect: say "optional" or "required"'
            return "client_certificates", text
        return "client_ca", "is missing: it names the certificates that sign those of clients"
    if not options.certificate:
        return None
    try:
        TlsFiles(options)
    except Unusable as error:
        return error.option, error.text
    return None


class TlsFiles:
    """The context in force, and the look of the files that it was made of."""

    def __init__(self, options: TlsOptions) -> None:
        """Load; raises `Unusable`."""
        self._options = options
        self._looks = self._look()
        self._doubtful: tuple[tuple[_Look, ...], str] | None = None
        """The trouble that was found at the last look, ..."""
        self._told: tuple[tuple[_Look, ...], str] | None = None
        """... and the one that is in the log."""
        self.context = make_context(options)
        """For new handshakes."""
        self._span = _span_of(self.context, options.certificate)
        """Its dates."""
        if remark := self._span.remark():
            log.warning("%s", remark)
        self.required = options.client_certificates == "required"
        self.reloads = 0

    def _look(self) -> tuple[_Look, ...]:
        names = ("certificate", "key") + (("client_ca",) if self._options.client_ca else ())
        return tuple(_look(name, getattr(self._options, name)) for name in names)

    @property
    def trouble(self) -> str | None:
        """Why the files as they are now cannot be used, or not much longer; None if all is well."""
        return (
            self._span.remark() if self._told is None else f"the new certificate is not used: {self._told[1]}"
        )

    def check(self) -> None:
        """Take what has replaced the files, if it can be used. Call it about once a second."""
        looks: tuple[_Look, ...] = ()
        try:
            looks = self._look()
            if looks == self._looks:
                self._doubtful = self._told = None
                return
            context = make_context(self._options)
            span = _span_of(context, self._options.certificate)
            if span.wrong and not self._span.wrong:
                raise Unusable("certificate", f"{self._options.certificate}: {span.wrong}")
        except Unusable as error:
            trouble = looks, str(error)
            if trouble == self._doubtful != self._told:
                log.error("the new certificate is not used, the old one stays: %s", error)
                self._told = trouble
            self._doubtful = trouble
            return
        self.context, self._looks, self._span = context, looks, span
        self._doubtful = self._told = None
        self.reloads += 1
        log.info("new certificate from %s", self._options.certificate)

    def lacks_certificate(self, secured: asyncio.BaseTransport) -> bool:
        """Whether a client has shown no certificate where one is required."""
        return self.required and not secured.get_extra_info("peercert")


def peer_names(certificate: Any) -> tuple[str, ...]:
    """The names of a certificate, as `SSLObject.getpeercert` gives it: `DNS:...`, `URI:...` and so on."""
    if not certificate:
        return ()
    names = certificate.get("subjectAltName", ())[:CERTIFICATE_NAMES_MAX]
    return tuple(f"{_KINDS[kind]}:{name}" for kind, name in names if kind in _KINDS)


def spoken(first: bytes) -> Tongue | None:
    """What a peer speaks that begins with these bytes; None if more are needed."""
    if not first:
        return None
    if first[0] == _HANDSHAKE:
        if len(first) < TLS_HELLO_BYTES:
            return None
        # record (type, version, length), message (type, length), version
        modern = first[1] == 3 and first[5] == 1 and (first[9], first[10]) >= (3, 3)
        return "tls" if modern else "old tls"
    if PREAMBLE.startswith(first[: len(PREAMBLE)]):
        return "native" if len(first) >= len(PREAMBLE) else None
    return "http" if first[:1].isalpha() and first[:1].isupper() else "unknown"


def begins_tls(first: Buffer) -> bool:
    """Whether a peer at a port without TLS speaks it."""
    return bytes(first[:2]) == bytes((_HANDSHAKE, 3))


def plain_answer(tongue: Tongue) -> bytes:
    """What is said to a peer that does not speak good TLS where it is needed."""
    if tongue == "native":
        words = "this port speaks TLS: connect with tailraces://, and name the broker's CA if it is your own"
        return prefix(codec.encode_reply(Refusal("invalid_request", words)), 0, 0)
    if tongue == "http":
        words = "this port speaks TLS: use https://\n"
        return (
            "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(words)}\r\nConnection: close\r\n\r\n{words}"
        ).encode("ascii")
    return ALERT_VERSION if tongue == "old tls" else b""
