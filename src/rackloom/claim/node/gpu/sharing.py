"""How the GPUs of a claim are shared: configuration, time slices, compute mode and MPS daemons.

`claimed_gpus` matches each allocated device with the last configuration that fits its kind. It refuses a
configuration for another kind of device, sharing settings with adminAccess (an observer must not change
how users share a GPU), and sharing settings on a consumable share (they would apply to all holders of the
GPU).

`plan_sharing` turns that into a `SharingPlan`: time slices by GPU, GPUs in exclusive compute mode, and
one MPS daemon for all devices of the claim with equal MPS settings. The plan is stored in the checkpoint,
so it can be undone. `apply_sharing` and `undo_sharing` carry it out with `nvidia-smi compute-policy
--set-timeslice` (0 is the default), `nvidia-smi -c`, and the daemons of `mps`. Each step can be repeated. A
GPU that is gone has lost its settings.

Source: nvidia-smi's documentation.
"""

from collections.abc import Callable, Mapping, Sequence

from rackloom.claim.node.gpu.adopted_mps import AdoptedMpsDaemon, AdoptedMpsDaemons
from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.monitor import PublishedGpu
from rackloom.claim.node.gpu.mps import MpsDaemon, MpsDaemons
from rackloom.claim.node.plugin import NodeValue
from rackloom.core.cluster.claims import AllocatedClaim, AllocatedDevice, OpaqueConfig
from rackloom.core.cluster.device_configs import (
    GpuConfig,
    GpuDeviceConfig,
    IommuConfig,
    MigDeviceConfig,
    MpsConfig,
    SharingStrategy,
    VfioDeviceConfig,
    decode_gpu_config,
    pinned_memory_limits,
)
from rackloom.errors import Refused, Retry

# The requests of a claim: devices, configurations, and the plan that follows. Pure.


LOST_RETRY_SECONDS = 3.0
_KINDS: Mapping[type[GpuDeviceConfig], str] = {
    GpuConfig: "a whole GPU",
    MigDeviceConfig: "a MIG device",
    VfioDeviceConfig: "a GPU that is passed through",
}


class ClaimedGpu(NodeValue, frozen=True, kw_only=True):
    """One device of the claim, and the configuration that won."""

    result: AllocatedDevice
    device: PublishedGpu
    config: GpuDeviceConfig


class SharingPlan(NodeValue, frozen=True, kw_only=True):
    """The sharing of a claim's devices, as actions to do and undo. JSON in the checkpoint."""

    time_slices: Mapping[str, int] = {}
    """nvidia-smi's number of the time slice, by GPU."""
    exclusive: tuple[str, ...] = ()
    """GPUs in exclusive compute mode: only MPS may use them."""
    daemons: tuple[MpsDaemon, ...] = ()
    adopted: tuple[AdoptedMpsDaemon, ...] = ()
    """Daemons that NVIDIA's driver started, if the claim was taken over from it."""


def claimed_gpus(claim: AllocatedClaim, find: Callable[[str], PublishedGpu | None]) -> tuple[ClaimedGpu, ...]:
    """The devices of `claim`.

    Raises `Refused` if a configuration is wrong or is for another kind of device, and `Retry` while a device
    is not there.
    """
    decoded = [(config, decode_gpu_config(config.parameters)) for config in claim.configs]
    return tuple(_claimed_gpu(result, _find_device(result, find), decoded) for result in claim.results)


def plan_sharing(claim_uid: str, wanted: Sequence[ClaimedGpu]) -> SharingPlan:
    """The sharing that the configurations request. Raises `Refused` for limits of GPUs that are absent."""
    slices = {gpu.device.uuid: number for gpu in wanted if (number := _time_slice_number(gpu)) is not None}
    # MpsConfig cannot be hashed, so equal settings are found by comparing.
    groups: list[tuple[MpsConfig, list[ClaimedGpu]]] = []
    for gpu in wanted:
        mps = _mps_settings(gpu)
        if mps is not None:
            same = next((group for settings, group in groups if settings == mps), None)
            if same is None:
                groups.append((mps, [gpu]))
            else:
                same.append(gpu)
    members = [gpu for _, group in groups for gpu in group]
    daemons = (_mps_daemon(f"{claim_uid}-{number}", *group) for number, group in enumerate(groups))
    return SharingPlan(
        time_slices=slices,
        exclusive=tuple(member.device.uuid for member in members if member.device.mig is None),
        daemons=tuple(daemons),
    )


def mps_daemon_of(target: ClaimedGpu, sharing: SharingPlan) -> MpsDaemon | None:
    """The MPS daemon that a device is used through."""
    if target.result.admin_access:
        return None
    return next((daemon for daemon in sharing.daemons if target.device.uuid in daemon.uuids), None)


def iommu_of_claimed(target: ClaimedGpu) -> IommuConfig:
    """How a passed-through GPU is presented to the container."""
    config = target.config
    return (config.iommu if isinstance(config, VfioDeviceConfig) else None) or IommuConfig()


def _find_device(result: AllocatedDevice, find: Callable[[str], PublishedGpu | None]) -> PublishedGpu:
    device = find(result.device)
    if device is None:
        raise Retry(f"device {result.device} is not on this node now", after=LOST_RETRY_SECONDS)
    if device.condition is not None and device.condition.lost_since is not None:
        raise Retry(f"device {result.device} does not answer", after=LOST_RETRY_SECONDS)
    return device


