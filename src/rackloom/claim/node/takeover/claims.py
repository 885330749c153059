"""The plan that moves claims from one driver's checkpoint to the other's, and the blocked claims. Pure.

A claim that is taken over keeps its state, its devices with their CDI ids, and the data for its undo
(`record`): the node label of a channel's ComputeDomain, the time slices of GPUs, the MPS daemons that
NVIDIA's driver has started in its namespace, the exclusive mode of their GPUs, and the GPUs that it has bound
to vfio-pci. The CDI ids and the names of CDI files are the same in both drivers, so the files that running
containers use stay as they are.

A claim is blocked if taking it over would leave something behind that our plugin does not undo (a GPU
bound to vfio-pci without a recorded address, the MPS daemon of a claim that has no name), or if a
device is not known. One blocked claim blocks the takeover of its driver. A claim is left out if neither
NVIDIA's driver nor kubelet has a name for it: no pod here uses it.

NVIDIA's GPU plugin records no names of prepared claims, so `ClaimNames` comes from kubelet's own state.

On the way back, a claim that was taken over is written as the bytes that it had. Its bytes are made again
only if its state changed, or if our plugin prepared it. Anything that NVIDIA's driver could not undo
(isolated channels, sharing of GPUs that our plugin has set up) blocks the way back. Claims that were aborted
are forgotten: no call for them is under way while no plugin runs.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rackloom.claim.node.gpu.adopted_mps import AdoptedMpsDaemon
from rackloom.claim.node.gpu.inventory import PASSED_THROUGH, PERSISTENT, UUIDS
from rackloom.claim.node.plugin import CheckpointEntry, NodeValue, PrepareState, ReadyDevice
from rackloom.claim.node.takeover.nvidia_checkpoint import (
    NvidiaCheckpoint,
    NvidiaClaim,
    NvidiaDevice,
    NvidiaDeviceGroup,
    go_json,
    with_texts,
)
from rackloom.core.cluster import names
from rackloom.core.cluster.claims import AllocatedClaim, ClaimRef, OpaqueConfig, read_claim
from rackloom.core.cluster.device_configs import (
    ChannelConfig,
    DaemonConfig,
    GpuConfig,
    GpuSharing,
    MigDeviceConfig,
    MigSharing,
    SharingStrategy,
    decode_gpu_config,
    decode_imex_config_leniently,
    imex_config_json,
)
from rackloom.errors import Refused
from rackloom.runtime.foreign_text import decode_json

# Plans for claims.


class Fate(StrEnum):
    """The outcome of a plan for a claim."""

    MOVED = "moved"
    LEFT_OUT = "left-out"
    BLOCKED = "blocked"


class ClaimMove(NodeValue, frozen=True, kw_only=True):
    """One claim of a plan, as it is printed."""

    uid: str
    claim: str
    """`namespace/name`. Empty if it is not known."""
    state: PrepareState
    devices: tuple[str, ...]
    fate: Fate
    why: str = ""
    fix: str = ""


class NvidiaInstallation(NodeValue, frozen=True, kw_only=True):
    """Data about NVIDIA's driver on this node that the checkpoint lacks."""

    namespace: str
    """The namespace of its pods, and of its MPS daemons."""
    has_module: bool
    """Whether its kernel module is loaded."""


ClaimNames = Mapping[str, ClaimRef]
"""The claims that kubelet holds on this node, by UID."""

_DRIVERS_KINDS = {
    names.IMEX_DRIVER: frozenset({"channel", "daemon"}),
    names.GPU_DRIVER: frozenset({"gpu", "mig", "vfio"}),
}
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DAEMON_ID = re.compile(r"[0-9A-Za-z-]{1,120}")
_END_PODS = "end the pods that use it first"


class _Blocked(Exception):
    """The reason why a claim cannot be moved, and the remedy."""

    def __init__(self, why: str, fix: str = _END_PODS) -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


def _blocked(move: ClaimMove, why: _Blocked) -> ClaimMove:
    return msgspec.structs.replace(move, fate=Fate.BLOCKED, why=why.why, fix=why.fix)


# From NVIDIA's driver to ours.


