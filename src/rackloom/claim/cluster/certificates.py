"""Certificates that Rackloom issues itself, and the Secrets of a ComputeDomain's IMEX daemons.

There is one certificate authority per purpose, with short-lived identities under it. The authority
outlives its identities by years, so a renewal changes nobody's trust. An identity is renewed at two
thirds of its life.

Each ComputeDomain has its own authority, so a daemon of one cannot speak to those of another. Its
daemons share one identity. Secrets are read by name only, since whoever may list or watch them may read
all of a namespace. A ComputeDomain whose Secrets no other object leads to must therefore not exist:
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
from rackloom.core.domains import names
from rackloom.core.domains.snapshot import OwnedObject, owned_object
from rackloom.core.kubernetes.objects import SECRET, Object

# Issuing and checking certificates.


AUTHORITY_DAYS = 3650
IDENTITY_DAYS = 30
_CLOCK_SKEW = timedelta(minutes=5)


class CertifiedKey(msgspec.Struct, frozen=True):
    """A key and the certificate for it, both PEM."""

    key: bytes
    certificate: bytes

    def __repr__(self) -> str:
        return "Identity(key=hidden)"


def new_authority(name: str, now: float) -> CertifiedKey:
    """A certificate authority of its own. `now` is in seconds since the epoch."""
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
    builder = builder.add_extension(_client_and_server_usage(), critical=False)
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


def _client_and_server_usage() -> x509.ExtendedKeyUsage:
    return x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


def _certified_key(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> CertifiedKey:
    return CertifiedKey(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate.public_bytes(Encoding.PEM),
    )


# The Secrets of a ComputeDomain's daemons.


CHECK_INTERVAL_SECONDS = 600.0
"""Seconds between two looks whether the Secrets of a ComputeDomain are there, and young enough."""
_KEY, _CERTIFICATE, _AUTHORITY = "tls.key", "tls.crt", "ca.crt"


class DaemonCertificates:
    """Issues and renews. `wall` gives seconds since the epoch."""

    def __init__(self, api: KubeApi, wall: Callable[[], float]) -> None:
        self._api = api
        self._wall = wall
        self._looked: dict[str, float] = {}
        """When the Secrets of a ComputeDomain were last seen to be good, by UID."""

    async def ensure(self, uid: str, namespace: str) -> None:
        """Make what is missing or too old, unless all was well `CHECK_INTERVAL` ago. Raises KubeError."""
        now = self._wall()
        if 0 <= now - self._looked.get(uid, float("-inf")) < CHECK_INTERVAL_SECONDS:
            return
        authority = await self._authority(uid, namespace)
        name = names.imex_secret_name(uid)
        held = await self._read(name, namespace)
        if held is None or not self._is_good(held, authority):
            identity = issue_certificate(authority, (names.imex_peer_name(uid),), now)
            data = _secret_data(identity) | {_AUTHORITY: base64.b64encode(authority.certificate).decode()}
            await self._write(uid, name, namespace, data, held)
        self._looked[uid] = now

    async def held(self, uid: str, namespaces: Sequence[str]) -> tuple[OwnedObject, ...]:
        """The Secrets of a ComputeDomain that there are, in whatever state. Raises KubeError.

        One that does not carry its UID belongs to another, whatever the name says.
        """
        self._looked.pop(uid, None)
        wanted = (names.imex_secret_name(uid), names.imex_authority_name(uid))
        found = [await self._read(name, namespace) for namespace in namespaces for name in wanted]
        things = (owned_object(SECRET, secret) for secret in found if secret is not None)
        return tuple(secret for secret in things if secret.domain == uid)

    async def _authority(self, uid: str, namespace: str) -> CertifiedKey:
        name = names.imex_authority_name(uid)
        held = await self._read(name, namespace)
        if held is not None:
            return _identity_of(held)
        made = new_authority(f"imex {uid}", self._wall())
        await self._write(uid, name, namespace, _secret_data(made), None)
        return made

    async def _read(self, name: str, namespace: str) -> Object | None:
        with suppress(NotFound):
            return await self._api.get(SECRET, name, namespace)
        return None

    def _is_good(self, held: Object, authority: CertifiedKey) -> bool:
        certificate = _identity_of(held).certificate
        return is_issued_by(certificate, authority) and not is_renewal_due(certificate, self._wall())

    async def _write(
        self, uid: str, name: str, namespace: str, data: dict[str, str], held: Object | None
    ) -> None:
        if held is not None:
            version = {"resourceVersion": held["metadata"]["resourceVersion"]}
            await self._api.patch(SECRET, name, namespace, {"metadata": version, "data": data})
            return
        meta = {
            "name": name,
            "namespace": namespace,
            "labels": {names.COMPUTE_DOMAIN_LABEL: uid},
            "finalizers": [names.FINALIZER],
        }
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls"}
        await self._api.create(SECRET, {**secret, "metadata": meta, "data": data})


def _secret_data(identity: CertifiedKey) -> dict[str, str]:
    return {
        _KEY: base64.b64encode(identity.key).decode(),
        _CERTIFICATE: base64.b64encode(identity.certificate).decode(),
    }


def _identity_of(secret: Object) -> CertifiedKey:
    data = secret.get("data") or {}
    return CertifiedKey(base64.b64decode(data.get(_KEY, "")), base64.b64decode(data.get(_CERTIFICATE, "")))
