"""The placement pass: gangs are placed one after the other, highest priority first, then oldest.

Each pass lists the cluster anew and sees every plan it has recorded before it makes the next one. The
search runs in a thread, because it may take seconds and the event loop has a lease to renew. A gang
that was refused asks again after a pause. A defect in one gang is logged and reported for that gang;
the others are still placed.

Owners of pods (Jobs, MPIJobs) are read only where their answer matters, and at most a few per gang,
since all gangs wait meanwhile. An owner that cannot be read proves nothing.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

import structlog
from msgspec.structs import replace

from rackloom.claim.cluster.controller_runtime import execute_write
from rackloom.claim.cluster.gang_metrics import GangMetrics
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Rejected
from rackloom.core.gangs.completion import do_owners_matter, has_fewer_to_come
from rackloom.core.gangs.members import (
    MPI_JOB,
    FinishedMPIJob,
    GangMember,
    OwnerJob,
    controllers_of,
    is_owner_of_kind,
    read_finished_mpi_job,
    read_owner_job,
)
from rackloom.core.gangs.placement import GangPlanner, answer_placement
from rackloom.core.gangs.reconcile import reconcile_gang
from rackloom.core.gangs.record import GangKey
from rackloom.core.gangs.snapshot import (
    ClusterLists,
    GangObjects,
    GangSnapshot,
    ListedGangObjects,
    OwnerCheck,
    take_snapshot,
)
from rackloom.core.gangs.spec import GangSettings
from rackloom.core.gangs.trays import PlacementLists, TrayCountCache, gang_site, running_site
from rackloom.core.kubernetes.objects import (
    DEVICE_CLASS,
    GANG_PLAN,
    JOB,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
    ResourceKind,
)
from rackloom.core.kubernetes.pods import OwnerReference
from rackloom.core.place.placement_values import GangPlan
from rackloom.errors import Refused

# Reading the owner workloads of a gang's pods.


owner_log = structlog.get_logger(__name__)


_MOST_OWNERS = 8
"""Of one gang that are asked: each is a request, for which other gangs wait."""


async def with_owners(api: KubeApi, view: GangSnapshot) -> GangSnapshot:
    """The view with what the owners of its pods say, where that matters. Raises KubeError."""
    asks = do_owners_matter(view)
    return replace(view, makers=await read_owners(api, view.key.namespace, view.members) if asks else {})


async def read_owners(
    api: KubeApi, namespace: str, members: Iterable[GangMember]
) -> dict[str, OwnerJob | FinishedMPIJob]:
    """Jobs and MPIJobs of the members, as the API server has them. Raises KubeError.

    Pods of many owners cost no requests: all gangs wait meanwhile.
    """
    owners = {member.owner.uid: member.owner for member in members if member.owner is not None}
    if len(owners) > _MOST_OWNERS:
        return {}
    asked = {uid: await _read_owner(api, namespace, owner) for uid, owner in owners.items()}
    return {uid: maker for uid, maker in asked.items() if maker is not None}


async def _read_owner(
    api: KubeApi, namespace: str, owner: OwnerReference
) -> OwnerJob | FinishedMPIJob | None:
    if is_owner_of_kind(owner, MPI_JOB):
        mpi_job = await _read_object(api, namespace, MPI_JOB, owner)
        return None if mpi_job is None else read_finished_mpi_job(mpi_job)
    job = await _read_object(api, namespace, JOB, owner) if is_owner_of_kind(owner, JOB) else None
    if job is None:
        return None
    above = next(
        (controller for controller in controllers_of(job) if is_owner_of_kind(controller, MPI_JOB)), None
    )
    return read_owner_job(job) if above is None else await _read_owner(api, namespace, above)


async def _read_object(
    api: KubeApi, namespace: str, kind: ResourceKind, owner: OwnerReference
) -> Object | None:
    """None too for one that is another one by now, and where nobody may read it."""
    try:
        found = await api.get(kind, owner.name, namespace)
    except NotFound:
        return None
    except Rejected as refusal:
        owner_log.warning(
            "gangs.owner_not_read", owner=f"{kind.kind} {namespace}/{owner.name}", why=refusal.message
        )
        return None
    return found if found["metadata"]["uid"] == owner.uid else None


# The placement pass.


placer_log = structlog.get_logger(__name__)

_LISTED_KINDS = {
    "nodes": NODE,
    "pods": POD,
    "claims": RESOURCE_CLAIM,
    "slices": RESOURCE_SLICE,
    "classes": DEVICE_CLASS,
    "templates": RESOURCE_CLAIM_TEMPLATE,
}


class GangPlacer:
    """Keeps the gangs that ask for the planner, and what it answered. `wall` is seconds since the epoch."""

    def __init__(
        self,
        api: KubeApi,
        planner: GangPlanner,
        settings: GangSettings,
        wall: Callable[[], float],
        meter: GangMetrics,
    ) -> None:
        self._api = api
        self._planner = planner
        self._settings = settings
        self._wall = wall
        self._meter = meter
        self._asking: set[GangKey] = set()
        self._refusals: dict[GangKey, str] = {}
        self._unfounded: set[GangKey] = set()
        self._checked: dict[GangKey, GangPlan] = {}
        self._looked: dict[GangKey, OwnerCheck] = {}
        self._counted = TrayCountCache()

    @property
    def is_asked(self) -> bool:
        """Whether anybody waits for the planner."""
        return bool(self._asking)

    def ask(self, key: GangKey) -> None:
        """Have a gang placed, or mended, in the next pass."""
        self._asking.add(key)

    def forget(self, key: GangKey) -> None:
        """The gang wants nothing of the planner now."""
        self._asking.discard(key)
        self._unfounded.discard(key)
        self._refusals.pop(key, None)

    def ended(self, key: GangKey) -> None:
        """There is no such gang any more."""
        self.forget(key)
        self._checked.pop(key, None)
        self._looked.pop(key, None)

    def looked_at(self, view: GangSnapshot) -> None:
        """The owners of its pods were asked, and nothing is taken back for what they said."""
        before, use = self._looked.get(view.key), view.use
        since = before.since if before is not None and before.use == use else view.now
        self._looked[view.key] = OwnerCheck(use, since, view.now, has_fewer_to_come(view))

    def view(self, seen: GangObjects, key: GangKey) -> GangSnapshot:
        """A gang as it is seen, and what is known of it here."""
        view = take_snapshot(seen, key, self._wall())
        if view.record is None or view.record.plan is None:
            self._checked.pop(key, None)
        return replace(
            view,
            refusal=self._refusals.get(key, ""),
            checked=self._checked.get(key),
            looked=self._looked.get(key),
        )

    def pause(self, key: GangKey) -> float:
        """Seconds after which a gang that asks again may be served.

        One that was refused waits, and one that had no reason to ask: a cache that is behind would ask on.
        """
        if key in self._refusals:
            return self._settings.again
        return self._settings.settle if key in self._unfounded else 0.0

    async def work(self) -> tuple[GangKey, ...]:
        """Serve all that ask; returns whom. Raises KubeError, and those not served yet ask on."""
        look = await self._look()
        plans = (await self._api.list(GANG_PLAN)).items
        listing = ListedGangObjects(plans, look.objects.pods, look.objects.nodes)
        views = sorted(self._views(listing), key=_placement_order)
        served = []
        for view in views:
            try:
                await self._serve(view, listing, look)
            except KubeError:
                raise
            except Exception as defect:
                self._failed(view.key, defect)
            self._asking.discard(view.key)
            served.append(view.key)
        return tuple(served)

    def _views(self, listing: ListedGangObjects) -> Iterator[GangSnapshot]:
        """All that ask and can be read; of the others is known why not, and they ask anew."""
        for key in sorted(self._asking):
            try:
                yield self.view(listing, key)
            except Exception as defect:
                self._failed(key, defect)
                self._asking.discard(key)

    def _failed(self, key: GangKey, defect: Exception) -> None:
        """What is wrong with one gang must not keep the others from being placed."""
        placer_log.error("gangs.defect", gang=key.called, exc_info=defect)
        self._refusals[key] = f"the planner failed: {defect!r}"

    async def _look(self) -> PlacementLists:
        objects = ClusterLists(
            **{name: (await self._api.list(kind)).items for name, kind in _LISTED_KINDS.items()}
        )
        running = await asyncio.to_thread(running_site, objects, self._settings)
        return PlacementLists(objects=objects, running=running, counted=self._counted)

    async def _serve(self, view: GangSnapshot, listing: ListedGangObjects, look: PlacementLists) -> None:
        self._refusals.pop(view.key, None)
        self._unfounded.add(view.key)
        if view.record is None:
            return
        asking = await self._with_makers(view)
        if not any(reconcile_gang(one, self._settings).asks_planner for one in (view, asking)):
            return
        self._unfounded.discard(view.key)
        scene = gang_site(view.key, look, listing.records)
        try:
            # A search may take seconds; the loop has a lease to renew meanwhile.
            found = await asyncio.to_thread(answer_placement, asking, scene, self._planner, self._settings)
        except Refused as refused:
            self._refusals[view.key] = str(refused)
            return
        if found.checked is not None:
            self._checked[view.key] = found.checked
        for action in found.actions:
            written = await execute_write(self._api, action)
            if written is not None:
                listing.record(written)
        self._meter.acted(found.actions)

    async def _with_makers(self, view: GangSnapshot) -> GangSnapshot:
        """With nothing proven where an owner cannot be read: the other gangs wait for none of them."""
        try:
            return await with_owners(self._api, view)
        except KubeError as error:
            placer_log.warning("gangs.owners_not_read", gang=view.key.called, why=str(error))
            return replace(view, makers={})


def _placement_order(view: GangSnapshot) -> tuple[int, str, GangKey]:
    """By priority, then by age."""
    priority = max((one.priority for one in view.living), default=0)
    return -priority, "" if view.record is None else view.record.created, view.key
