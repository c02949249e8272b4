"""Certificate authorities that live as long as a run or a test, and the certificates that they sign."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID_DAYS = 2
LOOPBACK = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
_PEM = serialization.Encoding.PEM


class CertificateFiles(msgspec.Struct, frozen=True):
    """Paths: the authority that others trust, and what is shown to them."""

    authority: str
    certificate: str
    key: str


class Authority:
    """An authority of its own; its files lie in one folder and begin with its name."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._stem = name
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {name}")])
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        signed = (
            self._builder(self._name, self._key.public_key(), valid_days=VALID_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(own, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(signed.public_bytes(_PEM))

    def sign(
        self, name: str, names: Sequence[x509.GeneralName] = LOOPBACK, *, valid_days: int = VALID_DAYS
    ) -> CertificateFiles:
        """A certificate with these alternative names, and its key, which is for nobody else to read."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signed = (
            self._builder(subject, key.public_key(), valid_days=valid_days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        certificate, key_path = (self._folder / f"{self._stem}-{name}{end}" for end in (".pem", ".key"))
        certificate.write_bytes(signed.public_bytes(_PEM))
        key_path.touch(mode=0o600)
        plain = serialization.NoEncryption()
        key_path.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain))
        return CertificateFiles(str(self.path), str(certificate), str(key_path))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, valid_days: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=VALID_DAYS))
            .not_valid_after(now + datetime.timedelta(days=valid_days))
        )


def make(folder: Path) -> CertificateFiles:
    """An authority, and a certificate of it for `localhost` and 127.0.0.1."""
    return Authority(folder).sign("broker")
