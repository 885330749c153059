"""Keys and certificates of one control plane, made for each start and gone with its folder."""

import datetime as dt
import ipaddress
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

MASTERS = "system:masters"
"""The group that the API server does not authorize."""
_LIFE = dt.timedelta(days=2)
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


class Credentials:
    """An authority in its own folder, and its certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._signer = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject("control plane of a test")
        self._clients: dict[tuple[str, ...], Pair] = {}
        self.authority = folder / "ca.crt"
        ca = x509.BasicConstraints(ca=True, path_length=None)
        signed = self._builder(self._name, self._signer.public_key()).add_extension(ca, critical=True)
        self.authority.write_bytes(_pem(signed.sign(self._signer, hashes.SHA256())))

    def server(self, name: str, *hosts: str) -> Pair:
        """For a server on loopback that is also called by `hosts`, which are names and addresses."""
        alternatives = x509.SubjectAlternativeName(
            [_alternative(host) for host in dict.fromkeys(("localhost", "127.0.0.1", *hosts))]
        )
        return self._issue(name, _subject(name), _SERVER, alternatives)

    def client(self, user: str, *groups: str) -> Pair:
        """For a user as the API server knows users: a common name, and an organization for each group.

        Issued once: a reader of the two files during a rewrite would get a key that does not fit.
        """
        key = (user, *groups)
        if key not in self._clients:
            self._clients[key] = self._issue(
                f"client-{user.replace(':', '-')}", _subject(user, *groups), _CLIENT
            )
        return self._clients[key]

    def kubeconfig(self, url: str, user: str, *groups: str) -> Path:
        """A client configuration with a certificate for `user`."""
        pair = self.client(user, *groups)
        return self._save(
            url, user, {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        )

    def kubeconfig_of_token(self, url: str, name: str, token: str) -> Path:
        """A client configuration with a bearer token."""
        return self._save(url, name, {"token": token})

    @cached_property
    def service_accounts(self) -> Pair:
        """The key that signs service account tokens, and (as `certificate`) its public half."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Pair(self._folder / "service-accounts.pub", self._folder / "service-accounts.key")
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        pair.certificate.write_bytes(public)
        _save_key(pair.key, key)
        return pair

    def _save(self, url: str, user: str, credentials: dict[str, str]) -> Path:
        file = self._folder / f"{user.replace(':', '-')}.kubeconfig"
        cluster = {"server": url, "certificate-authority": str(self.authority)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        file.touch(mode=0o600)
        file.write_text(json.dumps(document))
        return file

    def _issue(
        self,
        name: str,
        subject: x509.Name,
        usage: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None = None,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(subject, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(_pem(builder.sign(self._signer, hashes.SHA256())))
        _save_key(pair.key, key)
        return pair

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - dt.timedelta(hours=1)).not_valid_after(now + _LIFE)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _subject(name: str, *groups: str) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _save_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    file.touch(mode=0o600)
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
