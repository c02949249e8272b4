"""A private certificate authority in a folder: its key, a certificate for servers, one for each client.

    ca.pem, ca.key              the authority, 10 years
    server.pem, server.key      a server: localhost and the hosts that were named, 825 days
    client-NAME.pem, .key       a client, known to the broker as DNS:NAME, 825 days

All keys are on the curve P-256, all files of keys readable by their owner alone. A file that is there is
never written again: what exists is kept, what is missing is made and signed by the authority that is there.

The package `cryptography` is imported where it is needed, because the default installation lacks it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tailrace.errors import AlreadyExists, InvalidRequest, NotFound, TailraceError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName, KeyUsage, Name

AUTHORITY_LIFE = timedelta(days=3652)
LIFE = timedelta(days=825)
"""The longest that all common clients accept of a server."""
CLOCKS_DIFFER = timedelta(hours=1)
"""Certificates begin so long before they are made."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
COMMON_NAME_MAX = 64
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*")
_CLIENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


class CertificateFile(NamedTuple):
    """A certificate in the folder, and whether it was made now."""

    path: Path
    key: Path
    what: str
    """authority, server or client."""
    names: tuple[str, ...]
    ends: datetime
    made: bool


class PrivateAuthority:
    """The authority of a folder, made if the folder has none."""

    def __init__(self, folder: Path, now: datetime) -> None:
        _require_package()
        self._folder, self._now = folder, now
        self._files: list[CertificateFile] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"the folder {folder} cannot be made: {error.strerror}") from None
        self._certificate, self._key = self._authority()

    @property
    def files(self) -> list[CertificateFile]:
        """The certificates that were asked for, in this order; the authority comes first."""
        return self._files

    def server(self, hosts: list[str]) -> CertificateFile:
        """The certificate of a server, for this machine's own names and the hosts."""
        names = list(dict.fromkeys([*LOCAL_HOSTS, *map(_host, hosts)]))
        found = self._present("server", "server")
        if found is not None:
            missing = [name for name in names if name not in found.names]
            if missing:
                hint = f"remove {found.path.name} and {found.key.name} to have new ones made for all names"
                text = f"{found.path} is there, without {', '.join(missing)}"
                raise AlreadyExists(text, hint=hint)
            return self._told(found)
        return self._told(self._signed("server", "server", names))

    def client(self, name: str) -> CertificateFile:
        """The certificate of a client, whom the broker knows as `DNS:NAME`."""
        if not _CLIENT.fullmatch(name):
            raise InvalidRequest(
                f"--client: {name!r}: letters, digits, and . _ - / behind the first, 200 at most"
            )
        stem = "client-" + name.replace("/", ",")
        return self._told(self._present(stem, "client") or self._signed(stem, "client", [name]))

    def _told(self, file: CertificateFile) -> CertificateFile:
        self._files.append(file)
        return file

    def _paths(self, stem: str) -> tuple[Path, Path]:
        return self._folder / f"{stem}.pem", self._folder / f"{stem}.key"

    def _authority(self) -> tuple[Certificate, EllipticCurvePrivateKey]:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        path, key_path = self._paths("ca")
        present = self._present("ca", "authority")
        if present is None:
            return self._new_authority()
        try:
            key = load_pem_private_key(key_path.read_bytes(), None)
        except (OSError, ValueError, TypeError):
            # What the library says of a key is not told: it is a secret.
            raise InvalidRequest(f"{key_path} cannot be read as a private key without a password") from None
        certificate = _loaded(path)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
            raise InvalidRequest(f"{key_path} is not the key of {path}")
        if present.ends <= self._now:
            raise InvalidRequest(f"{path} has ended at {present.ends:%Y-%m-%d}: choose another folder")
        self._told(present)
        return certificate, key

    def _new_authority(self) -> tuple[Certificate, EllipticCurvePrivateKey]:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        # Two authorities with one name would be mistaken for each other.
        name = _name(f"Tailrace private CA {secrets.token_hex(4)}")
        ends = self._now + AUTHORITY_LIFE
        usage = _usage(signs=True)
        builder = (
            self._begun(ends)
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        certificate = builder.sign(key, hashes.SHA256())
        path, key_path = self._paths("ca")
        _write_pair(path, key_path, certificate, key)
        self._told(CertificateFile(path, key_path, "authority", (), _ends(certificate), True))
        return certificate, key

    def _signed(self, stem: str, what: str, names: list[str]) -> CertificateFile:
        """A new key and its certificate."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        signer = self._key.public_key()
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if what == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = (
            self._begun(min(self._now + LIFE, _ends(self._certificate)))
            .subject_name(_name(names[-1]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_alternative(n) for n in names]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        path, key_path = self._paths(stem)
        _write_pair(path, key_path, certificate, key)
        return CertificateFile(path, key_path, what, tuple(names), _ends(certificate), True)

    def _begun(self, ends: datetime) -> CertificateBuilder:
        from cryptography import x509

        begins = self._now - CLOCKS_DIFFER
        number = x509.random_serial_number()
        return x509.CertificateBuilder().serial_number(number).not_valid_before(begins).not_valid_after(ends)

    def _present(self, stem: str, what: str) -> CertificateFile | None:
        """The certificate that is there already; half of a pair is an error."""
        path, key_path = self._paths(stem)
        there = [found for found in (path, key_path) if found.exists() or found.is_symlink()]
        if not there:
            return None
        if len(there) == 1:
            missing = key_path if there[0] == path else path
            hint = "a key and its certificate belong together: bring the other one, or move this one away"
            raise NotFound(f"{there[0]} is there, and {missing.name} is not", hint=hint)
        certificate = _loaded(path)
        return CertificateFile(path, key_path, what, _names(certificate), _ends(certificate), False)


def _require_package() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise TailraceError(
            "the package `cryptography` makes certificates, and it is missing: install tailrace[security]",
            hint="pip install 'tailrace[security]'; certificates of any other authority do as well",
        ) from None


def _host(text: str) -> str:
    """A host as it stands in a certificate: an address in its usual form, or a name."""
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        if not _HOST.fullmatch(text):
            raise InvalidRequest(f"--host: {text!r} is not an address or a name of a host") from None
        return text.lower()


def _alternative(name: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names(certificate: Certificate) -> tuple[str, ...]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    return (*found.get_values_for_type(x509.DNSName), *addresses)


def _name(common: str) -> Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common[:COMMON_NAME_MAX])])


def _usage(*, signs: bool) -> KeyUsage:
    """What a key may be used for: those of an authority to sign certificates, others to sign handshakes."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _ends(certificate: Certificate) -> datetime:
    return certificate.not_valid_after_utc.astimezone(UTC)


def _loaded(path: Path) -> Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as a certificate: {error}") from None


def _write_pair(path: Path, key_path: Path, certificate: Certificate, key: EllipticCurvePrivateKey) -> None:
    """Write a key and its certificate, both or none, over nothing that is there."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_new(key_path, secret, 0o600)
    try:
        _write_new(path, certificate.public_bytes(Encoding.PEM), 0o644)
    except BaseException:
        key_path.unlink()
        raise


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise AlreadyExists(f"{path} is there already") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be made: {error.strerror}") from None
    try:
        with open(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise
