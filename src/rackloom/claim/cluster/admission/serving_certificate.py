"""The webhook's serving certificate, and the caBundle by which the API server trusts it.

Two accounts share the work, because no admission policy can limit the writer of a webhook configuration. The
webhook reads its certificate from a Secret and writes nothing. A Job with a separate account keeps the
authority, fills in the configurations and issues the certificate: `CertificateIssuer.run` is one pass, and a
CronJob repeats it.

The authority outlives its identities by years, so trust does not change when one is renewed. When the
authority itself is renewed, the configurations trust both, and the next pass issues from the new one: API
servers learn of a configuration a moment after it is written. Secrets and configurations are installed with
the rest and only filled in here: the right to create such objects is not needed. If two passes overlap, the
slower one gets a conflict and is repeated.
"""

import base64
from collections.abc import Callable

from rackloom.claim.cluster.certificates import (
    CertifiedKey,
    is_accepted,
    is_renewal_due,
    is_valid_identity,
    issue_certificate,
    new_authority,
    read_secret,
    secret_data,
)
from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import (
    MUTATING_WEBHOOK,
    SECRET,
    VALIDATING_WEBHOOK,
    PatchOperation,
    ResourceKind,
    add_operation,
    version_of,
    webhook_authorities,
)

WEBHOOK_NAME = "rackloom-webhook"
"""Of the service and of both webhook configurations."""
ISSUER_NAME = "rackloom-webhook-certificates"
"""Of the Job, of the CronJob and of their account."""
AUTHORITY_SECRET = "rackloom-webhook-authority"  # noqa: S105
SERVING_SECRET = "rackloom-webhook-tls"  # noqa: S105


async def read_serving_identity(api: KubeApi, namespace: str) -> CertifiedKey | None:
    """The identity that was issued last, or None if the Secret is empty. Raises KubeError."""
    identity, _ = read_secret(await api.get(SECRET, SERVING_SECRET, namespace))
    return identity if identity.key and identity.certificate else None


class CertificateIssuer:
    """Issues and renews the webhook's certificate.

    `dns_names` are those that the API server calls. The default is the name of the service. `wall` gives
    seconds since the epoch.
    """

    def __init__(
        self, api: KubeApi, namespace: str, dns_names: tuple[str, ...], wall: Callable[[], float]
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._dns_names = dns_names or (f"{WEBHOOK_NAME}.{namespace}.svc",)
        self._wall = wall

    async def run(self) -> None:
        """Do one pass: trust first, then the certificate if it is due. A second pass changes nothing.

        Raises KubeError, which is a Conflict if another pass was faster.
        """
        authority, trusted = await self._authority()
        changed = [await self._trust(kind, trusted) for kind in (MUTATING_WEBHOOK, VALIDATING_WEBHOOK)]
        identity, _, version = await self._read(SERVING_SECRET)
        if identity is not None:
            now = self._wall()
            if is_valid_identity(identity, authority, now):
                return
            # API servers may not know the new bundle yet. All of them still accept the old certificate.
            if any(changed) and is_accepted(identity.certificate, trusted, now):
                return
        identity = issue_certificate(authority, self._dns_names, self._wall())
        await self._write(SERVING_SECRET, identity, trusted, version)

    async def _authority(self) -> tuple[CertifiedKey, bytes]:
        """The authority, and the certificates to trust: after a renewal the previous one too."""
        previous, trusted, version = await self._read(AUTHORITY_SECRET)
        if previous is not None and not is_renewal_due(previous.certificate, self._wall()):
            return previous, trusted
        authority = new_authority(WEBHOOK_NAME, self._wall())
        trusted = authority.certificate + (previous.certificate if previous is not None else b"")
        await self._write(AUTHORITY_SECRET, authority, trusted, version)
        return authority, trusted

    async def _trust(self, kind: ResourceKind, trusted: bytes) -> bool:
        """Fill in the authorities of a configuration. Returns whether they were others before."""
        configuration = await self._api.get(kind, WEBHOOK_NAME)
        bundle = base64.b64encode(trusted).decode()
        operations: list[PatchOperation] = []
        for index, (name, present) in enumerate(webhook_authorities(configuration)):
            if present != bundle:
                path = f"/webhooks/{index}"
                operations.append({"op": "test", "path": f"{path}/name", "value": name})
                operations.append(add_operation(f"{path}/clientConfig/caBundle", bundle))
        if operations:
            await self._api.patch(kind, WEBHOOK_NAME, None, tuple(operations))
        return bool(operations)

    async def _read(self, name: str) -> tuple[CertifiedKey | None, bytes, str]:
        """The identity in a Secret, the authorities to trust, and the version that was read."""
        secret = await self._api.get(SECRET, name, self._namespace)
        identity, trusted = read_secret(secret)
        version = version_of(secret)
        is_filled = identity.key and identity.certificate
        return (identity, trusted, version) if is_filled else (None, b"", version)

    async def _write(self, name: str, identity: CertifiedKey, trusted: bytes, version: str) -> None:
        patch = {"metadata": {"resourceVersion": version}, "data": secret_data(identity, trusted)}
        await self._api.patch(SECRET, name, self._namespace, patch)
