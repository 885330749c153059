"""The webhook's serving certificate, and the caBundle by which the API server trusts it.

The authority outlives the identities under it by years, so a renewal changes nobody's trust. When the
authority itself is renewed, the API server trusts both before anything is served from the new one.
Secrets and webhook configurations are installed with the rest and only filled in here: the right to
create such objects is not needed. A replica that was slower gets a conflict and finds the other's work
on the next attempt.
"""

import base64
from collections.abc import Callable
from typing import Any

import msgspec

from rackloom.claim.cluster.certificates import (
    CertifiedKey,
    is_issued_by,
    is_renewal_due,
    issue_certificate,
    new_authority,
)
from rackloom.claim.kube.api import KubeApi
from rackloom.core.kubernetes.objects import (
    MUTATING_WEBHOOK,
    SECRET,
    VALIDATING_WEBHOOK,
    Object,
    ResourceKind,
)

WEBHOOK_NAME = "rackloom-webhook"
"""Of the service and of both webhook configurations."""
AUTHORITY_SECRET = "rackloom-webhook-authority"  # noqa: S105
SERVING_SECRET = "rackloom-webhook-tls"  # noqa: S105
_KEY, _CERTIFICATE, _TRUSTED = "tls.key", "tls.crt", "ca.crt"


class _HeldSecret(msgspec.Struct, frozen=True):
    """A Secret of ours: what it holds, and the version that was read."""

    identity: CertifiedKey | None
    trusted: bytes
    version: str


class ServingCertificates:
    """Issues and renews. `dns_names` are those that the API server calls; `wall` is seconds since 1970."""

    def __init__(
        self, api: KubeApi, namespace: str, dns_names: tuple[str, ...], wall: Callable[[], float]
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._dns_names = dns_names
        self._wall = wall

    async def ensure(self) -> CertifiedKey:
        """The identity to serve with, after the API server was told whom to trust.

        Raises KubeError; Conflict when another replica was faster, whose work the next attempt finds.
        """
        authority, trusted = await self._authority()
        for kind in (MUTATING_WEBHOOK, VALIDATING_WEBHOOK):
            await self._have_trusted(kind, trusted)
        held = await self._read(SERVING_SECRET)
        if held.identity is not None and self._is_good(held.identity, authority):
            return held.identity
        made = issue_certificate(authority, self._dns_names, self._wall())
        await self._write(SERVING_SECRET, made, trusted, held.version)
        return made

    async def _authority(self) -> tuple[CertifiedKey, bytes]:
        held = await self._read(AUTHORITY_SECRET)
        old = held.identity
        if old is not None and not is_renewal_due(old.certificate, self._wall()):
            return old, held.trusted
        made = new_authority(WEBHOOK_NAME, self._wall())
        trusted = made.certificate + (old.certificate if old is not None else b"")
        await self._write(AUTHORITY_SECRET, made, trusted, held.version)
        return made, trusted

    def _is_good(self, identity: CertifiedKey, authority: CertifiedKey) -> bool:
        certificate = identity.certificate
        return is_issued_by(certificate, authority) and not is_renewal_due(certificate, self._wall())

    async def _have_trusted(self, kind: ResourceKind, trusted: bytes) -> None:
        found = await self._api.get(kind, WEBHOOK_NAME)
        wanted = base64.b64encode(trusted).decode()
        hooks = list(enumerate(found.get("webhooks") or ()))
        stale = [(index, hook) for index, hook in hooks if hook["clientConfig"].get("caBundle") != wanted]
        operations = tuple(
            operation for index, hook in stale for operation in _trust_operations(index, hook["name"], wanted)
        )
        if operations:
            await self._api.patch(kind, WEBHOOK_NAME, None, operations)

    async def _read(self, name: str) -> _HeldSecret:
        secret = await self._api.get(SECRET, name, self._namespace)
        data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
        version = secret["metadata"]["resourceVersion"]
        if not data.get(_KEY) or not data.get(_CERTIFICATE):
            return _HeldSecret(None, b"", version)
        return _HeldSecret(CertifiedKey(data[_KEY], data[_CERTIFICATE]), data.get(_TRUSTED, b""), version)

    async def _write(self, name: str, identity: CertifiedKey, trusted: bytes, version: str) -> None:
        held = {_KEY: identity.key, _CERTIFICATE: identity.certificate, _TRUSTED: trusted}
        data = {key: base64.b64encode(value).decode() for key, value in held.items()}
        patch: Object = {"metadata": {"resourceVersion": version}, "data": data}
        await self._api.patch(SECRET, name, self._namespace, patch)


def _trust_operations(index: int, name: str, bundle: str) -> tuple[dict[str, Any], ...]:
    path = f"/webhooks/{index}"
    return (
        {"op": "test", "path": f"{path}/name", "value": name},
        {"op": "add", "path": f"{path}/clientConfig/caBundle", "value": bundle},
    )
