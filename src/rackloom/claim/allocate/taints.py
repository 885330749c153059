"""Which taints keep a device from a request."""

from collections.abc import Iterable

from rackloom.claim.allocate.objects import Device, DeviceTaint, DeviceToleration

_BLOCKING = ("NoSchedule", "NoExecute")
"""The other effects (None, and any that a later version adds) inform and do not block."""


def blocking_taint(device: Device, tolerations: Iterable[DeviceToleration]) -> DeviceTaint | None:
    """The first taint that the tolerations do not cover."""
    accepted = tuple(tolerations)
    for taint in device.taints:
        if taint.effect in _BLOCKING and not any(_tolerates(one, taint) for one in accepted):
            return taint
    return None


def _tolerates(toleration: DeviceToleration, taint: DeviceTaint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator in ("", "Equal"):
        return toleration.value == taint.value
    return toleration.operator == "Exists"
