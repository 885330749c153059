"""The certificates with which the IMEX daemons of one ComputeDomain know each other.

Each ComputeDomain has an authority of its own, so that a daemon of one cannot speak to those of another. The
daemons share one identity, which is renewed at two thirds of its life; the authority stays.
"""

import base64
from collections.abc import Callable

from rackloom.claim.cluster.certificates import Identity, issue, issued_by, new_authority, renewal_due
from rackloom.claim.cluster.observe import Cluster
from rackloom.claim.domain import names
from rackloom.claim.kube.api import KubeApi, Object
from rackloom.claim.kube.kinds import SECRET

CHECK_INTERVAL = 86_400.0
"""Seconds between two looks at the age of an identity that lives for weeks."""
_KEY, _CERTIFICATE, _AUTHORITY = "tls.key", "tls.crt", "ca.crt"


class Credentials:
    """Issues and renews. `wall` gives seconds since the epoch."""

    def __init__(self, api: KubeApi, cluster: Cluster, namespace: str, wall: Callable[[], float]) -> None:
        self._api = api
        self._cluster = cluster
        self._namespace = namespace
        self._wall = wall

    async def ensure(self, uid: str) -> tuple[Object, ...]:
        """Make what is missing or too old; returns the Secrets written. Raises KubeError."""
        authority, written = await self._authority(uid)
        held = self._cluster.at(SECRET, self._namespace, names.imex_secret_name(uid))
        if held is not None and self._is_good(held, authority):
            return written
        identity = issue(authority, (names.imex_peer_name(uid),), self._wall())
        data = _encoded(identity) | {_AUTHORITY: base64.b64encode(authority.certificate).decode()}
        return (*written, await self._write(uid, names.imex_secret_name(uid), data, held))

    async def _authority(self, uid: str) -> tuple[Identity, tuple[Object, ...]]:
        name = names.imex_authority_name(uid)
        held = self._cluster.at(SECRET, self._namespace, name)
        if held is not None:
            return _decoded(held), ()
        made = new_authority(f"imex {uid}", self._wall())
        return made, (await self._write(uid, name, _encoded(made), None),)

    def _is_good(self, held: Object, authority: Identity) -> bool:
        certificate = _decoded(held).certificate
        return issued_by(certificate, authority) and not renewal_due(certificate, self._wall())

    async def _write(self, uid: str, name: str, data: dict[str, str], held: Object | None) -> Object:
        if held is not None:
            version = {"resourceVersion": held["metadata"]["resourceVersion"]}
            return await self._api.patch(SECRET, name, self._namespace, {"metadata": version, "data": data})
        meta = {
            "name": name,
            "namespace": self._namespace,
            "labels": {names.COMPUTE_DOMAIN_LABEL: uid},
            "finalizers": [names.FINALIZER],
        }
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls"}
        return await self._api.create(SECRET, {**secret, "metadata": meta, "data": data})


def _encoded(identity: Identity) -> dict[str, str]:
    return {
        _KEY: base64.b64encode(identity.key).decode(),
        _CERTIFICATE: base64.b64encode(identity.certificate).decode(),
    }


def _decoded(secret: Object) -> Identity:
    data = secret.get("data") or {}
    return Identity(base64.b64decode(data.get(_KEY, "")), base64.b64decode(data.get(_CERTIFICATE, "")))
