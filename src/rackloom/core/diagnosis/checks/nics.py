"""Checks of NICs that serve GPUs, and of the newest transfers that were measured through them.

Only rails are judged: a NIC that serves no GPU carries no tenant data. `check_nics` reports links that
are down, slower than the fastest rail of their node (the rails of one tray are alike) or of unknown
state; GPUs whose nearest NIC is at another processor; and pods that got a NIC of another GPU while their
own GPU's NIC went elsewhere.

Whether a GPU and a NIC are apart is decided by the NUMA nodes of both. The PCIe path class counts only
where one NUMA node is unknown: on a Grace tray a GPU shares no PCIe tree with any NIC, so its class is
always the farthest.

`check_transfers` reports measured transfers that broke what the topology promises, or could not show it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rackloom.core.diagnosis import catalogue
from rackloom.core.diagnosis.findings import Finding, Severity, fails, unknown
from rackloom.core.diagnosis.index import SnapshotIndex, at_device, at_node, at_pod
from rackloom.core.diagnosis.snapshot import AllocatedDevice, DeviceRecord, MeasuredTransfer

# Links and placement of NICs.


_FARTHEST_CLASS = "SYS"
"""nvidia-smi's letters for a path that crosses the link between processors."""
FAR_FROM_NIC = "no NIC that may carry data is at their processor: every byte crosses the link between the two"
LINK_STATE_UNKNOWN = "its driver does not say whether its link is up"
_UP, _UNKNOWN_STATE = ("up", "active"), "unknown"


def check_nics(view: SnapshotIndex) -> Iterator[Finding]:
    """All findings about NICs that serve GPUs. A NIC that serves none is nobody's rail."""
    fastest = _fastest(view.rails.nics)
    for nic in view.rails.nics:
        yield from _check_link(nic, fastest.get(nic.node, 0), view)
    yield from _far_gpus(view)
    yield from _mismatched_pods(view)


def _fastest(nics: Iterable[DeviceRecord]) -> Mapping[str, int]:
    """The rate of each node's fastest rail: the rails of one tray are alike."""
    found: dict[str, int] = {}
    for nic in nics:
        found[nic.node] = max(found.get(nic.node, 0), nic.gbps or 0)
    return found


def link_problem(link: str | None, gbps: int | None, fastest: int) -> str:
    """What is wrong with a link that should be up, and as fast (Gb/s) as its siblings; empty: nothing."""
    if link is not None and link.lower() not in (*_UP, _UNKNOWN_STATE):
        return f"its link is {link}"
    if gbps is not None and gbps < fastest:
        return f"it runs at {gbps} Gb/s, its siblings at {fastest}"
    return ""


def is_link_unknown(link: str | None) -> bool:
    """Whether there is a link, and its driver does not say whether it is up."""
    return link is not None and link.lower() == _UNKNOWN_STATE


def slice_evidence(nic: DeviceRecord) -> str:
    """What its plugin publishes of its link."""
    rate = "no rate" if nic.gbps is None else f"{nic.gbps} Gb/s"
    return f"slice: the link of {nic.name} is {nic.link or 'not told'}, {rate}"


def _check_link(nic: DeviceRecord, fastest: int, view: SnapshotIndex) -> Iterator[Finding]:
    subject, where = f"NIC {nic.node}/{nic.name}", (at_device(nic), *view.at_tray(nic.node))
    told = (
        slice_evidence(nic),
        f"slice: the fastest rail of node {nic.node} has {fastest} Gb/s",
        f"slice: it serves the GPU at {view.rails.served_by(nic)}",
    )
    look = f"kubectl debug node/{nic.node} -it --image=busybox -- chroot /host sh -c 'rdma link; ip -br link'"
    fix = f"{look}  # then its cable and switch port"
    said = link_problem(nic.link, nic.gbps, fastest)
    if said:
        used = view.uses.get((nic.driver, nic.pool, nic.name)) is not None
        severity = Severity.ERROR if used else Severity.WARNING
        yield fails(catalogue.NIC_LINK, subject, said, fix, severity=severity, evidence=told, where=where)
    elif is_link_unknown(nic.link):
        yield unknown(catalogue.NIC_LINK, subject, LINK_STATE_UNKNOWN, fix, evidence=told, where=where)


def _far_gpus(view: SnapshotIndex) -> Iterator[Finding]:
    """GPUs whose own NIC, the nearest there is, is at another processor; those of one processor together."""
    far: defaultdict[tuple[str, int | None], list[tuple[DeviceRecord, DeviceRecord]]] = defaultdict(list)
    for chain in view.chains:
        gpu, nics = chain.device, chain.nics
        if gpu is not None and is_far(gpu, nics):
            far[gpu.node, gpu.numa].extend((gpu, nic) for nic in nics)
    for (node, _), pairs in far.items():
        yield _far_finding(node, pairs, view)


