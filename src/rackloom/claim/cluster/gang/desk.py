"""Where gangs are placed, one after the other: the highest priority first, then the oldest.

One pass looks at the whole cluster anew, and sees each plan that it has recorded before it makes the next.
"""

import asyncio
from collections.abc import Callable, Iterator

import structlog
from msgspec.structs import replace

from rackloom.claim.cluster.executor import carry_out
from rackloom.claim.cluster.gang.counted import Counted
from rackloom.claim.cluster.gang.meter import GangMeter
from rackloom.claim.cluster.gang.observe import Listing, Seen, view_of
from rackloom.claim.cluster.gang.owners import with_makers
from rackloom.claim.cluster.gang.placing import Planner, answer
from rackloom.claim.cluster.gang.reconcile import reconcile
from rackloom.claim.cluster.gang.record import GangKey
from rackloom.claim.cluster.gang.remaining import are_fewer
from rackloom.claim.cluster.gang.scene import Look, scene_of
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.site import Objects, running_on
from rackloom.claim.cluster.gang.view import Looked, View
from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.claim.kube.kinds import (
    DEVICE_CLASS,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.claim.place.values import Plan
from rackloom.errors import Refused

log = structlog.get_logger(__name__)

_LOOKED_AT = {
    "nodes": NODE,
    "pods": POD,
    "claims": RESOURCE_CLAIM,
    "slices": RESOURCE_SLICE,
    "classes": DEVICE_CLASS,
    "templates": RESOURCE_CLAIM_TEMPLATE,
}


class PlacementDesk:
    """Keeps the gangs that ask for the planner, and what it answered. `wall` is seconds since the epoch."""

    def __init__(
        self,
        api: KubeApi,
        planner: Planner,
        settings: GangSettings,
        wall: Callable[[], float],
        meter: GangMeter,
    ) -> None:
        self._api = api
        self._planner = planner
        self._settings = settings
        self._wall = wall
        self._meter = meter
        self._asking: set[GangKey] = set()
        self._refusals: dict[GangKey, str] = {}
        self._unfounded: set[GangKey] = set()
        self._checked: dict[GangKey, Plan] = {}
        self._looked: dict[GangKey, Looked] = {}
        self._counted = Counted()

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

    def looked_at(self, view: View) -> None:
        """The owners of its pods were asked, and nothing is taken back for what they said."""
        before, use = self._looked.get(view.key), view.use
        since = before.since if before is not None and before.use == use else view.now
        self._looked[view.key] = Looked(use, since, view.now, are_fewer(view))

    def view(self, seen: Seen, key: GangKey) -> View:
        """A gang as it is seen, and what is known of it here."""
        view = view_of(seen, key, self._wall())
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
        listing = Listing(plans, look.objects.pods, look.objects.nodes)
        views = sorted(self._views(listing), key=_turn)
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

    def _views(self, listing: Listing) -> Iterator[View]:
        """All that ask and can be read; of the others is known why not, and they ask anew."""
        for key in sorted(self._asking):
            try:
                yield self.view(listing, key)
            except Exception as defect:
                self._failed(key, defect)
                self._asking.discard(key)

    def _failed(self, key: GangKey, defect: Exception) -> None:
        """What is wrong with one gang must not keep the others from being placed."""
        log.error("gangs.defect", gang=key.called, exc_info=defect)
        self._refusals[key] = f"the planner failed: {defect!r}"

    async def _look(self) -> Look:
        objects = Objects(**{name: (await self._api.list(kind)).items for name, kind in _LOOKED_AT.items()})
        running = await asyncio.to_thread(running_on, objects, self._settings)
        return Look(objects=objects, running=running, counted=self._counted)

    async def _serve(self, view: View, listing: Listing, look: Look) -> None:
        self._refusals.pop(view.key, None)
        self._unfounded.add(view.key)
        if view.record is None:
            return
        asking = await self._with_makers(view)
        if not any(reconcile(one, self._settings).asks_planner for one in (view, asking)):
            return
        self._unfounded.discard(view.key)
        scene = scene_of(view.key, look, listing.records)
        try:
            # A search may take seconds; the loop has a lease to renew meanwhile.
            found = await asyncio.to_thread(answer, asking, scene, self._planner, self._settings)
        except Refused as refused:
            self._refusals[view.key] = str(refused)
            return
        if found.checked is not None:
            self._checked[view.key] = found.checked
        for action in found.actions:
            written = await carry_out(self._api, action)
            if written is not None:
                listing.record(written)
        self._meter.acted(found.actions)

    async def _with_makers(self, view: View) -> View:
        """With nothing proven where an owner cannot be read: the other gangs wait for none of them."""
        try:
            return await with_makers(self._api, view)
        except KubeError as error:
            log.warning("gangs.owners_not_read", gang=view.key.called, why=str(error))
            return replace(view, makers={})


def _turn(view: View) -> tuple[int, str, GangKey]:
    """By priority, then by age."""
    priority = max((one.priority for one in view.living), default=0)
    return -priority, "" if view.record is None else view.record.created, view.key
