"""Checks of NICs that serve GPUs, and of the newest transfers that were measured through them.

Only rails are judged: a NIC that serves no GPU carries no tenant data. `check_nics` reports links that are
down, slower than the fastest rail of their node (the rails of one tray are alike) or of unknown state. It
also reports GPUs with their nearest NIC at another processor, and pods that got a NIC of another GPU while
their own GPU's NIC went elsewhere.

Whether a GPU and a NIC are apart is decided by the NUMA nodes of both. The PCIe path class counts only if one
NUMA node is unknown: on a Grace tray a GPU shares no PCIe tree with any NIC, so its class is always the
farthest.

`check_transfers` reports measured transfers that broke the promise of the topology, or could not prove it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding, Severity, fails, unknown
from rackloom.core.diagnosis.index import SnapshotIndex, at_device, at_node, at_pod
from rackloom.core.diagnosis.snapshot import DeviceRecord, MeasuredTransfer, grouped

# Links and placement of NICs.


_FARTHEST_CLASS = "SYS"
"""nvidia-smi's letters for a path that crosses the link between processors."""
FAR_FROM_NIC = "no NIC that may carry data is at their processor: every byte crosses the link between the two"
LINK_STATE_UNKNOWN = "its driver does not say whether its link is up"
_UP, _UNKNOWN_STATE = ("up", "active"), "unknown"


def check_nics(index: SnapshotIndex) -> Iterator[Finding]:
    """All findings about NICs that serve GPUs, and GPUs far from them. Other NICs carry no tenant data."""
    rates = grouped((nic.node, nic.gbps or 0) for nic in index.rails.nics)
    fastest = {node: max(found) for node, found in rates.items()}
    for nic in index.rails.nics:
        yield from _check_link(nic, fastest[nic.node], index)
    # GPUs of one processor have one reason to be far from every NIC, so they are one finding.
    far = grouped(
        ((chain.device.node, chain.device.numa), (chain.device, nic))
        for chain in index.chains
        if chain.device is not None and is_far(chain.device, chain.nics)
        for nic in chain.nics
    )
    for (node, _), pairs in far.items():
        devices = tuple(dict.fromkeys(device for pair in pairs for device in pair))
        yield fails(
            Check.NIC_ALIGNED,
            ", ".join(dict.fromkeys(index.device_part(gpu) for gpu, _ in pairs)),
            FAR_FROM_NIC,
            "rackloom topology discover  # on the node: is a nearer NIC missing or excluded?",
            severity=Severity.WARNING,
            evidence=tuple(_location_evidence(device, index) for device in devices),
            where=(*map(at_device, devices), *index.at_tray(node)),
        )


def link_problem(link: str | None, gbps: int | None, fastest: int) -> str:
    """The problem of a link that should be up, and as fast (Gb/s) as its siblings. Empty if it is."""
    if link is not None and link.lower() not in (*_UP, _UNKNOWN_STATE):
        return f"its link is {link}"
    if gbps is not None and gbps < fastest:
        return f"it runs at {gbps} Gb/s, its siblings at {fastest}"
    return ""


def is_link_unknown(link: str | None) -> bool:
    """Whether the driver does not report whether the link is up."""
    return link is not None and link.lower() == _UNKNOWN_STATE


def numa_text(node: int | None) -> str:
    """A NUMA node, as evidence names it."""
    return "no NUMA node known" if node is None else f"NUMA node {node}"


def slice_evidence(nic: DeviceRecord) -> str:
    """The link as its plugin publishes it."""
    rate = "no rate" if nic.gbps is None else f"{nic.gbps} Gb/s"
    return f"slice: the link of {nic.name} is {nic.link or 'not told'}, {rate}"


def _check_link(nic: DeviceRecord, fastest: int, index: SnapshotIndex) -> Iterator[Finding]:
    message = link_problem(nic.link, nic.gbps, fastest)
    if not message and not is_link_unknown(nic.link):
        return
    subject, where = index.device_part(nic), (at_device(nic), *index.at_tray(nic.node))
    evidence = (
        slice_evidence(nic),
        f"slice: the fastest rail of node {nic.node} has {fastest} Gb/s",
        f"slice: {nic.node}/{nic.name} serves the GPU at {index.rails.served_by(nic)}",
    )
    show = f"kubectl debug node/{nic.node} -it --image=busybox -- chroot /host sh -c 'rdma link; ip -br link'"
    fix = f"{show}  # then its cable and switch port"
    if message:
        severity = Severity.ERROR if nic.device_id in index.uses else Severity.WARNING
        yield fails(Check.NIC_LINK, subject, message, fix, severity=severity, evidence=evidence, where=where)
    else:
        yield unknown(Check.NIC_LINK, subject, LINK_STATE_UNKNOWN, fix, evidence=evidence, where=where)


