"""Things that outlived their ComputeDomain: a controller that was down at the wrong moment leaves some.

That a UID is not in the cache proves nothing: the cache may be behind. It is gone for certain when the watch
saw it go, or when a fresh list does not have it although something that was made for it was seen before.
"""

from collections.abc import Iterable

from rackloom.claim.cluster.caches import Caches
from rackloom.claim.cluster.observe import BY_DOMAIN, INDEXES
from rackloom.claim.kube.api import KubeApi, Object
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NETWORK_POLICY,
    NODE,
    RESOURCE_CLAIM_TEMPLATE,
)

INTERVAL = 600.0
"""Seconds between sweeps."""
_LEFT_BEHIND = (RESOURCE_CLAIM_TEMPLATE, DAEMON_SET, NETWORK_POLICY, NODE, COMPUTE_DOMAIN_CLIQUE)


class Sweeper:
    """Knows which UIDs are gone for certain."""

    interval = INTERVAL

    def __init__(self, api: KubeApi, caches: Caches) -> None:
        self._api = api
        self._caches = caches
        self._gone: set[str] = set()

    def is_gone(self, uid: str) -> bool:
        """Whether no ComputeDomain has this UID any more; UIDs do not come back."""
        return uid in self._gone

    def seen(self, domain: Object) -> None:
        """Take note of a ComputeDomain that came, changed or went."""
        uid = domain["metadata"]["uid"]
        if not self._caches.by(COMPUTE_DOMAIN, BY_DOMAIN, uid):
            self._gone.add(uid)

    async def confirm(self) -> tuple[str, ...]:
        """The UIDs of things whose ComputeDomain is gone, by one fresh list. Raises KubeError."""
        strays = {uid for uid in self._labels() if not self._caches.by(COMPUTE_DOMAIN, BY_DOMAIN, uid)}
        unsure = strays - self._gone
        if unsure:
            listed = await self._api.list(COMPUTE_DOMAIN)
            self._gone |= unsure - {one["metadata"]["uid"] for one in listed.items}
        self._gone &= strays
        return tuple(sorted(self._gone))

    def _labels(self) -> Iterable[str]:
        for kind in _LEFT_BEHIND:
            indexer = INDEXES[kind][BY_DOMAIN]
            for obj in self._caches.all(kind):
                yield from indexer(obj)
