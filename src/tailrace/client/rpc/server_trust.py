"""Which brokers a client trusts over TLS, and in words what is wrong with one that it does not trust.

The certificate of a broker is always checked: who signed it, the name, the time. There is no switch that
turns this off. What OpenSSL says about a certificate that fails is short, so the certificate is fetched once
more to tell its names and times; nothing is sent over that second connection.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tailrace.client.rpc.credentials import HostAccess
from tailrace.client.sdk_tuning import CERTIFICATE_NAMES_SHOWN
from tailrace.errors import InvalidRequest, TailraceError, Unauthenticated, Unavailable

_EXPIRED, _NOT_YET, _WRONG_NAME, _WRONG_IP = 10, 9, 62, 64
_UNTRUSTED = (18, 19, 20, 21)
_NO_TIME_CHECK = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME, which Python has no name for."""
_ALERTS_ABOUT_US = (
    "CERTIFICATE_REQUIRED",
    "BAD_CERTIFICATE",
    "UNKNOWN_CA",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_REVOKED",
    "CERTIFICATE_UNKNOWN",
    "UNSUPPORTED_CERTIFICATE",
    "ACCESS_DENIED",
)
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER", "UNEXPECTED_MESSAGE", "ALERT_HANDSHAKE_FAILURE")
"""What answers to a TLS greeting look like that are none; a plain port of Tailrace answers with the alert."""

_Stamp = tuple[tuple[str, int, int], ...]


class TlsContexts:
    """The TLS context of a client; made again when one of its files has changed."""

    def __init__(self) -> None:
        self._made: dict[_Stamp, ssl.SSLContext] = {}

    def context(self, access: HostAccess) -> ssl.SSLContext:
        """The context for a host; raises `InvalidRequest` for files that cannot be used."""
        stamp = tuple(_stamp(name, getattr(access, name)) for name in ("ca", "cert", "key"))
        found = self._made.get(stamp)
        if found is None:
            self._made = {stamp: (found := _context(access))}
        return found


def _stamp(name: str, path: str) -> tuple[str, int, int]:
    if not path:
        return "", 0, 0
    try:
        state = os.stat(path)
    except OSError as error:
        raise InvalidRequest(f"{name}: {path}: {error.strerror}") from None
    return path, state.st_mtime_ns, state.st_size


def _context(access: HostAccess) -> ssl.SSLContext:
    folder = bool(access.ca) and os.path.isdir(access.ca)
    try:
        context = ssl.create_default_context(
            ssl.Purpose.SERVER_AUTH,
            cafile=None if folder else access.ca or None,
            capath=access.ca if folder else None,
        )
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequest(f"ca: {access.ca} holds no certificates in PEM ({_reason(error)})") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if access.cert:
        try:
            context.load_cert_chain(access.cert, access.key or None, password=_no_passphrase)
        except ssl.SSLError as error:
            files = f"{access.cert} and {access.key}" if access.key else access.cert
            raise InvalidRequest(
                f"cert: {files}: no certificate in PEM with the key that belongs to it ({_reason(error)})"
            ) from None
        except OSError as error:
            raise InvalidRequest(f"cert: {error.strerror}: {access.cert} or {access.key}") from None
    return context


def _no_passphrase() -> str:
    raise InvalidRequest("key: it is encrypted with a passphrase; a client needs one that is not")


def _reason(error: OSError) -> str:
    """What OpenSSL says, without the place in its source."""
    return str(getattr(error, "reason", None) or error.strerror or error).lower().replace("_", " ")


async def presented(host: str, port: int) -> Mapping[str, Any]:
    """The certificate that a host shows, whatever is wrong with it; empty if it cannot be had."""
    try:
        der = (await _shown(host, port, _undemanding())).getpeercert(True)
        # Python takes a certificate apart only when it was accepted: here it vouches for itself.
        context = _undemanding()
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_TIME_CHECK)
        context.load_verify_locations(cadata=der or b"")
        return (await _shown(host, port, context)).getpeercert() or {}
    except OSError:
        return {}  # What is told is what was wrong before; this would only have explained it.