def take_over_claim(
    driver: str, claim: NvidiaClaim, known: ClaimNames | None, installed: NvidiaInstallation
) -> tuple[ClaimMove, CheckpointEntry | None]:
    """The plan for one claim of `driver`, and our entry of it if it is moved.

    `known` is None if kubelet's state cannot be read.
    """
    ref = _reference(claim, known or {})
    move = ClaimMove(
        uid=claim.uid,
        claim="" if ref is None else str(ref),
        state=claim.state,
        devices=tuple(device.device for device in claim.devices),
        fate=Fate.MOVED,
    )
    if ref is None and known is not None:
        why = "kubelet does not hold it, so no pod here uses it, and NVIDIA's driver did not record its name"
        if any(map(_uses_mps, claim.groups)):
            # Nothing would end the daemon. NVIDIA's driver gives such claims up without help.
            stays = _Blocked(f"{why}; its MPS daemon would stay", "start NVIDIA's driver until it is gone")
            return _blocked(move, stays), None
        return msgspec.structs.replace(move, fate=Fate.LEFT_OUT, why=why), None
    try:
        if ref is None:
            raise _Blocked(
                "NVIDIA's driver did not record its name, and kubelet's state cannot be read",
                "name the file by --kubelet-state",
            )
        return move, _entry(driver, claim, ref, installed)
    except _Blocked as why_not:
        return _blocked(move, why_not), None


def _reference(claim: NvidiaClaim, known: ClaimNames) -> ClaimRef | None:
    if claim.name:
        return ClaimRef(namespace=claim.namespace, name=claim.name, uid=claim.uid)
    return known.get(claim.uid)


def _entry(driver: str, claim: NvidiaClaim, ref: ClaimRef, installed: NvidiaInstallation) -> CheckpointEntry:
    allocated = _allocated(driver, claim, ref)
    admin = {result.device for result in allocated.results if result.admin_access}
    for device in claim.devices:
        _check_device(driver, device)
    record = (
        _imex_record(claim, allocated)
        if driver == names.IMEX_DRIVER
        else _gpu_record(claim, allocated, installed)
    )
    return CheckpointEntry(
        ref=ref,
        state=claim.state,
        fingerprint=allocated.fingerprint,
        devices=tuple(_ready_device(device, device.device in admin) for device in claim.devices),
        record=record,
        aborted_at=claim.aborted_at,
    )


def _allocated(driver: str, claim: NvidiaClaim, ref: ClaimRef) -> AllocatedClaim:
    """Without an allocation, as releases before 25.3 leave it, there are no results and no configurations."""
    obj = {"metadata": {"name": ref.name}, "status": decode_json(claim.status, ref.name)}
    try:
        return read_claim(obj, ref, driver)
    except Refused:
        return AllocatedClaim(ref=ref, results=(), configs=(), fingerprint="")
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise _Blocked(f"its status cannot be read: {error!r}") from error


def _check_device(driver: str, device: NvidiaDevice) -> None:
    known = device.kind in _DRIVERS_KINDS[driver]
    if driver == names.IMEX_DRIVER:
        known = known and device.device in (names.CHANNEL_DEVICE, names.DAEMON_DEVICE)
    if not known:
        raise _Blocked(f"its device {device.device} ({device.kind}) is not known here")
    if device.kind == "vfio" and not _PCI_ADDRESS.fullmatch(device.pci_address):
        raise _Blocked(
            f"NVIDIA's driver may have bound {device.device} to vfio-pci, and its PCI address is not recorded"
        )


def _ready_device(device: NvidiaDevice, admin_access: bool) -> ReadyDevice:
    return ReadyDevice(
        # kubelet gets requests without their subrequest.
        requests=tuple(request.partition("/")[0] for request in device.requests),
        pool=device.pool,
        device=device.device,
        cdi_ids=device.cdi_ids,
        share_id=device.share_id,
        admin_access=admin_access,
        kind=device.kind,
    )


def _imex_record(claim: NvidiaClaim, allocated: AllocatedClaim) -> Mapping[str, Any]:
    """The device's kind and its ComputeDomain: enough to remove the node label."""
    if claim.state is PrepareState.COMPLETED:
        found = {
            (device.kind, group.config.get("ComputeDomain"))
            for group in claim.groups
            for device in group.devices
        }
        kind, domain = found.pop() if len(found) == 1 else ("", "")
        if not domain:
            raise _Blocked("not one device of one ComputeDomain is recorded for it")
        return {"kind": kind, "domain": domain}
    try:
        (result,) = allocated.results
        config = decode_imex_config_leniently(allocated.configs_for(result)[-1].parameters)
    except (Refused, ValueError, IndexError):
        # NVIDIA's driver refuses such a claim before it touches anything.
        return {}
    return {"kind": "channel" if isinstance(config, ChannelConfig) else "daemon", "domain": config.domain_id}