def _claimed_gpu(
    result: AllocatedDevice, device: PublishedGpu, configs: Sequence[tuple[OpaqueConfig, GpuDeviceConfig]]
) -> ClaimedGpu:
    # A MIG device that a claim has made belongs to it alone, and goes with it.
    if result.admin_access and device.partition is not None:
        raise Refused(
            f"request {result.request} has adminAccess to {result.device}, which is made for one claim alone",
            nearest_fix="ask for the whole GPU with adminAccess",
        )
    shape = _config_type(device)
    winner: GpuDeviceConfig = shape()
    for written, config in configs:
        if not written.applies_to(result):
            continue
        if isinstance(config, shape):
            _check_sharing(result, device, written, config)
            winner = config
        elif written.requests:
            raise Refused(
                f"{type(config).__name__} cannot be applied to request {result.request}, whose device"
                f" {result.device} is {_KINDS[shape]}",
                nearest_fix=f"use {shape.__name__} for it",
            )
    return ClaimedGpu(result=result, device=device, config=GpuConfig() if result.admin_access else winner)


def _config_type(device: PublishedGpu) -> type[GpuDeviceConfig]:
    if device.vfio is not None:
        return VfioDeviceConfig
    return GpuConfig if device.mig is None and device.partition is None else MigDeviceConfig


def _check_sharing(
    result: AllocatedDevice, device: PublishedGpu, written: OpaqueConfig, config: GpuDeviceConfig
) -> None:
    sharing = getattr(config, "sharing", None)
    if sharing is None:
        return
    # A daemon is started with the UUIDs of its devices, which are recorded before anything is done.
    if device.partition is not None and sharing.strategy is SharingStrategy.MPS:
        raise Refused(
            f"request {result.request} asks for MPS on {result.device}, which is made for its claim",
            nearest_fix="use MPS on whole GPUs, or on MIG devices that the operator has made",
        )
    # An observer must not change how users share a GPU. A class's config for all devices is ignored.
    if result.admin_access and written.requests:
        raise Refused(
            f"request {result.request} has adminAccess and asks for sharing",
            nearest_fix="leave the sharing to the claim that uses the device",
        )
    # Time slices and MPS apply to the whole GPU: one claim would set them for all holders of a share.
    if result.share_id is not None:
        raise Refused(
            f"request {result.request} has a share of {result.device} and asks for sharing settings",
            nearest_fix="leave sharing out of its configuration; --consumable-shares is for GPUs without",
        )


def _time_slice_number(gpu: ClaimedGpu) -> int | None:
    """None also for a MIG device: it has no time slices, so TimeSlicing changes nothing there."""
    sharing = gpu.config.sharing if isinstance(gpu.config, GpuConfig) else None
    if sharing is None or sharing.strategy is not SharingStrategy.TIME_SLICING:
        return None
    slicing = sharing.time_slicing_config
    return 0 if slicing is None else int(slicing.interval.number)


def _mps_settings(gpu: ClaimedGpu) -> MpsConfig | None:
    sharing = getattr(gpu.config, "sharing", None)
    if sharing is None or sharing.strategy is not SharingStrategy.MPS:
        return None
    return sharing.mps_config or MpsConfig()


def _mps_daemon(name: str, mps: MpsConfig, group: Sequence[ClaimedGpu]) -> MpsDaemon:
    uuids = tuple(gpu.device.uuid for gpu in group)
    return MpsDaemon(
        name=name,
        uuids=uuids,
        threads_percent=mps.default_active_thread_percentage,
        memory_limits=pinned_memory_limits(mps, uuids),
        multi_user=bool(mps.multi_user),
    )


# Carrying a plan out, and undoing it.


DEFAULT_TIME_SLICE = 0
SHARED_MODE, EXCLUSIVE_MODE = "DEFAULT", "EXCLUSIVE_PROCESS"


async def apply_sharing(wanted: SharingPlan, programs: DriverPrograms, daemons: MpsDaemons) -> None:
    """Carry the plan out. Raises `Retry` with the output of a failed program, or `Refused`."""
    # nvidia-smi accepts a setting that is in force: each command can be repeated after a crash.
    for uuid, number in wanted.time_slices.items():
        await programs.run(*compute_mode_command(uuid, SHARED_MODE))
        await programs.run(*time_slice_command(uuid, number))
    for uuid in wanted.exclusive:
        await programs.run(*compute_mode_command(uuid, EXCLUSIVE_MODE))
    for daemon in wanted.daemons:
        await daemons.ensure(daemon)


async def undo_sharing(
    done: SharingPlan,
    programs: DriverPrograms,
    daemons: MpsDaemons,
    adopted: AdoptedMpsDaemons,
    answers: Callable[[str], bool],
) -> None:
    """Undo `apply_sharing`, finished or not. A GPU that is gone has lost its settings."""
    for foreign in done.adopted:
        await adopted.end(foreign)
    for daemon in done.daemons:
        await daemons.stop(daemon.name)
    for uuid in filter(answers, done.exclusive):
        await programs.run(*compute_mode_command(uuid, SHARED_MODE))
    for uuid in filter(answers, done.time_slices):
        await programs.run(*time_slice_command(uuid, DEFAULT_TIME_SLICE))


def time_slice_command(uuid: str, number: int) -> tuple[str, ...]:
    """Sets the time slice of one GPU."""
    return ("nvidia-smi", "compute-policy", "-i", uuid, "--set-timeslice", str(number))


def compute_mode_command(uuid: str, mode: str) -> tuple[str, ...]:
    """Opens one GPU to all processes, or to a single one (which is then MPS)."""
    return ("nvidia-smi", "-i", uuid, "-c", mode)
