"""Checks of nodes, ResourceSlices and allocated devices. Fixes name a place that a pod could go to.

`check_nodes` reports nodes that are not ready or silent, and drivers that publish nothing for a node although
most nodes of cliques have them. `check_gone_nodes` reports slices left over from nodes that are gone.
`check_devices` reports device taints that keep workloads away (NoSchedule, NoExecute), and allocated devices
that are no longer published. The faults of devices are found part by part of a site (`device_faults`), their
fixes over all of it.

For a tainted or missing device `Relocation` decides whether its pods would find the same devices
elsewhere: free, untainted, of the same drivers and kinds, on a node that takes newcomers. A pod of a
ComputeDomain stays in its clique, because memory is shared within a clique only. The spare tray of a gang
comes first. CPUs and other pods are not considered.

If every pod has a place, the fix deletes the pods. Otherwise the job stands still until the device is
well, and the fix comes in this order: cordon the node, delete the pods, reset the GPU or restart the
machine. A reset requires that no process has the GPU open, and a GPU that is off the bus comes back only
when the machine restarts.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from rackloom.core.cluster.names import GPU_DRIVER
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding, Severity, fails, unknown
from rackloom.core.diagnosis.index import (
    DeviceKind,
    SnapshotIndex,
    at_device,
    at_node,
    at_pod,
    blocking_taints,
)
from rackloom.core.diagnosis.snapshot import (
    DeviceRecord,
    DeviceUse,
    NodeRecord,
    PoolRecord,
    grouped,
)

# Other places for a pod's devices.


GANG_TAINT = "rackloom.dev/gang="
"""Prefix of the taint on trays that the gang controller reserves. One without a pod is a spare tray."""
_KIND_OF_WITHDRAWN = {GPU_DRIVER: "gpu"}
"""The kind of a device that is no longer published, if the driver has only one kind."""
DeviceNeed = tuple[tuple[DeviceKind, int], ...]
"""How many devices of each kind."""


class Relocation:
    """The places at which the pods of a snapshot would find their devices again."""

    def __init__(self, index: SnapshotIndex) -> None:
        self._index = index
        self._found: dict[tuple[str | None, frozenset[str], DeviceNeed], NodeRecord | None] = {}

    def place_for(self, pod: str, node: str) -> str:
        """The other place, in words, that has the devices of `pod` (namespace/name) of `node`, or empty.

        Its own tray counts with the devices that the pod releases, except tainted ones.
        """
        here = self._index.nodes.get(node)
        if here is None:
            return ""
        # The pod runs here, so it tolerates the blocking taints of this node.
        tolerated = frozenset(blocking_taints(here.taints))
        kinds = Counter((use.driver, self._kind(use)) for use in self._uses_of.get(pod, ()))
        need = tuple(sorted(kinds.items()))
        free = self._index.free_devices[node] + self._released(pod, node)
        if _takes_pods(here, tolerated) and _covers(free, need):
            return f"other devices of {node}"
        tray = self._tray(here.clique if pod in self._in_domains else None, tolerated, need)
        if tray is None:
            return ""
        return f"{'the spare tray of its gang,' if _is_spare(tray) else 'the free tray'} {tray.name}"

    def clique_of(self, pod: str, node: str) -> str:
        """The clique that `pod` cannot leave. Empty if it may go anywhere."""
        here = self._index.nodes.get(node)
        return "" if here is None or pod not in self._in_domains else here.clique or ""

    def _tray(self, clique: str | None, tolerated: frozenset[str], need: DeviceNeed) -> NodeRecord | None:
        key = (clique, tolerated, need)
        if key not in self._found:
            nodes = self._index.nodes.values() if clique is None else self._cliques.get(clique, ())
            fit = (
                node
                for node in nodes
                if _takes_pods(node, tolerated) and _covers(self._index.free_devices[node.name], need)
            )
            # A spare of the gang first: the gang controller keeps it free for this purpose.
            self._found[key] = min(fit, key=lambda node: (not _is_spare(node), node.name), default=None)
        return self._found[key]

    def _released(self, pod: str, node: str) -> Counter[DeviceKind]:
        """The devices on its node that the pod has itself, without tainted ones."""
        held = (self._index.device(use.device_id) for use in self._uses_of.get(pod, ()))
        return Counter(
            (device.driver, device.kind)
            for device in held
            if device is not None and device.node == node and not blocking_taints(device.taints)
        )

    def _kind(self, use: DeviceUse) -> str:
        device = self._index.device(use.device_id)
        return _KIND_OF_WITHDRAWN.get(use.driver, "") if device is None else device.kind

    @cached_property
    def _uses_of(self) -> Mapping[str, list[DeviceUse]]:
        return grouped((pod, use) for use in self._index.snapshot.uses for pod in use.pods)

    @cached_property
    def _cliques(self) -> Mapping[str, list[NodeRecord]]:
        nodes = self._index.snapshot.nodes
        return grouped((node.clique, node) for node in nodes if node.clique is not None)

    @cached_property
    def _in_domains(self) -> frozenset[str]:
        """Pods with a channel of a ComputeDomain, namespace/name: they share memory with others."""
        snapshot = self._index.snapshot
        shared = {claim.key for claim in snapshot.claims if claim.domain}
        return frozenset(
            pod.key
            for pod in snapshot.pods
            if any(f"{pod.namespace}/{name}" in shared for name in pod.claims.values())
        )


def _covers(free: Counter[DeviceKind], need: DeviceNeed) -> bool:
    return all(free[kind] >= count for kind, count in need)


def _takes_pods(node: NodeRecord, tolerated: frozenset[str]) -> bool:
    """Whether a node accepts new pods that tolerate these taints."""
    return node.ready is True and not node.unschedulable and set(blocking_taints(node.taints)) <= tolerated


def _is_spare(node: NodeRecord) -> bool:
    return any(taint.startswith(GANG_TAINT) for taint in node.taints)


# The fix of a tainted device.


_TAINT_ENDS = "its plugin takes the taint away when it is well"
_REBOOTS = frozenset(("gpu-lost", "recovery=node-reboot", "recovery=system-reboot", "xid=79", "xid=151"))
"""Taints of a GPU that needs a restart of its machine: a GPU that is off the bus cannot be reset."""
_RESET_XIDS = (46, 48, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, *range(144, 151), 155, 156, 158)
_RESETS = {"recovery=gpu-reset", "recovery=drain-and-reset", *(f"xid={number}" for number in _RESET_XIDS)}
"""Taints of a GPU that a reset repairs. The driver refuses a reset while a process has the GPU open.