def _gpu_record(
    claim: NvidiaClaim, allocated: AllocatedClaim, installed: NvidiaInstallation
) -> Mapping[str, Any]:
    """How the GPUs are shared and bound, as our plugin records it, as far as there is something to undo."""
    if claim.state is not PrepareState.COMPLETED:
        # The driver records its changes only at the end.
        shares = any(_sharing(config) is not None for config in allocated.configs)
        if shares or any(result.device.startswith("gpu-vfio-") for result in allocated.results):
            raise _Blocked(
                "its prepare was cut off, and NVIDIA's driver may have set up sharing or bound a GPU to"
                " vfio-pci",
                "start NVIDIA's driver until the claim is prepared or gone",
            )
    slices: dict[str, int] = {}
    exclusive: list[str] = []
    daemons: list[AdoptedMpsDaemon] = []
    for group in claim.groups:
        gpus = [device.uuid for device in group.devices if device.kind == "gpu"]
        number = _time_slice(allocated, group)
        if _uses_mps(group):
            daemons.append(AdoptedMpsDaemon(id=_daemon_id(group), namespace=installed.namespace))
            exclusive += gpus
        elif number is not None:
            slices.update(dict.fromkeys(gpus, number))
    found = {"time_slices": slices, "exclusive": exclusive, "adopted": daemons}
    record = {"sharing": msgspec.to_builtins({name: value for name, value in found.items() if value})}
    # NVIDIA's driver binds them to its kernel module if that is loaded, and switches persistence mode on.
    bound = [device.pci_address for device in claim.devices if device.kind == "vfio"]
    return record | {PASSED_THROUGH: bound, PERSISTENT: bound} if bound and installed.has_module else record


def adopted_daemons(entry: CheckpointEntry) -> tuple[AdoptedMpsDaemon, ...]:
    """MPS daemons of NVIDIA's driver that end with a claim."""
    found = entry.record.get("sharing", {}).get("adopted", ())
    return msgspec.convert(found, tuple[AdoptedMpsDaemon, ...])


def _uses_mps(group: NvidiaDeviceGroup) -> bool:
    return bool(group.config.get("mpsControlDaemonID") or group.config.get("mpsApplied"))


def _daemon_id(group: NvidiaDeviceGroup) -> str:
    """The id names a directory of the host."""
    found = group.config.get("mpsControlDaemonID")
    if not isinstance(found, str) or not _DAEMON_ID.fullmatch(found):
        raise _Blocked("it uses MPS, and the id of its daemon is not recorded as it should be")
    return found


def _time_slice(allocated: AllocatedClaim, group: NvidiaDeviceGroup) -> int | None:
    """The number of the time slice of a group's devices, or None if none was set.

    It follows from the configuration that won. Release 0.5 also records whether it was set.
    """
    applied = group.config.get("timeSliceApplied")
    if applied is False:
        return None
    number = 0 if applied else None
    names_here = {device.device for device in group.devices}
    results = [result for result in allocated.results if result.device in names_here]
    for config in (config for result in results[:1] for config in allocated.configs_for(result)):
        sharing = _sharing(config)
        if isinstance(sharing, GpuSharing) and sharing.strategy is SharingStrategy.TIME_SLICING:
            slicing = sharing.time_slicing_config
            number = 0 if slicing is None else slicing.interval.number
        elif not applied:
            number = None
    return number


def _sharing(config: OpaqueConfig) -> GpuSharing | MigSharing | None:
    """None also for a configuration that cannot be read: NVIDIA's driver refuses it first of all."""
    parameters: object = config.parameters
    if not isinstance(parameters, Mapping):
        return None  # The API server takes any JSON.
    try:
        decoded = decode_gpu_config(parameters)
    except Refused:
        return None
    return decoded.sharing if isinstance(decoded, GpuConfig | MigDeviceConfig) else None


# From ours back to NVIDIA's driver.


class Release(StrEnum):
    """Releases of NVIDIA's driver that write GPUs differently."""

    V0_4 = "0.4"
    V0_5 = "0.5"


def give_back_claim(
    driver: str, entry: CheckpointEntry, original: NvidiaCheckpoint, release: Release | None = None
) -> tuple[ClaimMove, NvidiaClaim | None]:
    """The plan for one entry of `driver`, and NVIDIA's claim of it if it is moved.

    `release` is the one that will read it. None means the one that wrote `original`, if the file shows it.
    """
    move = ClaimMove(
        uid=entry.ref.uid,
        claim=str(entry.ref),
        state=entry.state,
        devices=tuple(device.device for device in entry.devices),
        fate=Fate.MOVED,
    )
    if entry.state is PrepareState.ABORTED:
        why = "its prepare was aborted, and no call for it is under way"
        return msgspec.structs.replace(move, fate=Fate.LEFT_OUT, why=why), None
    try:
        return move, _nvidia_claim(driver, entry, original, release)
    except _Blocked as why_not:
        return _blocked(move, why_not), None


def _release(original: NvidiaCheckpoint) -> Release | None:
    """Release 0.4 always writes the id of an MPS daemon, 0.5 only if there is one.

    None if no GPU without such a daemon shows it.
    """
    states = [group.config for claim in original.claims.values() for group in claim.groups]
    plain = ["mpsControlDaemonID" in state for state in states if not state.get("mpsControlDaemonID")]
    if not plain:
        return None
    return Release.V0_4 if all(plain) else Release.V0_5