def is_far(gpu: DeviceRecord, nics: Sequence[DeviceRecord]) -> bool:
    """Whether a GPU has NICs, and the nearest of them is at another processor."""
    return bool(nics) and all(
        are_apart(gpu.numa, nic.numa, (gpu.partner_class, nic.partner_class)) for nic in nics
    )


def are_apart(gpu: int | None, nic: int | None, classes: Iterable[str | None]) -> bool:
    """Whether a GPU and a NIC are at different processors, by the NUMA nodes of both.

    The path classes count only if a NUMA node is unknown. On a Grace tray a GPU is attached to its own
    processor and shares no PCIe tree with any NIC, so its path class is always the farthest.
    """
    if gpu is not None and nic is not None:
        return gpu != nic
    return _FARTHEST_CLASS in classes


def _location_evidence(device: DeviceRecord, index: SnapshotIndex) -> str:
    root = "" if device.pcie_root is None else f", PCIe root {device.pcie_root}"
    name = f"{index.device_part(device)} ({device.node}/{device.name})"
    return f"slice: {name} is at {numa_text(device.numa)}{root}"


def check_pods(index: SnapshotIndex, is_judged: Callable[[str], bool]) -> Iterator[Finding]:
    """Pods that got a NIC of another GPU while a NIC of their GPUs went elsewhere.

    `is_judged` returns whether all devices of a pod, `namespace/name`, are in the index.
    """
    own = {
        chain.device.device_id: {nic.device_id for nic in chain.nics}
        for chain in index.chains
        if chain.device and chain.nics
    }
    rails = {nic.device_id for nic in index.rails.nics}
    given = grouped(
        (pod, index.devices[use.device_id])
        for use in index.snapshot.uses
        if use.device_id in index.devices
        for pod in use.pods
        if is_judged(pod)
    )
    for pod, devices in sorted(given.items()):
        devices.sort(key=lambda device: device.device_id)
        gpus = [device for device in devices if device.kind == "gpu" and device.device_id in own]
        # NICs of GPUs that the pod does not have. Any pod may use a NIC that serves no GPU.
        aligned = {nic for gpu in gpus for nic in own[gpu.device_id]}
        mismatched = [d for d in devices if d.device_id in rails and d.device_id not in aligned]
        ids = {device.device_id for device in devices}
        if not mismatched or not any(ids.isdisjoint(own[gpu.device_id]) for gpu in gpus):
            continue
        nic_names, gpu_names = (", ".join(map(index.device_part, part)) for part in (mismatched, gpus))
        yield fails(
            Check.NIC_ALIGNED,
            f"Pod {pod}",
            f"it was given {nic_names}, which serves none of its GPUs ({gpu_names})",
            f"rackloom claim template --gpus {len(gpus)} --nics {len(gpus)} --align numa --pairs --cluster"
            "  # a claim that ties each GPU to its NIC",
            severity=Severity.WARNING,
            evidence=tuple(_location_evidence(device, index) for device in (*gpus, *mismatched)),
            where=(at_pod(pod), *(at_node(gpu.node) for gpu in gpus[:1])),
        )


# Measured transfers.


_MEASURE_AGAIN = "rackloom transfer run --save transfer.json  # and rackloom transfer report transfer.json"


def check_transfers(index: SnapshotIndex) -> Iterator[Finding]:
    """All findings about transfers. A transfer without a promise, or that kept it, is no finding."""
    judged = [transfer for transfer in index.snapshot.transfers if transfer.verdict in ("fails", "unknown")]
    if not judged:
        return
    nics = {
        _transfer_key(chain.transfer): tuple(map(at_device, chain.nics))
        for chain in index.chains
        if chain.transfer is not None and chain.nics
    }
    for transfer in judged:
        where = nics.get(_transfer_key(transfer), (at_node(transfer.node),))
        subject = f"transfer on {transfer.node} through {transfer.device or 'no device'}"
        rate = f"{transfer.gigabytes_per_second:.2f} GB/s{' (emulated)' if transfer.emulated else ''}"
        found = (Check.TRANSFER, subject, transfer.reason, _MEASURE_AGAIN)
        evidence, at = (f"record: {rate}",), transfer.at
        if transfer.verdict == "fails":
            yield fails(*found, severity=Severity.WARNING, evidence=evidence, where=where, since=at)
        else:
            yield unknown(*found, evidence=evidence, where=where, since=at)


def _transfer_key(transfer: MeasuredTransfer) -> tuple[str, str, float, str]:
    """Identifies a transfer within one snapshot."""
    uuid = transfer.key.gpu_uuid
    return transfer.node, transfer.device, transfer.at, "" if uuid is None else uuid.value
