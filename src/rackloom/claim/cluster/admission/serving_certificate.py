"""The webhook's serving certificate, and the caBundle by which the API server trusts it.

The authority outlives its identities by years, so trust does not change when one is renewed. When the
authority itself is renewed, the API server trusts both before anything is served from the new one.
Secrets and webhook configurations are installed with the rest and only filled in here: the right to
create such objects is not needed. A replica that was slower gets a conflict and finds the other's work
on the next attempt.
"""

import base64
from collections.abc import Callable

from rackloom.claim.cluster.certificates import (
    CertifiedKey,
    is_renewal_due,
    is_valid_identity,
    issue_certificate,
    new_authority,
    read_secret,
    secret_data,
)
from rackloom.claim.kube.api import KubeApi
from rackloom.core.kubernetes.objects import (
    MUTATING_WEBHOOK,
    SECRET,
    VALIDATING_WEBHOOK,
    PatchOperation,
    ResourceKind,
    add_operation,
)

WEBHOOK_NAME = "rackloom-webhook"
"""Of the service and of both webhook configurations."""
AUTHORITY_SECRET = "rackloom-webhook-authority"  # noqa: S105
SERVING_SECRET = "rackloom-webhook-tls"  # noqa: S105


class ServingCertificates:
    """Issues and renews the webhook's certificate. `dns_names` are those that the API server calls.

    `wall` gives seconds since the epoch.
    """

    def __init__(
        self, api: KubeApi, namespace: str, dns_names: tuple[str, ...], wall: Callable[[], float]
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._dns_names = dns_names
        self._wall = wall

    async def ensure(self) -> CertifiedKey:
        """The identity to serve with, once the API server trusts its authority.

        Raises KubeError; Conflict when another replica was faster, whose work the next attempt finds.
        """
        authority, trusted = await self._authority()
        for kind in (MUTATING_WEBHOOK, VALIDATING_WEBHOOK):
            await self._trust(kind, trusted)
        identity, _, version = await self._read(SERVING_SECRET)
        if identity is not None and is_valid_identity(identity, authority, self._wall()):
            return identity
        identity = issue_certificate(authority, self._dns_names, self._wall())
        await self._write(SERVING_SECRET, identity, trusted, version)
        return identity

    async def _authority(self) -> tuple[CertifiedKey, bytes]:
        """The authority, and the certificates to trust: after a renewal the previous one too."""
        previous, trusted, version = await self._read(AUTHORITY_SECRET)
        if previous is not None and not is_renewal_due(previous.certificate, self._wall()):
            return previous, trusted
        authority = new_authority(WEBHOOK_NAME, self._wall())
        trusted = authority.certificate + (previous.certificate if previous is not None else b"")
        await self._write(AUTHORITY_SECRET, authority, trusted, version)
        return authority, trusted

    async def _trust(self, kind: ResourceKind, trusted: bytes) -> None:
        configuration = await self._api.get(kind, WEBHOOK_NAME)
        bundle = base64.b64encode(trusted).decode()
        operations: list[PatchOperation] = []
        for index, hook in enumerate(configuration.get("webhooks") or ()):
            if hook["clientConfig"].get("caBundle") != bundle:
                path = f"/webhooks/{index}"
                operations.append({"op": "test", "path": f"{path}/name", "value": hook["name"]})
                operations.append(add_operation(f"{path}/clientConfig/caBundle", bundle))
        if operations:
            await self._api.patch(kind, WEBHOOK_NAME, None, tuple(operations))

    async def _read(self, name: str) -> tuple[CertifiedKey | None, bytes, str]:
        """The identity in a Secret, the authorities to trust, and the version that was read."""
        secret = await self._api.get(SECRET, name, self._namespace)
        identity, trusted = read_secret(secret)
        version = secret["metadata"]["resourceVersion"]
        is_filled = identity.key and identity.certificate
        return (identity, trusted, version) if is_filled else (None, b"", version)

    async def _write(self, name: str, identity: CertifiedKey, trusted: bytes, version: str) -> None:
        patch = {"metadata": {"resourceVersion": version}, "data": secret_data(identity, trusted)}
        await self._api.patch(SECRET, name, self._namespace, patch)