def _nvidia_claim(
    driver: str, entry: CheckpointEntry, original: NvidiaCheckpoint, release: Release | None
) -> NvidiaClaim:
    before = original.claims.get(entry.ref.uid)
    if before is not None and _is_unchanged(entry, before):
        return before
    if not original.boot_id:
        raise _Blocked(
            "it was prepared since, in a form that this early release of NVIDIA's driver may not read"
        )
    if any(entry.record.get("sharing", {}).values()):
        raise _Blocked("NVIDIA's driver would not undo the sharing that was set up for it")
    made = NvidiaClaim(
        uid=entry.ref.uid,
        state=entry.state,
        status=_status(driver, entry),
        groups=(),
        name=entry.ref.name,
        namespace=entry.ref.namespace,
    )
    if entry.state is not PrepareState.COMPLETED:
        return with_texts(made, b"")
    return with_texts(made, go_json([_group(driver, entry, original, release)]))


def _is_unchanged(entry: CheckpointEntry, before: NvidiaClaim) -> bool:
    """A claim may have been given back and allocated to other devices, or our plugin prepared it again.

    Then its record does not undo the changes of NVIDIA's driver.
    """
    if UUIDS in entry.record:
        return False
    devices = [(device.pool, device.device) for device in entry.devices]
    return entry.state is before.state and devices == [
        (device.pool, device.device) for device in before.devices
    ]


def _status(driver: str, entry: CheckpointEntry) -> bytes:
    """As much of the claim's status as NVIDIA's driver needs to undo it."""
    devices: dict[str, Any] = {}
    results = [_result(driver, device) for device in entry.devices]
    config = _imex_config(entry) if driver == names.IMEX_DRIVER else None
    if config is not None:
        if not results:
            name = names.CHANNEL_DEVICE if isinstance(config, ChannelConfig) else names.DAEMON_DEVICE
            results = [{"request": entry.record["kind"], "driver": driver, "pool": "", "device": name}]
        opaque = {"driver": driver, "parameters": imex_config_json(config)}
        devices = {"config": [{"source": "FromClaim", "opaque": opaque}]}
    if results:
        devices = {"results": results, **devices}
    return go_json({"allocation": {"devices": devices}})


def _result(driver: str, device: ReadyDevice) -> dict[str, Any]:
    result: dict[str, Any] = {
        "request": next(iter(device.requests), ""),
        "driver": driver,
        "pool": device.pool,
        "device": device.device,
    }
    if device.admin_access:
        result["adminAccess"] = True
    if device.share_id is not None:
        result["shareID"] = device.share_id
    return result


def _imex_config(entry: CheckpointEntry) -> ChannelConfig | DaemonConfig:
    kind, domain = entry.record.get("kind"), entry.record.get("domain", "")
    if kind == "channel":
        return ChannelConfig(domain_id=domain)
    if kind == "daemon":
        return DaemonConfig(domain_id=domain)
    raise _Blocked(f"NVIDIA's driver has no device of kind {kind}")


def _group(
    driver: str, entry: CheckpointEntry, original: NvidiaCheckpoint, release: Release | None
) -> dict[str, Any]:
    if driver == names.IMEX_DRIVER:
        config = {"Type": entry.record["kind"], "ComputeDomain": entry.record["domain"]}
        return {"devices": [_imex_device(device) for device in entry.devices], "configState": config}
    shown = _release(original)
    if release is not None and shown not in (None, release):
        raise _Blocked(
            f"the file that was found is of release {shown}, and one release cannot read both",
            "leave out --release, and go back to the release that was here",
        )
    if release is None and shown is None:
        raise _Blocked(
            "the file that was found does not show which release of NVIDIA's driver is to read it",
            "name the release by --release",
        )
    return {
        "devices": [_gpu_device(device, entry.record) for device in entry.devices],
        "configState": {"mpsControlDaemonID": ""} if (release or shown) is Release.V0_4 else {},
    }


def _imex_device(device: ReadyDevice) -> dict[str, Any]:
    part = {"info": {"id": 0}, "device": _listed(device)}
    return {kind: part if kind == device.kind else None for kind in ("channel", "daemon")}


def _gpu_device(device: ReadyDevice, record: Mapping[str, Any]) -> dict[str, Any]:
    uuid = record.get(UUIDS, {}).get(device.device)
    if device.kind != "gpu" or not uuid:
        raise _Blocked(f"NVIDIA's driver needs more of {device.device} than is recorded")
    return {"gpu": {"info": {"uuid": uuid}, "device": _listed(device)}, "mig": None}


def _listed(device: ReadyDevice) -> dict[str, Any]:
    return {
        "Requests": device.requests,
        "PoolName": device.pool,
        "DeviceName": device.device,
        "CDIDeviceIDs": device.cdi_ids,
    }