def _far_finding(node: str, pairs: list[tuple[DeviceRecord, DeviceRecord]], view: SnapshotIndex) -> Finding:
    devices = tuple(dict.fromkeys(device for pair in pairs for device in pair))
    gpus = dict.fromkeys(gpu.name for gpu, _ in pairs)
    return fails(
        catalogue.NIC_ALIGNED,
        f"GPU {', '.join(gpus)} of node {node}",
        FAR_FROM_NIC,
        "rackloom topology discover  # on the node: is a nearer NIC missing or excluded?",
        severity=Severity.WARNING,
        evidence=tuple(map(_location_evidence, devices)),
        where=(*map(at_device, devices), *view.at_tray(node)),
    )


def is_far(gpu: DeviceRecord, nics: Sequence[DeviceRecord]) -> bool:
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
    return _FARTHEST_CLASS in classes


def _location_evidence(device: DeviceRecord) -> str:
    numa = "no NUMA node known" if device.numa is None else f"NUMA node {device.numa}"
    root = "" if device.pcie_root is None else f", PCIe root {device.pcie_root}"
    return f"slice: {device.name} is at {numa}{root}"


def _mismatched_pods(view: SnapshotIndex) -> Iterator[Finding]:
    """Pods that were given a NIC of somebody else's GPU while their own GPU's NIC went elsewhere."""
    own = {
        _device_name(chain.device): set(map(_device_name, chain.nics))
        for chain in view.chains
        if chain.device and chain.nics
    }
    rails = set(map(_device_name, view.rails.nics))
    for pod, devices in sorted(_devices_of_pods(view).items()):
        gpus = [device for device in devices if device.kind == "gpu" and _device_name(device) in own]
        theirs = {nic for one in gpus for nic in own[_device_name(one)]}
        strange = [device for device in devices if _device_name(device) in rails - theirs]
        given = {_device_name(device) for device in devices}
        if strange and any(given.isdisjoint(own[_device_name(one)]) for one in gpus):
            yield _mismatch_finding(pod, gpus, strange)


def _devices_of_pods(view: SnapshotIndex) -> Mapping[str, list[DeviceRecord]]:
    found: defaultdict[str, list[DeviceRecord]] = defaultdict(list)
    for use in view.picture.uses:
        device = view.devices.get(_allocated_name(use))
        if device is not None:
            for pod in use.pods:
                found[pod].append(device)
    return found


def _allocated_name(use: AllocatedDevice) -> tuple[str, str, str]:
    return use.driver, use.pool, use.device


def _device_name(device: DeviceRecord) -> tuple[str, str, str]:
    return device.driver, device.pool, device.name


def _mismatch_finding(pod: str, gpus: list[DeviceRecord], strange: list[DeviceRecord]) -> Finding:
    told = ", ".join(one.name for one in strange)
    return fails(
        catalogue.NIC_ALIGNED,
        f"Pod {pod}",
        f"it was given {told}, which serves none of its GPUs ({', '.join(one.name for one in gpus)})",
        f"rackloom claim template --gpus {len(gpus)} --nics {len(gpus)} --align numa --pairs --cluster"
        "  # a claim that ties each GPU to its NIC",
        severity=Severity.WARNING,
        evidence=(*map(_location_evidence, gpus), *map(_location_evidence, strange)),
        where=(at_pod(pod), *(at_node(one.node) for one in gpus[:1])),
    )


# Measured transfers.


_MEASURE_AGAIN = "rackloom transfer run --save transfer.json  # and rackloom transfer report transfer.json"


def check_transfers(view: SnapshotIndex) -> Iterator[Finding]:
    """All findings about transfers. One that nothing was promised of is no finding."""
    nics = {
        _transfer_key(chain.transfer): tuple(map(at_device, chain.nics))
        for chain in view.chains
        if chain.transfer is not None and chain.nics
    }
    for transfer in view.picture.transfers:
        where = nics.get(_transfer_key(transfer), (at_node(transfer.node),))
        subject = f"transfer on {transfer.node} through {transfer.device or 'no device'}"
        rate = f"record: {transfer.gigabytes_per_second:.2f} GB/s{' (emulated)' if transfer.emulated else ''}"
        if transfer.verdict == "fails":
            yield fails(
                catalogue.TRANSFER,
                subject,
                transfer.reason,
                _MEASURE_AGAIN,
                severity=Severity.WARNING,
                evidence=(rate,),
                where=where,
                since=transfer.at,
            )
        elif transfer.verdict == "unknown":
            yield unknown(
                catalogue.TRANSFER,
                subject,
                transfer.reason,
                _MEASURE_AGAIN,
                evidence=(rate,),
                where=where,
                since=transfer.at,
            )


def _transfer_key(measured_transfer: MeasuredTransfer) -> tuple[str, str, float]:
    """What tells transfers of one picture apart."""
    return measured_transfer.node, measured_transfer.device, measured_transfer.at
