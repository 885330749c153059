"""The certificates with which the IMEX daemons of one ComputeDomain know each other.

Each ComputeDomain has an authority of its own, so that a daemon of one cannot speak to those of another. The
daemons share one identity, which is renewed at two thirds of its life; the authority stays.

Secrets are read by name only: whoever may list or watch them may read all of a namespace. So a ComputeDomain
whose Secrets could not be found by any other object must not exist: they are made once it carries our
finalizer, and its DaemonSet outlives them.
"""

import base64
from collections.abc import Callable, Sequence
from contextlib import suppress

from rackloom.claim.cluster.certificates import Identity, issue, issued_by, new_authority, renewal_due
from rackloom.claim.cluster.things import Thing, thing
from rackloom.claim.domain import names
from rackloom.claim.kube.api import KubeApi, NotFound, Object
from rackloom.claim.kube.kinds import SECRET

CHECK_INTERVAL = 600.0
"""Seconds between two looks whether the Secrets of a ComputeDomain are there, and young enough."""
_KEY, _CERTIFICATE, _AUTHORITY = "tls.key", "tls.crt", "ca.crt"


class Credentials:
    """Issues and renews. `wall` gives seconds since the epoch."""

    def __init__(self, api: KubeApi, wall: Callable[[], float]) -> None:
        self._api = api
        self._wall = wall
        self._looked: dict[str, float] = {}
        """When the Secrets of a ComputeDomain were last seen to be good, by UID."""

    async def ensure(self, uid: str, namespace: str) -> None:
        """Make what is missing or too old, unless all was well `CHECK_INTERVAL` ago. Raises KubeError."""
        now = self._wall()
        if 0 <= now - self._looked.get(uid, float("-inf")) < CHECK_INTERVAL:
            return
        authority = await self._authority(uid, namespace)
        name = names.imex_secret_name(uid)
        held = await self._read(name, namespace)
        if held is None or not self._is_good(held, authority):
            identity = issue(authority, (names.imex_peer_name(uid),), now)
            data = _encoded(identity) | {_AUTHORITY: base64.b64encode(authority.certificate).decode()}
            await self._write(uid, name, namespace, data, held)
        self._looked[uid] = now

    async def held(self, uid: str, namespaces: Sequence[str]) -> tuple[Thing, ...]:
        """The Secrets of a ComputeDomain that there are, in whatever state. Raises KubeError.

        One that does not carry its UID belongs to another, whatever the name says.
        """
        self._looked.pop(uid, None)
        wanted = (names.imex_secret_name(uid), names.imex_authority_name(uid))
        found = [await self._read(name, namespace) for namespace in namespaces for name in wanted]
        things = (thing(SECRET, secret) for secret in found if secret is not None)
        return tuple(secret for secret in things if secret.domain == uid)

    async def _authority(self, uid: str, namespace: str) -> Identity:
        name = names.imex_authority_name(uid)
        held = await self._read(name, namespace)
        if held is not None:
            return _decoded(held)
        made = new_authority(f"imex {uid}", self._wall())
        await self._write(uid, name, namespace, _encoded(made), None)
        return made

    async def _read(self, name: str, namespace: str) -> Object | None:
        with suppress(NotFound):
            return await self._api.get(SECRET, name, namespace)
        return None

    def _is_good(self, held: Object, authority: Identity) -> bool:
        certificate = _decoded(held).certificate
        return issued_by(certificate, authority) and not renewal_due(certificate, self._wall())

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


def _encoded(identity: Identity) -> dict[str, str]:
    return {
        _KEY: base64.b64encode(identity.key).decode(),
        _CERTIFICATE: base64.b64encode(identity.certificate).decode(),
    }


def _decoded(secret: Object) -> Identity:
    data = secret.get("data") or {}
    return Identity(base64.b64decode(data.get(_KEY, "")), base64.b64decode(data.get(_CERTIFICATE, "")))
