"""Certificates that Rackloom issues itself, and the Secrets of a ComputeDomain's IMEX daemons.

There is one certificate authority per purpose, with short-lived identities under it. The authority
outlives its identities by years, so trust does not change when an identity is renewed, at two thirds of
its life.

Each ComputeDomain has its own authority, so a daemon of one cannot connect to those of another. Its
daemons share one identity. Secrets are read by name only, since the right to list or watch them is a right to
read all of a namespace. So another object must always lead to the Secrets of a ComputeDomain:
Secrets are made once it carries our finalizer, and its DaemonSet outlives them.
"""

import base64
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import SECRET, Object, data_of, version_of
from rackloom.core.domains.snapshot import OwnedObject, owned_object

# Issuing and checking certificates.


AUTHORITY_DAYS = 3650
IDENTITY_DAYS = 30
_CLOCK_SKEW = timedelta(minutes=5)


class CertifiedKey(msgspec.Struct, frozen=True):
    """A key and the certificate for it, both PEM."""

    key: bytes
    certificate: bytes

    def __repr__(self) -> str:
        return "CertifiedKey(key=hidden)"


def new_authority(name: str, now: float) -> CertifiedKey:
    """A new certificate authority. `now` is in seconds since the epoch."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    builder = _certificate_builder(subject, subject, key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return _certified_key(key, builder.sign(key, SHA256()))


def issue_certificate(authority: CertifiedKey, dns_names: tuple[str, ...], now: float) -> CertifiedKey:
    """A new key and certificate for these names, to serve with and to connect with."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = load_pem_private_key(authority.key, password=None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise TypeError("the authority's key is none that was made here")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_names[0][:64])])
    builder = _certificate_builder(subject, issuer.subject, key.public_key(), now, IDENTITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = builder.add_extension(usage, critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False
    )
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
    )
    return _certified_key(key, builder.sign(issuer_key, SHA256()))


def is_renewal_due(certificate: bytes, now: float) -> bool:
    """Whether two thirds of a certificate's time have passed, or it cannot be read."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
    except ValueError:
        return True
    begin, end = parsed.not_valid_before_utc.timestamp(), parsed.not_valid_after_utc.timestamp()
    return now >= begin + (end - begin) * 2 / 3


def expires_at(certificate: bytes) -> float:
    """When a certificate ends, in seconds since the epoch."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def is_issued_by(certificate: bytes, authority: CertifiedKey) -> bool:
    """Whether an authority signed a certificate."""
    try:
        issuer = x509.load_pem_x509_certificate(authority.certificate)
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def is_accepted(certificate: bytes, authorities: bytes, now: float) -> bool:
    """Whether a client that trusts these authorities accepts a certificate now."""
    issuers = [issuer.public_bytes(Encoding.PEM) for issuer in x509.load_pem_x509_certificates(authorities)]
    is_trusted = any(is_issued_by(certificate, CertifiedKey(b"", issuer)) for issuer in issuers)
    return is_trusted and now < expires_at(certificate)


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, days: int
) -> x509.CertificateBuilder:
    begin = datetime.fromtimestamp(now, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - _CLOCK_SKEW)
        .not_valid_after(begin + timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _certified_key(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> CertifiedKey:
    return CertifiedKey(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate.public_bytes(Encoding.PEM),
    )


# Certificates in Secrets.


_KEY, _CERTIFICATE, _AUTHORITY = "tls.key", "tls.crt", "ca.crt"


def secret_data(identity: CertifiedKey, authorities: bytes = b"") -> dict[str, str]:
    """The data of a Secret: an identity, and the certificates of the authorities to trust."""
    parts = {_KEY: identity.key, _CERTIFICATE: identity.certificate, _AUTHORITY: authorities}
    return {name: base64.b64encode(part).decode() for name, part in parts.items() if part}


def read_secret(secret: Object) -> tuple[CertifiedKey, bytes]:
    """The identity in a Secret, and the authorities to trust. A missing part is empty."""
    data = data_of(secret)
    key, certificate, authorities = (
        base64.b64decode(data.get(name, "")) for name in (_KEY, _CERTIFICATE, _AUTHORITY)
    )
    return CertifiedKey(key, certificate), authorities


def is_valid_identity(identity: CertifiedKey, authority: CertifiedKey, now: float) -> bool:
    """Whether an authority signed the certificate, and it need not be renewed."""
    return is_issued_by(identity.certificate, authority) and not is_renewal_due(identity.certificate, now)


# The Secrets of a ComputeDomain's daemons.


CHECK_INTERVAL_SECONDS = 600.0
"""Seconds between two checks that the Secrets of a ComputeDomain exist and need no renewal."""


class DaemonCertificates:
    """Issues and renews the certificates of IMEX daemons. `wall` gives seconds since the epoch."""

    def __init__(self, api: KubeApi, wall: Callable[[], float]) -> None:
        self._api = api
        self._wall = wall
        self._checked: dict[str, float] = {}
        """By UID of the ComputeDomain, when its Secrets were last found good."""

    async def ensure(self, uid: str, namespace: str) -> None:
        """Issue missing and due Secrets, unless all was good a short time ago. Raises KubeError."""
        now = self._wall()
        if 0 <= now - self._checked.get(uid, float("-inf")) < CHECK_INTERVAL_SECONDS:
            return
        authority = await self._authority(uid, namespace)
        name = names.imex_secret_name(uid)
        held = await self._read(name, namespace)
        if held is None or not is_valid_identity(read_secret(held)[0], authority, now):
            identity = issue_certificate(authority, (names.imex_peer_name(uid),), now)
            data = secret_data(identity, authority.certificate)
            await self._write(uid, name, namespace, data, held)
        self._checked[uid] = now

    async def held(self, uid: str, namespaces: Sequence[str]) -> tuple[OwnedObject, ...]:
        """The Secrets of a ComputeDomain, in any state. Raises KubeError.

        A Secret without its UID label is not its own, even if the name fits.
        """
        self._checked.pop(uid, None)
        secret_names = (names.imex_secret_name(uid), names.imex_authority_name(uid))
        secrets = [await self._read(name, namespace) for namespace in namespaces for name in secret_names]
        owned = (owned_object(SECRET, secret) for secret in secrets if secret is not None)
        return tuple(secret for secret in owned if secret.domain == uid)

    async def _authority(self, uid: str, namespace: str) -> CertifiedKey:
        name = names.imex_authority_name(uid)
        held = await self._read(name, namespace)
        if held is not None:
            return read_secret(held)[0]
        authority = new_authority(f"imex {uid}", self._wall())
        await self._write(uid, name, namespace, secret_data(authority), None)
        return authority

    async def _read(self, name: str, namespace: str) -> Object | None:
        with suppress(NotFound):
            return await self._api.get(SECRET, name, namespace)
        return None

    async def _write(
        self, uid: str, name: str, namespace: str, data: dict[str, str], held: Object | None
    ) -> None:
        if held is not None:
            patch = {"metadata": {"resourceVersion": version_of(held)}, "data": data}
            await self._api.patch(SECRET, name, namespace, patch)
            return
        meta = {
            "name": name,
            "namespace": namespace,
            "labels": {names.COMPUTE_DOMAIN_LABEL: uid},
            "finalizers": [names.FINALIZER],
        }
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls"}
        await self._api.create(SECRET, {**secret, "metadata": meta, "data": data})
