"""The controller's view of the cluster: one informer per kind, found through indexes."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rackloom.claim.cluster.observe import INDEXES
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Kind, KubeApi, Object
from rackloom.claim.kube.informer import Informer
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)

_EVERYWHERE = (COMPUTE_DOMAIN, RESOURCE_CLAIM_TEMPLATE, RESOURCE_CLAIM, NODE)
_WITH_DAEMONS = (DAEMON_SET, NETWORK_POLICY, COMPUTE_DOMAIN_CLIQUE)


class Caches:
    """A `Cluster` that follows the API server. What it hands out must not be changed."""

    def __init__(self, api: KubeApi, settings: Settings, rng: random.Random) -> None:
        def informer(kind: Kind, namespace: str | None = None, labels: str = "") -> Informer:
            return Informer(api, kind, namespace, labels=labels, indexers=INDEXES[kind], rng=rng)

        self._informers: dict[Kind, tuple[Informer, ...]] = {kind: (informer(kind),) for kind in _EVERYWHERE}
        for kind in _WITH_DAEMONS:
            self._informers[kind] = tuple(informer(kind, one) for one in settings.namespaces)
        # Only daemon pods and our own slices: a cluster's other pods and slices are many.
        self._informers[POD] = tuple(
            informer(POD, one, names.COMPUTE_DOMAIN_LABEL) for one in settings.namespaces
        )
        self._informers[RESOURCE_SLICE] = (informer(RESOURCE_SLICE, labels=names.WARM_CLIQUE_LABEL),)

    @property
    def informers(self) -> tuple[Informer, ...]:
        """All of them, to be run."""
        return tuple(one for several in self._informers.values() for one in several)

    def on_change(self, handler: Callable[[Kind, Object], None]) -> None:
        """Call `handler(kind, object)` for every change of an object."""
        for kind, several in self._informers.items():
            for one in several:
                one.on_change(partial(handler, kind))

    async def synced(self) -> None:
        """Wait until all have taken in a first list."""
        for informer in self.informers:
            await informer.synced()

    def unknown_since(self) -> float | None:
        """Loop time since when any of them may be behind; None when all follow."""
        since = (one.unknown_since for one in self.informers)
        return min((moment for moment in since if moment is not None), default=None)

    def at(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object of this name; None also for kinds that are not followed."""
        found = (one.cache.get(name, namespace) for one in self._informers.get(kind, ()))
        return next((obj for obj in found if obj is not None), None)

    def by(self, kind: Kind, index: str, value: str) -> Sequence[Object]:
        """The objects that an index has under a value."""
        return [obj for one in self._informers[kind] for obj in one.cache.find(index, value)]

    def all(self, kind: Kind) -> Iterator[Object]:
        """All objects of a kind: for sweeps and counts, never for one ComputeDomain."""
        for informer in self._informers[kind]:
            yield from informer.cache