The XIDs are those of NVIDIA's catalogue. Its other actions need a person, so they have no command.
"""


def repair_command(device: DeviceRecord, use: DeviceUse | None, relocation: Relocation) -> str:
    """The fix of a device with a taint."""
    # Only DeviceTaintRules keep pods off it, and not its driver.
    if device.rules and len(blocking_taints(device.taints)) == len(device.rules):
        show = " && ".join(f"kubectl describe devicetaintrule {rule}" for rule in device.rules)
        return f"{show}  # an administrator keeps work off it: delete the rule when the device may be used"
    if use is None or not use.pods:
        show = f"kubectl get resourceslices -o yaml --field-selector spec.nodeName={device.node}"
        return f"{show}  # see to the device: {_TAINT_ENDS}"
    places = [relocation.place_for(pod, device.node) for pod in use.pods]
    if all(places):
        moved = f"made anew, it gets {places[0]}; then see to the device: {_TAINT_ENDS}"
        return f"{delete_pods_command(use)}  # {moved}"
    return _repair_in_place(device, use, relocation)


def delete_pods_command(use: DeviceUse) -> str:
    """Commands that delete the pods that use a device. Empty if it has none."""
    return " && ".join(f"kubectl -n {pod.replace('/', ' delete pod ')}" for pod in use.pods)


def no_place_reason(use: DeviceUse, node: str, relocation: Relocation) -> str:
    """Why the pods that use the device find no other place, in words."""
    cliques = sorted({clique for pod in use.pods if (clique := relocation.clique_of(pod, node))})
    return f"no free tray in the clique {', '.join(cliques)}" if cliques else "no other node has as much free"


def _repair_in_place(device: DeviceRecord, use: DeviceUse, relocation: Relocation) -> str:
    """Cordon the node, delete the pods, then repair the device.

    The order matters: without the cordon the node would accept the recreated pods until it restarts.
    """
    begin = f"kubectl cordon {device.node} && {delete_pods_command(use)}"
    why = f"{no_place_reason(use, device.node, relocation)}: the job stands still until the device is well"
    afterwards = f"then kubectl uncordon {device.node}"
    # A taint without effect requires no repair. A reboot includes a reset.
    taints = {re.sub("^gpu.nvidia.com/|=?:.*", "", taint) for taint in blocking_taints(device.taints)}
    address = device.key.pci_address
    if taints & _REBOOTS:
        repair = "systemctl reboot"
    elif address is not None and taints & _RESETS:
        repair = f"nvidia-smi --gpu-reset -i {address.value}"
    else:
        return f"{begin}  # {why}; see to it, {afterwards}"
    on_node = (
        f"kubectl debug node/{device.node} -it --profile=sysadmin --image=busybox -- chroot /host {repair}"
    )
    return f"{begin} && {on_node}  # {why}, {afterwards}"


# Nodes, slices and devices.


def check_nodes(index: SnapshotIndex, expected: Collection[str]) -> Iterator[Finding]:
    """Nodes that are not ready, or that an expected driver publishes nothing for."""
    published = {(pool.driver, pool.node) for pool in index.snapshot.pools}
    for node in index.snapshot.nodes:
        yield from _not_ready(node, index)
        missing = [driver for driver in expected if (driver, node.name) not in published]
        if node.clique is not None and missing:
            yield fails(
                Check.NODE_PUBLISHES,
                f"node {node.name}",
                f"{', '.join(missing)} publishes no devices of it, as it does of other nodes",
                f"kubectl get pods -A -o wide --field-selector spec.nodeName={node.name}"
                "  # is its plugin there?",
                evidence=(
                    f"cluster: node {node.name} is in clique {node.clique}",
                    f"slices: none of {', '.join(missing)} for it",
                ),
                where=index.at_tray(node.name),
            )


def _not_ready(node: NodeRecord, index: SnapshotIndex) -> Iterator[Finding]:
    if node.ready is True:
        return
    subject, where = f"node {node.name}", index.at_tray(node.name)
    fix = f"kubectl describe node {node.name}  # then systemctl status kubelet on its machine"
    evidence = f"cluster: condition Ready of {node.name} is {'Unknown' if node.ready is None else 'False'}"
    silent = "the cluster does not know how it is: its kubelet is silent"
    report, message = (unknown, silent) if node.ready is None else (fails, "it is not ready")
    yield report(
        Check.NODE_READY, subject, message, fix, evidence=(evidence,), where=where, since=node.ready_since
    )


def expected_drivers(nodes: Iterable[NodeRecord], pools: Iterable[PoolRecord]) -> tuple[str, ...]:
    """Drivers that publish devices of most nodes with a clique, and so should publish those of all."""
    names = {node.name for node in nodes if node.clique is not None}
    counts = Counter(pool.driver for pool in pools if pool.node in names)
    return tuple(sorted(driver for driver, count in counts.items() if 2 * count > len(names)))


def check_gone_nodes(nodes: Iterable[NodeRecord], pools: Iterable[PoolRecord]) -> Iterator[Finding]:
    """Slices that are left over from nodes that are gone."""
    names = {node.name for node in nodes}
    gone = grouped((pool.node, pool.driver) for pool in pools if pool.node and pool.node not in names)
    for node, published in sorted(gone.items()):
        drivers = ", ".join(sorted(set(published)))
        yield fails(
            Check.SLICE_OF_NODE,
            f"node {node}",
            f"slices of {drivers} are left of a node that is gone",
            f"kubectl delete resourceslices --field-selector spec.nodeName={node}",
            evidence=(f"slices: {drivers}", f"cluster: no node {node}"),
            where=(at_node(node),),
        )


class DeviceFaults(NamedTuple):
    """Devices of a part of the site. Their fix depends on the free devices of the whole site."""

    tainted: tuple[tuple[DeviceRecord, DeviceUse | None], ...]
    """Devices with a taint that keeps workloads off, each with its allocation."""
    unpublished: tuple[DeviceUse, ...]
    """Allocations of devices that this part does not publish."""


def device_faults(index: SnapshotIndex) -> DeviceFaults:
    """The faults of the devices and allocations of an index."""
    tainted = [device for device in index.snapshot.devices if blocking_taints(device.taints)]
    return DeviceFaults(
        tuple(
            [(device, index.uses.get(device.device_id)) for device in tainted if device.node in index.nodes]
        ),
        tuple([use for use in index.snapshot.uses if use.device_id not in index.devices]),
    )


def check_devices(faults: Sequence[DeviceFaults], index: SnapshotIndex) -> Iterator[Finding]:
    """All findings about tainted and unpublished devices, from the faults of all parts of a site."""
    relocation = Relocation(index)
    for device, use in (tainted for part in faults for tainted in part.tainted):
        yield _tainted_device(device, use, index, relocation)
    # Two nodes may publish parts of one pool, so an allocation may stand in several parts.
    unpublished = {id(use): use for part in faults for use in part.unpublished}
    drivers = {pool.driver for pool in index.snapshot.pools} if unpublished else ()
    for use in unpublished.values():
        if use.driver in drivers and index.device(use.device_id) is None:
            yield _missing_device(use, relocation)


def _tainted_device(
    device: DeviceRecord, use: DeviceUse | None, index: SnapshotIndex, relocation: Relocation
) -> Finding:
    taints, rules = blocking_taints(device.taints), list(device.rules)
    published = taints[: len(taints) - len(rules)]
    whose = ["its plugin"] * bool(published) + [f"DeviceTaintRule {rule}" for rule in rules]
    keep = "keeps" if len(whose) == 1 else "keep"
    held = "nobody has it" if use is None else f"claim {use.claim} has it"
    # A rule is intended: pods with the device go on, or are evicted as the administrator wants.
    is_meant = use is None or not published
    return fails(
        Check.DEVICE_TAINT,
        index.device_part(device),
        f"{' and '.join(whose)} {keep} workloads off it: {', '.join(taints)}",
        repair_command(device, use, relocation),
        severity=Severity.WARNING if is_meant else Severity.ERROR,
        evidence=(
            *(
                [f"slice: device {device.name} of node {device.node}: {', '.join(published)}"]
                if published
                else []
            ),
            *(f"DeviceTaintRule: {rule}" for rule in rules),
            f"claims: {held}",
        ),
        where=(at_device(device), *index.at_tray(device.node)),
        since=device.tainted_since,
    )


def _missing_device(use: DeviceUse, relocation: Relocation) -> Finding:
    namespace, _, name = use.claim.partition("/")
    # Recreate its pods where other devices are free. Elsewhere the device must come back first.
    fix = f"kubectl -n {namespace} delete resourceclaim {name}"
    if use.pods:
        places = [relocation.place_for(pod, use.pool) for pod in use.pods]
        lacking = f"{no_place_reason(use, use.pool, relocation)}: first bring {use.device} of {use.pool} back"
        advice = f"made anew, it gets {places[0]}" if all(places) else lacking
        fix = f"{delete_pods_command(use)}  # {advice}"
    return fails(
        Check.DEVICE_THERE,
        f"ResourceClaim {use.claim}",
        f"it was given {use.device} of {use.pool}, which {use.driver} no longer publishes",
        fix,
        evidence=(f"claim: {use.driver}/{use.pool}/{use.device}", f"slices: no such device in {use.pool}"),
        where=(at_node(use.pool), *map(at_pod, use.pods)),
    )
