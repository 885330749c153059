"""How each GPU is, from what was read and what happened; and the taints and the health that follow.

A taint goes away with its reason. A GPU that answers again is not lost. An error is over when the driver asks
for no recovery any more and the error did not come again for a while. A driver that does not tell what it
asks for is believed once the GPU was away in between, as after a reset.
Source of the taint keys and of the harmless XIDs: NVIDIA's DRA driver for GPUs, 0.5.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from rackloom.claim.allocate.objects import DeviceTaint
from rackloom.claim.node.gpu.inventory import Gpu, Inventory, Mig, Recovery, Vfio, Xid
from rackloom.claim.node.values import Health, Value

XID_TAINT = "gpu.nvidia.com/xid"
LOST_TAINT = "gpu.nvidia.com/gpu-lost"
UNMONITORED_TAINT = "gpu.nvidia.com/unmonitored"
FABRIC_TAINT = "gpu.nvidia.com/fabric"
RECOVERY_TAINT = "gpu.nvidia.com/recovery"
HARMLESS_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors of the program that uses the GPU, not of the GPU."""
QUIET_SECONDS = 300.0
"""Without the error, before it is over."""
NO_SCHEDULE = "NoSchedule"
NO_EFFECT = "None"
"""For people to read; nothing is kept off the device."""


class Condition(Value, frozen=True, kw_only=True):
    """What is known of one GPU. Times are seconds since the epoch."""

    gpu: Gpu
    """As it last answered."""
    lost_since: float | None = None
    xids: Mapping[int, float] = {}
    """When each error was last seen, until it is over."""
    monitored: bool = True


Conditions = Mapping[str, Condition]
"""By UUID."""


class Known(Value, frozen=True, kw_only=True):
    """What a device's name stands for: a whole GPU, a MIG device of one, or one that is passed through."""

    condition: Condition | None = None
    mig: Mig | None = None
    vfio: Vfio | None = None

    @property
    def uuid(self) -> str:
        """By which the driver's programs name the device; nothing for one that is passed through."""
        if self.mig is not None:
            return self.mig.uuid
        return "" if self.condition is None else self.condition.gpu.uuid


class Look(Value, frozen=True, kw_only=True):
    """What one look found. `unmonitored` are the UUIDs of GPUs whose errors cannot be listened to."""

    inventory: Inventory
    unmonitored: frozenset[str] = frozenset()
    at: float


def looked(known: Conditions, look: Look, harmless: frozenset[int]) -> Conditions:
    """After a look. A GPU that was there before and does not answer is lost."""
    answering = {gpu.uuid: _answered(known.get(gpu.uuid), gpu, look, harmless) for gpu in look.inventory.gpus}
    silent = {uuid: _silent(one, look.at) for uuid, one in known.items() if uuid not in answering}
    return {**answering, **silent}


def struck(known: Conditions, xids: Iterable[Xid], now: float) -> Conditions:
    """After errors. One of a GPU that is not known says nothing: the next look finds the GPU."""
    found = dict(known)
    for xid in xids:
        one = found.get(xid.uuid)
        if one is not None:
            found[xid.uuid] = msgspec.structs.replace(one, xids={**one.xids, xid.number: now})
    return found


def taints_of(one: Condition, harmless: frozenset[int]) -> tuple[DeviceTaint, ...]:
    """The marks of a device; at most one for each key and effect."""
    return tuple(_taints(one, harmless))


def health_of(one: Condition, harmless: frozenset[int]) -> tuple[Health, str]:
    """Health as kubelet is told, and why."""
    if one.lost_since is not None:
        return Health.UNHEALTHY, "the GPU does not answer any more"
    critical = _critical(one, harmless)
    if critical:
        return Health.UNHEALTHY, f"XID {', '.join(map(str, critical))}"
    if one.gpu.recovery:
        return Health.UNHEALTHY, f"the driver asks for {_asked_for(one.gpu.recovery)}"
    if one.gpu.fabric_health is Health.UNHEALTHY:
        return Health.UNHEALTHY, one.gpu.fabric_message
    if not one.monitored:
        return Health.UNKNOWN, "the errors of this GPU cannot be listened to"
    return Health.HEALTHY, ""


def _answered(before: Condition | None, gpu: Gpu, look: Look, harmless: frozenset[int]) -> Condition:
    xids = {} if before is None else _lasting(before, gpu.recovery, look.at, harmless)
    return Condition(gpu=gpu, xids=xids, monitored=gpu.uuid not in look.unmonitored)


def _silent(one: Condition, now: float) -> Condition:
    return one if one.lost_since is not None else msgspec.structs.replace(one, lost_since=now)


def _lasting(
    before: Condition, recovery: Recovery | None, now: float, harmless: frozenset[int]
) -> Mapping[int, float]:
    """Errors of before that are not over."""
    if recovery:
        return before.xids
    if before.lost_since is not None:
        return {}
    return {
        xid: at
        for xid, at in before.xids.items()
        if now - at < QUIET_SECONDS or (recovery is None and xid not in harmless)
    }


def _taints(one: Condition, harmless: frozenset[int]) -> Iterator[DeviceTaint]:
    if one.lost_since is not None:
        yield DeviceTaint(key=LOST_TAINT, effect=NO_SCHEDULE)
    critical = _critical(one, harmless)
    if critical:
        yield DeviceTaint(key=XID_TAINT, value=str(critical[0]), effect=NO_SCHEDULE)
    ignored = [xid for xid in _newest(one) if xid not in critical]
    if ignored:
        yield DeviceTaint(key=XID_TAINT, value=str(ignored[0]), effect=NO_EFFECT)
    if one.gpu.recovery:
        yield DeviceTaint(key=RECOVERY_TAINT, value=_asked_for(one.gpu.recovery), effect=NO_SCHEDULE)
    if one.gpu.fabric_health is Health.UNHEALTHY:
        yield DeviceTaint(key=FABRIC_TAINT, value="unhealthy", effect=NO_SCHEDULE)
    if not one.monitored:
        yield DeviceTaint(key=UNMONITORED_TAINT, effect=NO_EFFECT)


def _critical(one: Condition, harmless: frozenset[int]) -> list[int]:
    return [xid for xid in _newest(one) if xid not in harmless]


def _newest(one: Condition) -> list[int]:
    return sorted(one.xids, key=lambda xid: (-one.xids[xid], xid))


def _asked_for(recovery: Recovery) -> str:
    return recovery.name.lower().replace("_", "-")
