"""The gang controller's view of the cluster: plans, pods of gangs, nodes."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.gang.observe import gang_of, holders_of
from rackloom.claim.cluster.gang.record import GangKey, record_of
from rackloom.claim.kube.api import Kind, KubeApi, Object
from rackloom.claim.kube.cache import by_uid
from rackloom.claim.kube.informer import Informer
from rackloom.claim.kube.kinds import GANG_PLAN, NODE, POD

_BY_GANG, _BY_HOLDER, _BY_UID, _BY_TRAY = "gang", "holder", "uid", "tray"


class GangCaches:
    """A `Seen` that follows the API server. What it hands out must not be changed."""

    def __init__(self, api: KubeApi, rng: random.Random) -> None:
        pods = Informer(api, POD, labels=GANG_LABEL, indexers={_BY_GANG: _gangs}, rng=rng)
        plans = Informer(api, GANG_PLAN, indexers={_BY_UID: by_uid, _BY_TRAY: _trays}, rng=rng)
        nodes = Informer(api, NODE, indexers={_BY_HOLDER: holders_of}, rng=rng)
        self._informers = {POD: pods, GANG_PLAN: plans, NODE: nodes}

    @property
    def informers(self) -> tuple[Informer, ...]:
        """All of them, to be run."""
        return tuple(self._informers.values())

    def on_change(self, handler: Callable[[Kind, Object], None]) -> None:
        """Call `handler(kind, object)` for every change of an object."""
        for kind, informer in self._informers.items():
            informer.on_change(partial(handler, kind))

    async def synced(self) -> None:
        """Wait until all have taken in a first list."""
        for informer in self.informers:
            await informer.synced()

    def at(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        return self._informers[kind].cache.get(name, namespace)

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of a gang."""
        return self.at(GANG_PLAN, key.namespace, key.name)

    def plan_of(self, uid: str) -> Object | None:
        """The GangPlan of a UID."""
        return next(iter(self._informers[GANG_PLAN].cache.find(_BY_UID, uid)), None)

    def plans(self) -> Iterator[Object]:
        """All GangPlans: for counts, never for one gang."""
        yield from self._informers[GANG_PLAN].cache

    def plans_on(self, tray: str) -> Sequence[Object]:
        """The GangPlans that have a tray."""
        return self._informers[GANG_PLAN].cache.find(_BY_TRAY, tray)

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of a gang."""
        return self._informers[POD].cache.find(_BY_GANG, key.called)

    def node(self, name: str) -> Object | None:
        """A node."""
        return self.at(NODE, None, name)

    def held(self, uid: str) -> Sequence[Object]:
        """The nodes that carry the taint of a plan."""
        return self._informers[NODE].cache.find(_BY_HOLDER, uid)


def _gangs(pod: Object) -> Iterable[str]:
    key = gang_of(pod)
    return () if key is None else (key.called,)


def _trays(plan: Object) -> Iterable[str]:
    return record_of(plan).reserved
