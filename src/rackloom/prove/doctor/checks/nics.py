"""NICs: whether their links are up, as fast as their siblings', and used together with their own GPUs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, at_device, at_node, at_pod
from rackloom.prove.doctor.findings import Finding, Severity, fails, unknown
from rackloom.prove.picture.values import DeviceSeen, DeviceUse

_FAR = "SYS"
"""nvidia-smi's letters for a path that crosses the link between processors."""
FAR_APART = "no NIC that may carry data is at their processor: every byte crosses the link between the two"
LINK_UNTOLD = "its driver does not say whether its link is up"
_UP, _UNTOLD = ("up", "active"), "unknown"


def check_nics(view: View) -> Iterator[Finding]:
    """All findings about NICs that serve GPUs. A NIC that serves none is nobody's rail."""
    fastest = _fastest(view.rails.nics)
    for nic in view.rails.nics:
        yield from _link(nic, fastest.get(nic.node, 0), view)
    yield from _far(view)
    yield from _mismatched(view)


def _fastest(nics: Iterable[DeviceSeen]) -> Mapping[str, int]:
    """The rate of each node's fastest rail: the rails of one tray are alike."""
    found: dict[str, int] = {}
    for nic in nics:
        found[nic.node] = max(found.get(nic.node, 0), nic.gbps or 0)
    return found


def trouble_with(link: str | None, gbps: int | None, fastest: int) -> str:
    """What is wrong with a link that should be up, and as fast (Gb/s) as its siblings; empty: nothing."""
    if link is not None and link.lower() not in (*_UP, _UNTOLD):
        return f"its link is {link}"
    if gbps is not None and gbps < fastest:
        return f"it runs at {gbps} Gb/s, its siblings at {fastest}"
    return ""


def is_untold(link: str | None) -> bool:
    """Whether there is a link, and its driver does not say whether it is up."""
    return link is not None and link.lower() == _UNTOLD


def told_by_slice(nic: DeviceSeen) -> str:
    """What its plugin publishes of its link."""
    rate = "no rate" if nic.gbps is None else f"{nic.gbps} Gb/s"
    return f"slice: the link of {nic.name} is {nic.link or 'not told'}, {rate}"


def _link(nic: DeviceSeen, fastest: int, view: View) -> Iterator[Finding]:
    subject, where = f"NIC {nic.node}/{nic.name}", (at_device(nic), *view.at_tray(nic.node))
    told = (
        told_by_slice(nic),
        f"slice: the fastest rail of node {nic.node} has {fastest} Gb/s",
        f"slice: it serves the GPU at {view.rails.served_by(nic)}",
    )
    look = f"kubectl debug node/{nic.node} -it --image=busybox -- chroot /host sh -c 'rdma link; ip -br link'"
    fix = f"{look}  # then its cable and switch port"
    said = trouble_with(nic.link, nic.gbps, fastest)
    if said:
        used = view.uses.get((nic.driver, nic.pool, nic.name)) is not None
        severity = Severity.ERROR if used else Severity.WARNING
        yield fails(names.NIC_LINK, subject, said, fix, severity=severity, evidence=told, where=where)
    elif is_untold(nic.link):
        yield unknown(names.NIC_LINK, subject, LINK_UNTOLD, fix, evidence=told, where=where)


def _far(view: View) -> Iterator[Finding]:
    """GPUs whose own NIC, the nearest there is, is at another processor; those of one processor together."""
    far: defaultdict[tuple[str, int | None], list[tuple[DeviceSeen, DeviceSeen]]] = defaultdict(list)
    for chain in view.chains:
        gpu, nics = chain.device, chain.nics
        if gpu is not None and is_far(gpu, nics):
            far[gpu.node, gpu.numa].extend((gpu, nic) for nic in nics)
    for (node, _), pairs in far.items():
        yield _far_apart(node, pairs, view)


def _far_apart(node: str, pairs: list[tuple[DeviceSeen, DeviceSeen]], view: View) -> Finding:
    devices = tuple(dict.fromkeys(device for pair in pairs for device in pair))
    gpus = dict.fromkeys(gpu.name for gpu, _ in pairs)
    return fails(
        names.NIC_ALIGNED,
        f"GPU {', '.join(gpus)} of node {node}",
        FAR_APART,
        "rackloom topology discover  # on the node: is a nearer NIC missing or excluded?",
        severity=Severity.WARNING,
        evidence=tuple(map(_place, devices)),
        where=(*map(at_device, devices), *view.at_tray(node)),
    )


def is_far(gpu: DeviceSeen, nics: Sequence[DeviceSeen]) -> bool:
    """Whether a GPU has NICs, and the nearest of them is at another processor."""
    return bool(nics) and all(
        are_apart(gpu.numa, nic.numa, (gpu.partner_class, nic.partner_class)) for nic in nics
    )


def are_apart(gpu: int | None, nic: int | None, classes: Iterable[str | None]) -> bool:
    """By the NUMA nodes of both; the classes of the path tell only where one of these is not known.

    On a Grace tray a GPU is behind its own processor without a PCIe tree in common with any NIC, and its path
    is of the farthest class all the same.
    """
    if gpu is not None and nic is not None:
        return gpu != nic
    return _FAR in classes


def _place(device: DeviceSeen) -> str:
    numa = "no NUMA node known" if device.numa is None else f"NUMA node {device.numa}"
    root = "" if device.pcie_root is None else f", PCIe root {device.pcie_root}"
    return f"slice: {device.name} is at {numa}{root}"


def _mismatched(view: View) -> Iterator[Finding]:
    """Pods that were given a NIC of somebody else's GPU while their own GPU's NIC went elsewhere."""
    own = {
        _name(chain.device): set(map(_name, chain.nics))
        for chain in view.chains
        if chain.device and chain.nics
    }
    rails = set(map(_name, view.rails.nics))
    for pod, devices in sorted(_devices_of_pods(view).items()):
        gpus = [one for one in devices if one.kind == "gpu" and _name(one) in own]
        theirs = {nic for one in gpus for nic in own[_name(one)]}
        strange = [one for one in devices if _name(one) in rails - theirs]
        given = {_name(one) for one in devices}
        if strange and any(given.isdisjoint(own[_name(one)]) for one in gpus):
            yield _strangers(pod, gpus, strange)


def _devices_of_pods(view: View) -> Mapping[str, list[DeviceSeen]]:
    found: defaultdict[str, list[DeviceSeen]] = defaultdict(list)
    for use in view.picture.uses:
        device = view.devices.get(_used(use))
        if device is not None:
            for pod in use.pods:
                found[pod].append(device)
    return found


def _used(use: DeviceUse) -> tuple[str, str, str]:
    return use.driver, use.pool, use.device


def _name(device: DeviceSeen) -> tuple[str, str, str]:
    return device.driver, device.pool, device.name


def _strangers(pod: str, gpus: list[DeviceSeen], strange: list[DeviceSeen]) -> Finding:
    told = ", ".join(one.name for one in strange)
    return fails(
        names.NIC_ALIGNED,
        f"Pod {pod}",
        f"it was given {told}, which serves none of its GPUs ({', '.join(one.name for one in gpus)})",
        f"rackloom claim template --gpus {len(gpus)} --nics {len(gpus)} --align numa --pairs --cluster"
        "  # a claim that ties each GPU to its NIC",
        severity=Severity.WARNING,
        evidence=(*map(_place, gpus), *map(_place, strange)),
        where=(at_pod(pod), *(at_node(one.node) for one in gpus[:1])),
    )
