"""Things that outlived their ComputeDomain: a controller that was down at the wrong moment leaves some.

That a UID is not in the cache proves nothing: the cache may be behind. It is gone for certain when the watch
saw it go, or when a fresh list does not have it although something that was made for it was seen before.

Secrets are in no cache. A controller that was stopped, and goes on when another one leads and has taken the
ComputeDomain apart, still sends the request that it was about to send, and may so make a Secret that nothing
refers to. So the Secrets of a ComputeDomain that went are looked for by name at `LATE_SWEEPS` more sweeps.
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
LATE_SWEEPS = 2
"""How often Secrets of a ComputeDomain that went are looked for."""
_LEFT_BEHIND = (RESOURCE_CLAIM_TEMPLATE, DAEMON_SET, NETWORK_POLICY, NODE, COMPUTE_DOMAIN_CLIQUE)


class Sweeper:
    """Knows which UIDs are gone for certain."""

    interval = INTERVAL

    def __init__(self, api: KubeApi, caches: Caches) -> None:
        self._api = api
        self._caches = caches
        self._gone: set[str] = set()
        self._went: dict[str, int] = {}
        """UIDs of ComputeDomains that the watch saw go -> sweeps at which they are still looked at."""

    def is_gone(self, uid: str) -> bool:
        """Whether no ComputeDomain has this UID any more; UIDs do not come back."""
        return uid in self._gone or uid in self._went

    def may_have_secrets(self, uid: str) -> bool:
        """Whether a ComputeDomain of this UID was seen, and went a short time ago."""
        return uid in self._went

    def seen(self, domain: Object) -> None:
        """Take note of a ComputeDomain that came, changed or went."""
        uid = domain["metadata"]["uid"]
        if not self._caches.by(COMPUTE_DOMAIN, BY_DOMAIN, uid):
            self._gone.add(uid)
            self._went[uid] = LATE_SWEEPS

    async def confirm(self) -> tuple[str, ...]:
        """The UIDs of ComputeDomains that are gone and may have left something. Raises KubeError.

        Of those that the watch did not see go, one fresh list tells.
        """
        strays = {uid for uid in self._labels() if not self._caches.by(COMPUTE_DOMAIN, BY_DOMAIN, uid)}
        unsure = strays - self._gone
        if unsure:
            listed = await self._api.list(COMPUTE_DOMAIN)
            self._gone |= unsure - {one["metadata"]["uid"] for one in listed.items}
        self._gone &= strays
        self._went = {uid: left - 1 for uid, left in self._went.items() if left > 0}
        return tuple(sorted(self._gone | self._went.keys()))

    def _labels(self) -> Iterable[str]:
        for kind in _LEFT_BEHIND:
            indexer = INDEXES[kind][BY_DOMAIN]
            for obj in self._caches.all(kind):
                yield from indexer(obj)
