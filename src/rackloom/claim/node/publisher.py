"""Keeps the API server's slices equal to the plugin's devices."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, Listed, NotFound, Object
from rackloom.claim.kube.kinds import NODE, RESOURCE_SLICE
from rackloom.claim.node.kept import Kept
from rackloom.claim.node.meter import Meter
from rackloom.claim.node.plugin import Plugin
from rackloom.claim.node.slices import Action, Create, Delete, Owner, Update, plan_slices
from rackloom.claim.node.tasks import beside
from rackloom.errors import Refused, Retry

log = structlog.get_logger(__name__)

RESYNC_SECONDS = 600.0
RETRY_SECONDS = 5.0
ROUNDS = 3


class Publisher:
    """Publishes the pools of one plugin. `published` is set while the API server shows what is wanted.

    `trouble` says why nothing was ever published; None once something was.

    `on_recovery` is called when the API server answers again after a time when it did not.
    """

    def __init__(
        self,
        plugin: Plugin,
        api: KubeApi,
        node: str,
        meter: Meter,
        on_recovery: Callable[[], None] = lambda: None,
    ) -> None:
        self._plugin = plugin
        self._api = api
        self._node = node
        self._meter = meter
        self._wake = asyncio.Event()
        self._owner: Owner | None = None
        self._kept = Kept()
        self._on_recovery = on_recovery
        self._is_cut_off = False
        self.published = asyncio.Event()
        self.trouble: str | None = "they were not written yet"

    def wake(self) -> None:
        """Look at the devices again soon: something about them changed."""
        self._wake.set()

    async def run(self) -> None:
        """Publish, and again whenever the devices or the slices change; never returns."""
        while True:
            try:
                listed = await self.publish()
                self.published.set()
                self.trouble = None
            except (Retry, Refused, KubeError) as trouble:
                self._is_cut_off |= _no_answer(trouble)
                self.published.clear()
                if self.trouble is not None:
                    self.trouble = str(trouble)
                self._meter.not_published()
                log.warning("node.not-published", driver=self._plugin.driver, reason=str(trouble))
                await self._rest(RETRY_SECONDS)
                continue
            if self._is_cut_off:
                self._is_cut_off = False
                self._on_recovery()
            await self._until_changed(listed)

    async def publish(self) -> Listed:
        """Bring the slices up to date; the list shows that they are.

        Raises `KubeError`, and `Retry` when somebody else keeps changing them.
        """
        owner = await self._who()
        pools = await self._plugin.pools()
        for _ in range(ROUNDS):
            listed = await self._slices()
            actions = plan_slices(pools, listed.items, owner, self._kept)
            if not actions:
                return listed
            for action in actions:
                await self._carry_out(action)
        raise Retry(f"the slices of {owner.driver} do not stay as they are written", after=RETRY_SECONDS)

    async def _carry_out(self, action: Action) -> None:
        # Kubelet wipes slices of a plugin that it lost: what is gone or changed is seen by the next list.
        with suppress(Conflict, NotFound):
            match action:
                case Create(new):
                    self._learn(new, await self._api.create(RESOURCE_SLICE, new))
                case Update(changed):
                    self._learn(changed, await self._api.replace(RESOURCE_SLICE, changed))
                case Delete(name, uid):
                    await self._api.delete(RESOURCE_SLICE, name, uid=uid)
        log.info("node.slice", driver=self._plugin.driver, action=type(action).__name__.lower())

    def _learn(self, sent: Object, stored: Object) -> None:
        dropped = self._kept.learn(sent, stored)
        if dropped:
            log.warning("node.slice-fields-dropped", driver=self._plugin.driver, fields=list(dropped))

    async def _slices(self) -> Listed:
        return await self._api.list(RESOURCE_SLICE, fields=self._ours())

    def _ours(self) -> str:
        return f"spec.driver={self._plugin.driver},spec.nodeName={self._node}"

    async def _who(self) -> Owner:
        if self._owner is None:
            node = await self._api.get(NODE, self._node)
            self._owner = Owner(driver=self._plugin.driver, node=self._node, node_uid=node["metadata"]["uid"])
        return self._owner

    async def _until_changed(self, listed: Listed) -> None:
        """Until the plugin wakes us, somebody else touches a slice, or a long time has passed."""
        async with beside(self._watch(listed.resource_version)):
            await self._rest(RESYNC_SECONDS)

    async def _watch(self, resource_version: str) -> None:
        events = self._api.watch(RESOURCE_SLICE, resource_version=resource_version, fields=self._ours())
        try:
            async for event in events:
                if event.type != "BOOKMARK":
                    self.wake()
        except KubeError as error:
            log.info("node.slice-watch-ended", driver=self._plugin.driver, reason=error.message)
            self._is_cut_off |= _no_answer(error)
            await asyncio.sleep(RETRY_SECONDS)
        self.wake()

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()


def _no_answer(trouble: Exception) -> bool:
    """Whether the API server could not be reached, or could not serve."""
    return isinstance(trouble, KubeError) and (trouble.code == 0 or trouble.code >= 500)
