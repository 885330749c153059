"""What a claim wants of its GPUs: which devices, and how each is shared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rackloom.claim.node.gpu.condition import Known
from rackloom.claim.node.values import Claim, Config, Result, Value
from rackloom.claim.opaque.gpu import (
    DeviceConfig,
    GpuConfig,
    Iommu,
    MigDeviceConfig,
    Mps,
    Strategy,
    VfioDeviceConfig,
    decode_gpu_config,
    pinned_memory_limits,
)
from rackloom.errors import Refused, Retry

LOST_RETRY_SECONDS = 3.0
_KINDS: Mapping[type[DeviceConfig], str] = {
    GpuConfig: "a whole GPU",
    MigDeviceConfig: "a MIG device",
    VfioDeviceConfig: "a GPU that is passed through",
}


class Target(Value, frozen=True, kw_only=True):
    """One device of the claim, and the configuration that won."""

    result: Result
    known: Known
    config: DeviceConfig


class Daemon(Value, frozen=True, kw_only=True):
    """An MPS daemon, for the devices of a claim that have one configuration. JSON in the checkpoint."""

    name: str
    """`<claim UID>-<number>`."""
    uuids: tuple[str, ...]
    threads_percent: int | None = None
    memory_limits: Mapping[str, str] = {}
    """By UUID: `953M`."""
    multi_user: bool = False


class Sharing(Value, frozen=True, kw_only=True):
    """How the devices of a claim are shared, in what has to be done and undone. JSON in the checkpoint."""

    time_slices: Mapping[str, int] = {}
    """nvidia-smi's number of the time slice, by GPU."""
    exclusive: tuple[str, ...] = ()
    """GPUs that MPS alone may use meanwhile."""
    daemons: tuple[Daemon, ...] = ()


def targets(claim: Claim, find: Callable[[str], Known | None]) -> tuple[Target, ...]:
    """The devices of `claim`.

    Raises `Refused` for a configuration that is wrong, or for another kind of device; `Retry` while a device
    is not there.
    """
    decoded = [(config, decode_gpu_config(config.parameters)) for config in claim.configs]
    return tuple(_target(result, _found(result, find), decoded) for result in claim.results)


def sharing_of(claim_uid: str, wanted: Sequence[Target]) -> Sharing:
    """What the configurations ask to be done. Raises `Refused` for limits of GPUs that are not there."""
    slices = {one.known.uuid: number for one in wanted if (number := _time_slice(one)) is not None}
    groups: list[tuple[Mps, list[Target]]] = []
    for one in wanted:
        mps = _mps(one)
        if mps is not None:
            _group(groups, mps).append(one)
    members = [one for _, group in groups for one in group]
    return Sharing(
        time_slices=slices,
        exclusive=tuple(one.known.uuid for one in members if one.known.mig is None),
        daemons=tuple(
            _daemon(f"{claim_uid}-{number}", mps, group) for number, (mps, group) in enumerate(groups)
        ),
    )


def daemon_of(target: Target, sharing: Sharing) -> Daemon | None:
    """The MPS daemon that a device is used through."""
    if target.result.admin_access:
        return None
    return next((one for one in sharing.daemons if target.known.uuid in one.uuids), None)


def iommu_of(target: Target) -> Iommu:
    """How a passed-through GPU is given."""
    config = target.config
    return (config.iommu if isinstance(config, VfioDeviceConfig) else None) or Iommu()


def _found(result: Result, find: Callable[[str], Known | None]) -> Known:
    known = find(result.device)
    if known is None:
        raise Retry(f"device {result.device} is not on this node now", after=LOST_RETRY_SECONDS)
    if known.condition is not None and known.condition.lost_since is not None:
        raise Retry(f"device {result.device} does not answer", after=LOST_RETRY_SECONDS)
    return known


def _target(result: Result, known: Known, configs: Sequence[tuple[Config, DeviceConfig]]) -> Target:
    shape = _shape(known)
    winner: DeviceConfig = shape()
    for written, config in configs:
        if not written.applies_to(result):
            continue
        if isinstance(config, shape):
            _refuse_for_admins(result, written, config)
            _refuse_for_shares(result, config)
            winner = config
        elif written.requests:
            raise Refused(
                f"{type(config).__name__} cannot be applied to request {result.request}, whose device"
                f" {result.device} is {_KINDS[shape]}",
                nearest_fix=f"use {shape.__name__} for it",
            )
    return Target(result=result, known=known, config=GpuConfig() if result.admin_access else winner)


def _shape(known: Known) -> type[DeviceConfig]:
    if known.vfio is not None:
        return VfioDeviceConfig
    return GpuConfig if known.mig is None else MigDeviceConfig


def _refuse_for_admins(result: Result, written: Config, config: DeviceConfig) -> None:
    """An observer must not change how its users share a GPU; a class may say so of all its devices."""
    if result.admin_access and written.requests and getattr(config, "sharing", None) is not None:
        raise Refused(
            f"request {result.request} has adminAccess and asks for sharing",
            nearest_fix="leave the sharing to the claim that uses the device",
        )


def _refuse_for_shares(result: Result, config: DeviceConfig) -> None:
    """Time slices and MPS are of a whole GPU: one claim would set them for all that have a share of it."""
    if result.share_id is not None and getattr(config, "sharing", None) is not None:
        raise Refused(
            f"request {result.request} has a share of {result.device} and asks for sharing settings",
            nearest_fix="leave sharing out of its configuration; --consumable-shares is for GPUs without",
        )


def _sharing(one: Target) -> Any:
    return getattr(one.config, "sharing", None)


def _time_slice(one: Target) -> int | None:
    """A MIG device has no time slices of its own: there TimeSlicing changes nothing."""
    sharing = _sharing(one)
    if not isinstance(one.config, GpuConfig) or sharing is None:
        return None
    if sharing.strategy is not Strategy.TIME_SLICING:
        return None
    slicing = sharing.time_slicing_config
    return 0 if slicing is None else int(slicing.interval.number)


def _mps(one: Target) -> Mps | None:
    sharing = _sharing(one)
    if sharing is None or sharing.strategy is not Strategy.MPS:
        return None
    return sharing.mps_config or Mps()


def _group(groups: list[tuple[Mps, list[Target]]], mps: Mps) -> list[Target]:
    for known, members in groups:
        if known == mps:
            return members
    groups.append((mps, []))
    return groups[-1][1]


def _daemon(name: str, mps: Mps, group: Sequence[Target]) -> Daemon:
    uuids = tuple(one.known.uuid for one in group)
    return Daemon(
        name=name,
        uuids=uuids,
        threads_percent=mps.default_active_thread_percentage,
        memory_limits=pinned_memory_limits(mps, uuids),
        multi_user=bool(mps.multi_user),
    )
