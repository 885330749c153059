"""The driver gpu.nvidia.com: preparing claims for GPUs, MIG devices and passed-through GPUs.

`prepare` resolves the devices and their configurations, waits for parts of GPUs that another claim still has,
makes the claim's MIG devices, finds the device files and the driver's CDI ids, and only then changes how the
GPUs are shared: a device that cannot be given needs no sharing. `unprepare` undoes the sharing and destroys
the MIG devices. One call at a time changes the MIG devices of a GPU, and it runs to its end even if the claim
is given up before. `tidy` ends MPS daemons that no claim has, and looks after those of prepared claims,
which a restart forgot.

A passed-through GPU gets no driver files: its driver is in the virtual machine. One that NVIDIA's driver has
is bound to vfio-pci by the claim, and given back after it (`passthrough`).

Three loops run beside that: look at the GPUs, listen for XIDs, keep MPS daemons alive.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import structlog

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.cdi import DRIVER_SECONDS, DriverFiles, DriverSpec, vfio_device_files
from rackloom.claim.node.gpu.adopted_mps import AdoptedMpsDaemon, AdoptedMpsDaemons
from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.inventory import (
    PARTITIONS,
    PASSED_THROUGH,
    PERSISTENT,
    UUIDS,
    GpuPartitioner,
    MigDevice,
    MigPartition,
    PlaceTaken,
    ShareSettings,
    blocking_claim,
    has_another_claim,
    held_uuids,
    partitions_of,
    passed_through,
)
from rackloom.claim.node.gpu.monitor import OBSERVE_SECONDS, GpuMonitor
from rackloom.claim.node.gpu.mps import MpsDaemons
from rackloom.claim.node.gpu.mps_launcher import MpsLauncher, OwnContainer
from rackloom.claim.node.gpu.passthrough import PciBinder, VfioGpu
from rackloom.claim.node.gpu.sharing import (
    ClaimedGpu,
    SharingPlan,
    apply_sharing,
    claimed_gpus,
    iommu_of_claimed,
    mps_daemon_of,
    plan_sharing,
    undo_sharing,
)
from rackloom.claim.node.plugin import (
    CheckpointEntry,
    ContainerEdits,
    DeviceHealth,
    DeviceNode,
    DevicePool,
    NodePlugin,
    NodeValue,
    PreparedClaim,
    PreparedDevice,
    PrepareState,
)
from rackloom.claim.node.tasks import to_the_end
from rackloom.core.cluster.claims import AllocatedClaim, ClaimRef
from rackloom.errors import Refused, Retry

# Settings.


GPU_DRIVER = "gpu.nvidia.com"


class GpuSettings(NodeValue, frozen=True, kw_only=True):
    """The settings of one node."""

    node: str
    mps_home: Path
    """A directory for each MPS daemon."""
    files: DriverFiles = DriverFiles()
    shares: ShareSettings = ShareSettings()


# The driver.


log = structlog.get_logger(__name__)
T = TypeVar("T")

GPU_KIND, MIG_KIND, VFIO_KIND = "gpu", "mig", "vfio"


class GpuPlugin(NodePlugin):
    """The GPUs of one node."""

    driver = GPU_DRIVER
    kinds = (GPU_KIND, MIG_KIND, VFIO_KIND)

    def __init__(
        self,
        api: KubeApi,
        settings: GpuSettings,
        monitor: GpuMonitor,
        programs: DriverPrograms,
        driver: DriverSpec | None = None,
        partitioner: GpuPartitioner | None = None,
        launcher: MpsLauncher | None = None,
        binder: PciBinder | None = None,
    ) -> None:
        """`partitioner` makes MIG devices, if the monitor's source lists some to make.

        `binder` gives GPUs to virtual machines, if the monitor lists some to give.

        `launcher` starts MPS daemons. Without it they start in this container.
        """
        self._settings = settings
        self._monitor = monitor
        self._programs = programs
        self._driver = driver
        self._partitioner = partitioner
        self._binder = binder
        self._begun: set[tuple[str, MigPartition]] = set()
        """MIG devices that may be at their place by an attempt for the claim (UID)."""
        self._persistent: set[str] = set()
        """PCI addresses of GPUs whose persistence mode is off for a virtual machine, as far as is known."""
        self._mps = MpsDaemons(programs, launcher or OwnContainer(programs), settings.mps_home)
        self._adopted = AdoptedMpsDaemons(api, settings.mps_home, self._mps.answers)
        self._claims: Callable[[], Collection[CheckpointEntry]] = tuple
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def resume(self, claims: Callable[[], Collection[CheckpointEntry]]) -> None:
        """Know the claims: MIG devices that they do not name were made by others."""
        self._claims = claims
        self._monitor.resume(claims)
        # Attempts of an earlier life of this plugin may have left something.
        self._begun = {(entry.ref.uid, part) for entry in claims() for part in partitions_of(entry)}

    def missing(self) -> str | None:
        """NVIDIA's driver, if it is missing on a node with GPUs for it."""
        return self._monitor.missing

    async def pools(self) -> tuple[DevicePool, ...]:
        """The node's pool. Raises `Retry` until the GPUs were read once."""
        pool, shares = await self._monitor.pool(self._settings.node), self._settings.shares.of
        devices, whole = tuple(map(shares, pool.devices)), tuple(map(shares, pool.without_counters))
        return (msgspec.structs.replace(pool, devices=devices, without_counters=whole),)

    def intent(self, claim: AllocatedClaim) -> Mapping[str, Any]:
        """How the GPUs will be shared, made and bound: all that has to be undone."""
        wanted = claimed_gpus(claim, self._monitor.device)
        sharing = plan_sharing(claim.ref.uid, wanted)
        # After a takeover and a reboot of the node, the adopted daemons would start with the node.
        sharing = msgspec.structs.replace(sharing, adopted=self._adopted_by(claim.ref.uid))
        return {
            "sharing": msgspec.to_builtins(sharing),
            PARTITIONS: msgspec.to_builtins(_partitions(wanted)),
            PASSED_THROUGH: [vfio.pci_address for vfio in _switchable(wanted)],
        }

    async def prepare(self, claim: AllocatedClaim) -> PreparedClaim:
        """One attempt. Files first: a GPU that cannot be handed out needs no sharing."""
        await self._bind_gpus(claim.ref, claimed_gpus(claim, self._monitor.device))
        wanted = await self._have_devices(claim.ref, claimed_gpus(claim, self._monitor.device))
        sharing = plan_sharing(claim.ref.uid, wanted)
        for daemon in self._adopted_by(claim.ref.uid):
            await self._adopted.end(daemon)
        base = await self._base_ids(wanted)
        devices = tuple(self._device(gpu, sharing, base) for gpu in wanted)
        # The intent on disk holds the same plan, so every finished part can be undone.
        await apply_sharing(sharing, self._programs, self._mps)
        # NVIDIA's driver would need them, were the node given back to it.
        uuids = {gpu.result.device: gpu.device.uuid for gpu in wanted}
        persistent = [vfio.pci_address for vfio in _switchable(wanted)]
        record = {
            UUIDS: uuids,
            PERSISTENT: [at for at in persistent if at in self._persistent],
            # Without daemons of NVIDIA's driver: they are gone, and the right to end them may go as well.
            "sharing": msgspec.to_builtins(sharing),
        }
        return PreparedClaim(devices=devices, record=record)

    async def unprepare(self, entry: CheckpointEntry, others: Collection[CheckpointEntry]) -> None:
        """Give the GPUs back as they were, but for a MIG device that a later claim has by now.

        A claim whose prepare only started does not keep another from its devices.
        """
        await self._monitor.need()
        if partitions_of(entry) and self._monitor.missing is not None:
            # The devices may be there all the same, in the kernel.
            raise Retry(f"MIG devices cannot be destroyed: {self._monitor.missing}", after=1.0)
        await undo_sharing(
            _recorded_sharing(entry), self._programs, self._mps, self._adopted, self._monitor.answers
        )
        for partition in partitions_of(entry):
            # A GPU that is gone has lost its MIG devices.
            if self._monitor.answers(partition.gpu):
                await self._change_gpu(partition.gpu, partial(self._destroy_own, entry.ref.uid, partition))
            self._begun.discard((entry.ref.uid, partition))
        await self._release_gpus(entry)

    async def tidy(self, claims: Collection[CheckpointEntry]) -> None:
        """End MPS daemons that no claim has, and supervise those of prepared claims again after a restart."""
        plans = [_recorded_sharing(entry) for entry in claims]
        used = [daemon.name for plan in plans for daemon in plan.daemons]
        used += [daemon.id for plan in plans for daemon in plan.adopted]
        ready = [claim for claim in claims if claim.state is PrepareState.COMPLETED and not claim.undoing]
        await self._mps.keep([daemon for entry in ready for daemon in _recorded_sharing(entry).daemons], used)

    async def run(self, wake: Callable[[], None]) -> None:
        """Look at the GPUs, listen for their errors, and keep MPS daemons alive."""
        self._monitor.on_change(wake)
        await asyncio.gather(self._watch_gpus(), self._watch_xids(), self._restart_mps())

    async def health(self) -> tuple[DeviceHealth, ...]:
        """As of the newest look, and of the errors since."""
        return self._monitor.health(self._settings.node)

    async def _watch_gpus(self) -> None:
        while True:
            if self._driver is not None:
                await self._driver.refresh()
            await self._monitor.observe()
            await asyncio.sleep(DRIVER_SECONDS if self._monitor.missing else OBSERVE_SECONDS)

    async def _watch_xids(self) -> None:
        while True:
            try:
                await self._monitor.listen()
            except Retry as retry:
                log.info("gpu.no-events", reason=retry.reason)
                await asyncio.sleep(retry.after)

    async def _restart_mps(self) -> None:
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            await self._mps.revive()

    async def _release_gpus(self, entry: CheckpointEntry) -> None:
        """Give GPUs of virtual machines back to NVIDIA's driver, with their persistence mode."""
        addresses = entry.record.get(PASSED_THROUGH, ())
        for address in addresses:
            release = partial(self._release_own, entry.ref.uid, address)
            was_persistent = address in self._persistent or address in entry.record.get(PERSISTENT, ())
            if await self._change_gpu(address, release) and was_persistent:
                await self._programs.run("nvidia-smi", "-i", address, "-pm", "1")
                self._persistent.discard(address)
        if addresses:
            await self._monitor.observe()

    async def _bind_gpus(self, ref: ClaimRef, wanted: Sequence[ClaimedGpu]) -> None:
        """Give the claim's GPUs for virtual machines to vfio-pci.

        Raises `Retry` while another claim has one.
        """
        others = [entry for entry in self._claims() if entry.ref.uid != ref.uid]
        for target in wanted:
            condition = target.device.condition
            if condition is not None and condition.gpu.pci_address in passed_through(others):
                raise Retry("another claim on this node still has the GPU in a virtual machine", after=1.0)
        unbound = [vfio for vfio in _switchable(wanted) if not vfio.bound]
        for vfio in unbound:
            await self._bind_gpu(ref, vfio)
        if unbound:
            # The kernel has other files for a GPU that is bound.
            await self._monitor.observe()

    async def _bind_gpu(self, ref: ClaimRef, vfio: VfioGpu) -> None:
        address, gpu = vfio.pci_address, self._monitor.gpu_at(vfio.pci_address)
        if vfio.driver is None:
            # An attempt was cut off after NVIDIA's driver had let go.
            await self._change_gpu(address, partial(self._need_binder(address).bind, address, None))
            return
        if gpu is None:
            raise Retry(f"GPU {address} does not answer, so it cannot be taken", after=1.0)
        for entry in self._claims():
            if entry.ref.uid != ref.uid and gpu.uuid in held_uuids(entry):
                raise Retry(f"claim {entry.ref} on this node still has the GPU", after=1.0)
        mode = ("nvidia-smi", "-i", address, "--query-gpu=persistence_mode", "--format=csv,noheader")
        if (await self._programs.run(*mode)).strip() == "Enabled":
            # It keeps the GPU's file open.
            self._persistent.add(address)
            await self._programs.run("nvidia-smi", "-i", address, "-pm", "0")
        bind = partial(self._need_binder(address).bind, address, f"nvidia{gpu.minor}")
        await self._change_gpu(address, bind)

    async def _have_devices(self, ref: ClaimRef, wanted: Sequence[ClaimedGpu]) -> tuple[ClaimedGpu, ...]:
        """The same devices, with the MIG devices made.

        Raises `Retry` while another claim has a part of them.
        """
        partitions = _partitions(wanted)
        whole = {
            target.device.uuid for target in wanted if _is_whole(target) and not target.result.admin_access
        }
        if any(not vfio.bound for vfio in _switchable(wanted)):
            raise Retry("the GPU does not show as bound to vfio-pci yet", after=1.0)
        blocking = blocking_claim(ref.uid, partitions, whole, self._claims())
        if blocking is not None:
            raise Retry(f"claim {blocking.ref} on this node still has a part of the GPU", after=1.0)
        for target in wanted:
            condition = target.device.condition
            if condition is not None and condition.gpu.partitions and target.device.uuid in whole:
                uuid = target.device.uuid
                await self._change_gpu(uuid, partial(self._need_partitioner(uuid).leave_mig_mode, uuid))
        return tuple([await self._made(ref.uid, target) for target in wanted])

    async def _made(self, uid: str, target: ClaimedGpu) -> ClaimedGpu:
        partition = target.device.partition
        if partition is None:
            return target
        made = await self._change_gpu(partition.gpu, partial(self._make_own, uid, partition))
        device = msgspec.structs.replace(target.device, mig=made, partition=None)
        return msgspec.structs.replace(target, device=device)

    def _make_own(self, uid: str, partition: MigPartition) -> MigDevice:
        """Blocks. Remembers that something may be at the place, even if the claim is given up by then."""
        key, by = (uid, partition), self._need_partitioner(partition.gpu)
        try:
            made = by.make(partition, began=key in self._begun)
        except PlaceTaken:
            raise
        except BaseException:
            self._begun.add(key)
            raise
        self._begun.add(key)
        return made

    def _destroy_own(self, uid: str, partition: MigPartition) -> None:
        """Blocks. A claim is recorded before its device is made: one that is not seen here makes it later."""
        if (uid, partition) in self._begun and not has_another_claim(uid, partition, self._claims()):
            self._need_partitioner(partition.gpu).destroy(partition)

    def _release_own(self, uid: str, address: str) -> bool:
        """Blocks. The same for a GPU of a virtual machine. Returns False if another claim has it by now."""
        others = [kept for kept in self._claims() if kept.ref.uid != uid and not kept.undoing]
        if address in passed_through(others):
            return False
        self._need_binder(address).release(address)
        return True

    def _adopted_by(self, uid: str) -> tuple[AdoptedMpsDaemon, ...]:
        found = (_recorded_sharing(entry) for entry in self._claims() if entry.ref.uid == uid)
        return tuple(daemon for plan in found for daemon in plan.adopted)

    def _need_partitioner(self, uuid: str) -> GpuPartitioner:
        if self._partitioner is None:
            raise Refused(
                f"a claim has a MIG device on GPU {uuid} that was made on demand",
                nearest_fix="start the plugin without --inventory-file until the claim has ended",
            )
        return self._partitioner

    def _need_binder(self, address: str) -> PciBinder:
        if self._binder is None:
            raise Refused(
                f"a claim has GPU {address}, which was bound to vfio-pci for it",
                nearest_fix="start the plugin without --inventory-file until the claim has ended",
            )
        return self._binder

    async def _change_gpu(self, uuid: str, change: Callable[[], T]) -> T:
        """Run a blocking change of a GPU: one at a time, and to its end before a cancellation goes on."""
        async with self._changing.setdefault(uuid, asyncio.Lock()):
            return await to_the_end(asyncio.to_thread(change))

    async def _base_ids(self, wanted: Sequence[ClaimedGpu]) -> tuple[str, ...]:
        """CDI ids of the driver's files, which a GPU that is passed through does not need."""
        if self._driver is None or all(target.device.vfio is not None for target in wanted):
            return ()
        return await self._driver.ids()

    def _device(self, target: ClaimedGpu, sharing: SharingPlan, base: tuple[str, ...]) -> PreparedDevice:
        device, daemon = target.device, mps_daemon_of(target, sharing)
        kind = VFIO_KIND if device.vfio is not None else GPU_KIND if device.mig is None else MIG_KIND
        through = ContainerEdits() if daemon is None else self._mps.edits(daemon.name)
        return PreparedDevice(
            result=target.result,
            kind=kind,
            edits=ContainerEdits(
                env=("NVIDIA_VISIBLE_DEVICES=void", *through.env),
                device_nodes=self._nodes(target),
                mounts=through.mounts,
            ),
            shared_cdi_ids=() if kind == VFIO_KIND else base,
        )

    def _nodes(self, target: ClaimedGpu) -> tuple[DeviceNode, ...]:
        device, files = target.device, self._settings.files
        if device.vfio is not None:
            return tuple(map(files.existing, vfio_device_files(device.vfio, iommu_of_claimed(target))))
        if device.condition is None:
            return ()
        gpu = device.condition.gpu
        return files.of_gpu(gpu) if device.mig is None else files.of_mig(gpu, device.mig)


def _partitions(wanted: Sequence[ClaimedGpu]) -> tuple[MigPartition, ...]:
    found = (target.device.partition for target in wanted)
    return tuple(partition for partition in found if partition is not None)


def _switchable(wanted: Sequence[ClaimedGpu]) -> tuple[VfioGpu, ...]:
    found = (target.device.vfio for target in wanted)
    return tuple(vfio for vfio in found if vfio is not None and vfio.switchable)


def _is_whole(target: ClaimedGpu) -> bool:
    device = target.device
    return device.condition is not None and device.mig is None and device.partition is None


def _recorded_sharing(entry: CheckpointEntry) -> SharingPlan:
    return msgspec.convert(entry.record.get("sharing", {}), SharingPlan)
