"""Authorities and certificates for tests: any names, any times, any signer."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
MONTH = timedelta(days=30)


class Authority:
    """Signs certificates; `path` is its own, which clients trust."""

    def __init__(self, folder: Path, name: str = "Test CA") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._builder(self._name, self._key.public_key(), -DAY, MONTH)
        certificate = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.path = folder / "ca.pem"
        signed = certificate.sign(self._key, SHA256())
        self.path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, begins: timedelta, ends: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now + begins).not_valid_after(now + ends)

    def sign(
        self,
        stem: str,
        names: Sequence[str] = ("localhost", "127.0.0.1"),
        *,
        begins: timedelta = -DAY,
        ends: timedelta = MONTH,
    ) -> tuple[Path, Path]:
        """The files of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, stem)])
        alternatives = x509.SubjectAlternativeName([_alternative(text) for text in names])
        built = self._builder(name, key.public_key(), begins, ends).add_extension(
            alternatives, critical=False
        )
        path, key_path = self._folder / f"{stem}.pem", self._folder / f"{stem}.key"
        signed = built.sign(self._key, SHA256())
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        key_path.touch(mode=0o600)
        key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *secret))
        return path, key_path


def _alternative(text: str) -> x509.GeneralName:
    """Of a host or an address, of `URI:...` or `email:...`."""
    kind, colon, rest = text.partition(":")
    if colon and kind in ("URI", "email"):
        return x509.UniformResourceIdentifier(rest) if kind == "URI" else x509.RFC822Name(rest)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def server_context(files: tuple[Path, Path], client_ca: Path | None = None) -> ssl.SSLContext:
    """What a server needs; with `client_ca` it asks clients for certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