def _undemanding() -> ssl.SSLContext:
    """A context for a look at a certificate that was refused: nothing is ever sent with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _shown(host: str, port: int, context: ssl.SSLContext) -> ssl.SSLObject:
    """What is known of a peer after the handshake; the connection is ended at once."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(
        asyncio.Protocol, host, port, ssl=context, server_hostname=host
    )
    known: ssl.SSLObject = transport.get_extra_info("ssl_object")
    transport.abort()
    return known


def distrust(
    error: ssl.SSLCertVerificationError, shown: Mapping[str, Any], host: str, where: str, ca: str
) -> TailraceError:
    """The error for a broker whose certificate was refused."""
    code = error.verify_code
    if code in (_WRONG_NAME, _WRONG_IP):
        names = names_of(shown)
        told = f"is for {', '.join(names[:CERTIFICATE_NAMES_SHOWN])}" if names else "has other names"
        text = f"the certificate of the broker {told}, and not for {host!r}: connect by one of its names"
    elif code == _EXPIRED:
        text = f"the certificate of the broker has expired{_time(shown, 'notAfter')}"
    elif code == _NOT_YET:
        text = f"the certificate of the broker is not valid yet{_time(shown, 'notBefore', 'before')}"
    elif code in _UNTRUSTED:
        whom = f"by none of those in {ca}" if ca else "by nobody that this machine trusts"
        cure = "pass the right one" if ca else "pass the certificate of its authority"
        by = _issuer(shown)
        text = (
            f"the certificate of the broker is signed {whom}{f', but by {by}' if by else ''}: {cure} as "
            "ca=FILE, `?ca=FILE` or TAILRACE_CA"
        )
    else:
        text = f"the certificate of the broker is refused: {error.verify_message}"
    return InvalidRequest(f"{where}: {text}")


def names_of(shown: Mapping[str, Any]) -> list[str]:
    """The names in a certificate, as Python takes it apart."""
    return [str(value) for _, value in shown.get("subjectAltName", ())]


def _time(shown: Mapping[str, Any], field: str, word: str = "on") -> str:
    if field not in shown:
        return ""
    moment = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown[field])), UTC)
    return f" {word} {moment:%Y-%m-%d %H:%M} UTC"


def _issuer(shown: Mapping[str, Any]) -> str:
    names = {str(key): str(value) for part in shown.get("issuer", ()) for key, value in part}
    return names.get("commonName") or names.get("organizationName") or ""


def handshake_error(error: ssl.SSLError, where: str, plain: str) -> TailraceError:
    """The error for a handshake that failed, but not on the certificate of the broker. `plain` is the same
    address without encryption."""
    reason = str(error.reason or "")
    if any(alert in reason for alert in _ALERTS_ABOUT_US):
        return unknown_certificate(reason, where)
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return InvalidRequest(f"{where}: the broker speaks no version of TLS from 1.2 on")
    if any(word in reason for word in _NO_TLS):
        return InvalidRequest(f"{where}: what listens there does not speak TLS; {plain} may be meant")
    return Unavailable(f"{where}: the TLS handshake failed: {_reason(error)}")


def unknown_certificate(reason: str, where: str) -> TailraceError:
    """The error for a broker that refuses the certificate of the client, or that there is none."""
    if "CERTIFICATE_REQUIRED" in reason:
        text = "the broker asks for a client certificate: pass cert=FILE and key=FILE"
    else:
        words = reason.partition("ALERT_")[2].lower().replace("_", " ")
        text = f"the broker refuses the client certificate: {words}"
    return Unauthenticated(f"{where}: {text}")


def is_about_us(error: BaseException | None) -> bool:
    """Whether an error is the broker's alert about the client's certificate."""
    reason = str(getattr(error, "reason", None) or "")
    return isinstance(error, ssl.SSLError) and any(alert in reason for alert in _ALERTS_ABOUT_US)
