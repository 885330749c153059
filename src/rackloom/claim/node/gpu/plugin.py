"""The plugin of gpu.nvidia.com."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from rackloom.claim.node.driver import DRIVER_SECONDS, DriverSpec
from rackloom.claim.node.gpu.mps import MpsDaemons
from rackloom.claim.node.gpu.programs import Programs
from rackloom.claim.node.gpu.settings import GPU_DRIVER, GpuSettings
from rackloom.claim.node.gpu.sharing import share, unshare
from rackloom.claim.node.gpu.vfio import device_files
from rackloom.claim.node.gpu.view import LOOK_SECONDS, GpuView
from rackloom.claim.node.gpu.wanted import Daemon, Sharing, Target, daemon_of, iommu_of, sharing_of, targets
from rackloom.claim.node.values import (
    Claim,
    DeviceHealth,
    DeviceNode,
    Edits,
    Entry,
    Pool,
    Prepared,
    PreparedDevice,
    State,
)
from rackloom.errors import Retry

log = structlog.get_logger(__name__)

GPU, MIG, VFIO = "gpu", "mig", "vfio"


class GpuPlugin:
    """The GPUs of one node."""

    driver = GPU_DRIVER
    kinds = (GPU, MIG, VFIO)

    def __init__(
        self, settings: GpuSettings, view: GpuView, programs: Programs, driver: DriverSpec | None = None
    ) -> None:
        self._settings = settings
        self._view = view
        self._programs = programs
        self._driver = driver
        self._mps = MpsDaemons(programs, settings.mps_home)

    def missing(self) -> str | None:
        """NVIDIA's driver, on a node whose GPUs it should drive."""
        return self._view.missing

    async def pools(self) -> tuple[Pool, ...]:
        """The node's pool. Raises `Retry` until the GPUs were read once."""
        pool = await self._view.pool(self._settings.node)
        return (msgspec.structs.replace(pool, devices=tuple(map(self._settings.shares.of, pool.devices))),)

    def intent(self, claim: Claim) -> Mapping[str, Any]:
        """How the GPUs will be shared: all that has to be undone."""
        wanted = targets(claim, self._view.device)
        return {"sharing": msgspec.to_builtins(sharing_of(claim.ref.uid, wanted))}

    async def prepare(self, claim: Claim) -> Prepared:
        """One attempt. Files first: what cannot be given needs no sharing."""
        wanted = targets(claim, self._view.device)
        sharing = sharing_of(claim.ref.uid, wanted)
        base = await self._base_ids(wanted)
        devices = tuple(self._device(one, sharing, base) for one in wanted)
        await share(sharing, self._programs, self._mps)
        return Prepared(devices=devices)

    async def changes(self, claim: Claim) -> AsyncIterator[None]:
        """Nothing tells: a GPU that comes back is seen by the next look."""
        for _ in ():
            yield

    async def unprepare(self, entry: Entry, others: Collection[Entry]) -> None:
        """Give the GPUs back as they were. A GPU belongs to one claim at a time, so `others` have no part."""
        await self._view.need()
        await unshare(_sharing(entry), self._programs, self._mps, self._view.answers)

    async def tidy(self, claims: Collection[Entry]) -> None:
        """End MPS daemons that no claim has, and look after those that one has: a restart forgot them."""
        used = [one.name for entry in claims for one in _sharing(entry).daemons]
        await self._mps.keep(_ready_daemons(claims), used)

    async def run(self, wake: Callable[[], None]) -> None:
        """Look at the GPUs, listen for their errors, and keep MPS daemons alive."""
        self._view.when_changed(wake)
        await asyncio.gather(self._look(), self._listen(), self._supervise())

    async def health(self) -> tuple[DeviceHealth, ...]:
        """As of the newest look, and of the errors since."""
        return self._view.health(self._settings.node)

    async def _look(self) -> None:
        while True:
            if self._driver is not None:
                await self._driver.look()
            await self._view.look()
            await asyncio.sleep(DRIVER_SECONDS if self._view.missing else LOOK_SECONDS)

    async def _listen(self) -> None:
        while True:
            try:
                await self._view.listen()
            except Retry as retry:
                log.info("gpu.no-events", reason=retry.reason)
                await asyncio.sleep(retry.after)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._mps.revive()

    async def _base_ids(self, wanted: Sequence[Target]) -> tuple[str, ...]:
        """CDI ids of the driver's files, which a GPU that is passed through does not need."""
        if self._driver is None or all(target.known.vfio is not None for target in wanted):
            return ()
        return await self._driver.ids()

    def _device(self, target: Target, sharing: Sharing, base: tuple[str, ...]) -> PreparedDevice:
        known, daemon = target.known, daemon_of(target, sharing)
        kind = VFIO if known.vfio is not None else GPU if known.mig is None else MIG
        through = Edits() if daemon is None else self._mps.edits(daemon.name)
        return PreparedDevice(
            result=target.result,
            kind=kind,
            edits=Edits(
                env=("NVIDIA_VISIBLE_DEVICES=void", *through.env),
                device_nodes=self._nodes(target),
                mounts=through.mounts,
            ),
            shared_cdi_ids=() if kind == VFIO else base,
        )

    def _nodes(self, target: Target) -> tuple[DeviceNode, ...]:
        known, files = target.known, self._settings.files
        if known.vfio is not None:
            return tuple(files.existing(path) for path in device_files(known.vfio, iommu_of(target)))
        if known.condition is None:
            return ()
        if known.mig is not None:
            return files.of_mig(known.condition.gpu, known.mig)
        return files.of_gpu(known.condition.gpu)


def _sharing(entry: Entry) -> Sharing:
    return msgspec.convert(entry.record.get("sharing", {}), Sharing)


def _ready_daemons(claims: Collection[Entry]) -> list[Daemon]:
    ready = [one for one in claims if one.state is State.COMPLETED and not one.undoing]
    return [daemon for entry in ready for daemon in _sharing(entry).daemons]
