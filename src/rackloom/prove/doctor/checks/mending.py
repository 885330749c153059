"""What to do about a device that is sick or gone: move who has it, or where they cannot go, heal it first."""

from rackloom.prove.doctor.checks.reach import Reach
from rackloom.prove.picture.values import DeviceSeen, DeviceUse

_WHEN_WELL = "its plugin takes the taint away when it is well"
_REBOOTS = ("gpu.nvidia.com/gpu-lost", "gpu.nvidia.com/recovery=node-reboot")
"""Taints of a GPU that only its machine's start brings back: what is off its bus cannot be reset."""
_RESETS = ("gpu.nvidia.com/xid=", "gpu.nvidia.com/recovery=gpu-reset")
"""Those of one that a reset brings back, which the driver refuses while any process has it open."""


def mend(device: DeviceSeen, use: DeviceUse | None, reach: Reach) -> str:
    """The fix of a device with a taint."""
    if use is None or not use.pods:
        look = f"kubectl get resourceslices -o yaml --field-selector spec.nodeName={device.node}"
        return f"{look}  # see to the device: {_WHEN_WELL}"
    places = [reach.place_for(pod, device.node) for pod in use.pods]
    if all(places):
        return f"{delete(use)}  # made anew, it gets {places[0]}; then see to the device: {_WHEN_WELL}"
    return _heal_first(device, use, reach)


def delete(use: DeviceUse) -> str:
    """Commands that end the pods which have a device; empty where there is none."""
    return " && ".join(f"kubectl -n {pod.replace('/', ' delete pod ')}" for pod in use.pods)


def stands_still(use: DeviceUse, node: str, reach: Reach) -> str:
    """Why no pod that has the device goes on elsewhere, in words."""
    cliques = sorted({clique for pod in use.pods if (clique := reach.clique_of(pod, node))})
    return f"no free tray in the clique {', '.join(cliques)}" if cliques else "no other node has as much free"


def _heal_first(device: DeviceSeen, use: DeviceUse, reach: Reach) -> str:
    """In this order: newcomers stay away, whoever has it lets go, and it is healed.

    Its job may come back only then: a node that is to start anew still takes pods until it goes.
    """
    begin = f"kubectl cordon {device.node} && {delete(use)}"
    why = f"{stands_still(use, device.node, reach)}: the job stands still until the device is well"
    afterwards = f"then kubectl uncordon {device.node}"
    heal = _heal(device)
    if not heal:
        return f"{begin}  # {why}; see to it, {afterwards}"
    on_node = (
        f"kubectl debug node/{device.node} -it --profile=sysadmin --image=busybox -- chroot /host {heal}"
    )
    return f"{begin} && {on_node}  # {why}, {afterwards}"


def _heal(device: DeviceSeen) -> str:
    """A command of its machine; empty where none is known."""
    if any(one.startswith(_REBOOTS) for one in device.taints):
        return "systemctl reboot"
    address = device.key.pci_address
    if address is not None and any(one.startswith(_RESETS) for one in device.taints):
        return f"nvidia-smi --gpu-reset -i {address.value}"
    return ""
