"""Checks of nodes, ResourceSlices and allocated devices; fixes say where a pod could go.

`check_slices` reports nodes that are not ready or silent, drivers that publish nothing of a node though
most nodes of cliques have them, slices left over from nodes that are gone, device taints that keep
workloads away (NoSchedule, NoExecute), and allocated devices that are no longer published.

For a tainted or missing device `Relocation` decides whether its pods would find the same devices
elsewhere: free, untainted, of the same drivers and kinds, on a node that takes newcomers. A pod of a
ComputeDomain stays in its clique, because memory is shared within a clique only. The spare tray of a gang
comes first. CPUs and other pods are not considered.

If every pod has a place, the fix deletes the pods. Otherwise the job stands still until the device is
well, and the fix comes in this order: cordon the node, delete the pods, reset the GPU or restart the
machine. A reset needs that no process has the GPU open, and a GPU that is off the bus comes back only
when the machine restarts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from rackloom.core.diagnosis import catalogue
from rackloom.core.diagnosis.findings import Finding, Severity, fails, unknown
from rackloom.core.diagnosis.index import SnapshotIndex, at_device, at_node, at_pod
from rackloom.core.diagnosis.snapshot import AllocatedDevice, DeviceRecord, NodeRecord
from rackloom.core.domains.names import GPU_DRIVER

# Where else a pod could run.


GANG_TAINT = "rackloom.dev/gang="
"""Begins the mark of a tray that the gang controller keeps, also without a pod on it: a spare."""
BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
"""Effects of taints that keep newcomers away."""
_KIND_OF_WITHDRAWN = {GPU_DRIVER: "gpu"}
"""What a device was that is published no more, where its driver's name tells."""
DeviceNeed = tuple[tuple[tuple[str, str], int], ...]
"""How many devices of each driver and kind."""


class Relocation:
    """One picture, as who looks for another place for a pod sees it."""

    def __init__(self, view: SnapshotIndex) -> None:
        self._view = view
        self._known: dict[tuple[str | None, frozenset[str], DeviceNeed], NodeRecord | None] = {}

    def place_for(self, pod: str, node: str) -> str:
        """In words, the tray where `pod` (namespace/name) of `node` finds what it has there; empty: nowhere.

        On its own tray it finds what it gives back, but for what is kept from newcomers.
        """
        here = self._view.nodes.get(node)
        if here is None:
            return ""
        opened, need = frozenset(blocking_taints(here.taints)), self._need(pod)
        if _takes_newcomers(here, opened) and _covers(
            self._free.get(node, Counter()) + self._own(pod, node), need
        ):
            return f"other devices of {node}"
        other = self._tray(here.clique if pod in self._in_domains else None, opened, need)
        if other is None:
            return ""
        return f"{'the spare tray of its gang,' if _is_spare(other) else 'the free tray'} {other.name}"

    def clique_of(self, pod: str, node: str) -> str:
        """Which clique `pod` cannot leave; empty: it may go anywhere."""
        here = self._view.nodes.get(node)
        return "" if here is None or pod not in self._in_domains else here.clique or ""

    def _tray(self, clique: str | None, opened: frozenset[str], need: DeviceNeed) -> NodeRecord | None:
        asked = (clique, opened, need)
        if asked not in self._known:
            nodes = self._view.nodes.values() if clique is None else self._cliques.get(clique, ())
            fit = [node for node in nodes if _takes_newcomers(node, opened) and self._has(node.name, need)]
            self._known[asked] = min(fit, key=lambda one: (not _is_spare(one), one.name), default=None)
        return self._known[asked]

    def _has(self, node: str, need: DeviceNeed) -> bool:
        return _covers(self._free.get(node, Counter()), need)

    def _own(self, pod: str, node: str) -> Counter[tuple[str, str]]:
        """What it has itself and would find again."""
        held = (self._device(use) for use in self._uses_of.get(pod, ()))
        well = (
            one for one in held if one is not None and one.node == node and not blocking_taints(one.taints)
        )
        return Counter((one.driver, one.kind) for one in well)

    def _need(self, pod: str) -> DeviceNeed:
        kinds = ((use.driver, self._kind(use)) for use in self._uses_of.get(pod, ()))
        return tuple(sorted(Counter(kinds).items()))

    def _kind(self, use: AllocatedDevice) -> str:
        device = self._device(use)
        return _KIND_OF_WITHDRAWN.get(use.driver, "") if device is None else device.kind

    def _device(self, use: AllocatedDevice) -> DeviceRecord | None:
        return self._view.devices.get((use.driver, use.pool, use.device))

    @cached_property
    def _uses_of(self) -> Mapping[str, list[AllocatedDevice]]:
        found: defaultdict[str, list[AllocatedDevice]] = defaultdict(list)
        for use in self._view.picture.uses:
            for pod in use.pods:
                found[pod].append(use)
        return found

    @cached_property
    def _free(self) -> Mapping[str, Counter[tuple[str, str]]]:
        found: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        for device in self._view.picture.devices:
            if (
                not blocking_taints(device.taints)
                and (device.driver, device.pool, device.name) not in self._view.uses
            ):
                found[device.node][device.driver, device.kind] += 1
        return found

    @cached_property
    def _cliques(self) -> Mapping[str, list[NodeRecord]]:
        found: defaultdict[str, list[NodeRecord]] = defaultdict(list)
        for node in self._view.picture.nodes:
            if node.clique is not None:
                found[node.clique].append(node)
        return found

    @cached_property
    def _in_domains(self) -> frozenset[str]:
        """Pods that share memory with others, namespace/name."""
        picture = self._view.picture
        shared = {(claim.namespace, claim.name) for claim in picture.claims if claim.domain}
        return frozenset(
            f"{pod.namespace}/{pod.name}"
            for pod in picture.pods
            if any((pod.namespace, name) in shared for name in pod.claims.values())
        )


def blocking_taints(taints: Iterable[str]) -> tuple[str, ...]:
    """Those of `key=value:effect` that keep newcomers away."""
    return tuple(taint for taint in taints if taint.rpartition(":")[2] in BLOCKING_EFFECTS)


def _covers(free: Counter[tuple[str, str]], need: DeviceNeed) -> bool:
    return all(free[kind] >= count for kind, count in need)


def _takes_newcomers(node: NodeRecord, stood: frozenset[str]) -> bool:
    """Whether it takes newcomers that stand the taints `stood`, as they do where they are now."""
    return node.ready is True and not node.unschedulable and set(blocking_taints(node.taints)) <= stood


def _is_spare(node: NodeRecord) -> bool:
    return any(taint.startswith(GANG_TAINT) for taint in node.taints)


# The fix of a tainted device.


_TAINT_GOES = "its plugin takes the taint away when it is well"
_REBOOTS = ("gpu.nvidia.com/gpu-lost", "gpu.nvidia.com/recovery=node-reboot")
"""Taints of a GPU that only its machine's start brings back: what is off its bus cannot be reset."""
_RESETS = ("gpu.nvidia.com/xid=", "gpu.nvidia.com/recovery=gpu-reset")
"""Those of one that a reset brings back, which the driver refuses while any process has it open."""


def repair_command(device: DeviceRecord, use: AllocatedDevice | None, reach: Relocation) -> str:
    """The fix of a device with a taint."""
    if use is None or not use.pods:
        look = f"kubectl get resourceslices -o yaml --field-selector spec.nodeName={device.node}"
        return f"{look}  # see to the device: {_TAINT_GOES}"
    places = [reach.place_for(pod, device.node) for pod in use.pods]
    if all(places):
        moved = f"made anew, it gets {places[0]}; then see to the device: {_TAINT_GOES}"
        return f"{delete_pods_command(use)}  # {moved}"
    return _repair_in_place(device, use, reach)


def delete_pods_command(use: AllocatedDevice) -> str:
    """Commands that end the pods which have a device; empty where there is none."""
    return " && ".join(f"kubectl -n {pod.replace('/', ' delete pod ')}" for pod in use.pods)


def no_place_reason(use: AllocatedDevice, node: str, reach: Relocation) -> str:
    """Why no pod that has the device goes on elsewhere, in words."""
    cliques = sorted({clique for pod in use.pods if (clique := reach.clique_of(pod, node))})
    return f"no free tray in the clique {', '.join(cliques)}" if cliques else "no other node has as much free"


def _repair_in_place(device: DeviceRecord, use: AllocatedDevice, reach: Relocation) -> str:
    """In this order: newcomers stay away, whoever has it lets go, and it is healed.

    Its job may come back only then: a node that is to start anew still takes pods until it goes.
    """
    begin = f"kubectl cordon {device.node} && {delete_pods_command(use)}"
    why = f"{no_place_reason(use, device.node, reach)}: the job stands still until the device is well"
    afterwards = f"then kubectl uncordon {device.node}"
    heal = _device_repair_command(device)
    if not heal:
        return f"{begin}  # {why}; see to it, {afterwards}"
    on_node = (
        f"kubectl debug node/{device.node} -it --profile=sysadmin --image=busybox -- chroot /host {heal}"
    )
    return f"{begin} && {on_node}  # {why}, {afterwards}"


def _device_repair_command(device: DeviceRecord) -> str:
    """A command of its machine; empty where none is known."""
    if any(taint.startswith(_REBOOTS) for taint in device.taints):
        return "systemctl reboot"
    address = device.key.pci_address
    if address is not None and any(taint.startswith(_RESETS) for taint in device.taints):
        return f"nvidia-smi --gpu-reset -i {address.value}"
    return ""


# Nodes, slices and devices.


def check_slices(view: SnapshotIndex) -> Iterator[Finding]:
    """All findings about nodes, the devices that they publish, and claims that hold them."""
    published = {(pool.driver, pool.node) for pool in view.picture.pools}
    expected = _expected_drivers(view)
    for node in view.picture.nodes:
        yield from _not_ready(node, view)
        yield from _missing_drivers(
            node, [one for one in expected if (one, node.name) not in published], view
        )
    yield from _slices_of_gone_nodes(view)
    reach = Relocation(view)
    yield from _tainted_devices(view, reach)
    drivers = {pool.driver for pool in view.picture.pools}
    for use in view.picture.uses:
        if use.driver in drivers:
            yield from _missing_device(use, view, reach)


def _not_ready(node: NodeRecord, view: SnapshotIndex) -> Iterator[Finding]:
    if node.ready is True:
        return
    subject, where = f"node {node.name}", view.at_tray(node.name)
    fix = f"kubectl describe node {node.name}  # then systemctl status kubelet on its machine"
    if node.ready is None:
        said = "the cluster does not know how it is: its kubelet is silent"
        told = (f"cluster: condition Ready of {node.name} is Unknown",)
        yield unknown(
            catalogue.NODE_READY, subject, said, fix, evidence=told, where=where, since=node.ready_since
        )
    else:
        evidence = (f"cluster: condition Ready of {node.name} is False",)
        yield fails(
            catalogue.NODE_READY,
            subject,
            "it is not ready",
            fix,
            evidence=evidence,
            where=where,
            since=node.ready_since,
        )


def _expected_drivers(view: SnapshotIndex) -> tuple[str, ...]:
    """Drivers that most nodes of cliques publish through: the others lack theirs."""
    nodes = {node.name for node in view.picture.nodes if node.clique is not None}
    counts = Counter(pool.driver for pool in view.picture.pools if pool.node in nodes)
    return tuple(sorted(driver for driver, count in counts.items() if 2 * count > len(nodes)))


def _missing_drivers(node: NodeRecord, missing: list[str], view: SnapshotIndex) -> Iterator[Finding]:
    if node.clique is not None and missing:
        yield fails(
            catalogue.NODE_PUBLISHES,
            f"node {node.name}",
            f"{', '.join(missing)} publishes no devices of it, as it does of other nodes",
            f"kubectl get pods -A -o wide --field-selector spec.nodeName={node.name}  # is its plugin there?",
            evidence=(
                f"cluster: node {node.name} is in clique {node.clique}",
                f"slices: none of {', '.join(missing)} for it",
            ),
            where=view.at_tray(node.name),
        )


def _slices_of_gone_nodes(view: SnapshotIndex) -> Iterator[Finding]:
    gone: defaultdict[str, set[str]] = defaultdict(set)
    for pool in view.picture.pools:
        if pool.node and pool.node not in view.nodes:
            gone[pool.node].add(pool.driver)
    for node, drivers in sorted(gone.items()):
        yield fails(
            catalogue.SLICE_OF_NODE,
            f"node {node}",
            f"slices of {', '.join(sorted(drivers))} are left of a node that is gone",
            f"kubectl delete resourceslices --field-selector spec.nodeName={node}",
            evidence=(f"slices: {', '.join(sorted(drivers))}", f"cluster: no node {node}"),
            where=(at_node(node),),
        )


def _tainted_devices(view: SnapshotIndex, reach: Relocation) -> Iterator[Finding]:
    for device in view.picture.devices:
        kept = blocking_taints(device.taints)
        if kept and device.node in view.nodes:
            use = view.uses.get((device.driver, device.pool, device.name))
            held = "it is free" if use is None else f"claim {use.claim} has it"
            yield fails(
                catalogue.DEVICE_TAINT,
                f"device {device.node}/{device.name}",
                f"its plugin keeps workloads off it: {', '.join(kept)}",
                repair_command(device, use, reach),
                severity=Severity.WARNING if use is None else Severity.ERROR,
                evidence=(f"slice: {', '.join(kept)}", f"claims: {held}"),
                where=(at_device(device), *view.at_tray(device.node)),
            )


def _missing_device(use: AllocatedDevice, view: SnapshotIndex, reach: Relocation) -> Iterator[Finding]:
    if (use.driver, use.pool, use.device) in view.devices:
        return
    namespace, _, name = use.claim.partition("/")
    yield fails(
        catalogue.DEVICE_THERE,
        f"ResourceClaim {use.claim}",
        f"it was given {use.device} of {use.pool}, which {use.driver} no longer publishes",
        _missing_device_fix(use, reach) or f"kubectl -n {namespace} delete resourceclaim {name}",
        evidence=(f"claim: {use.driver}/{use.pool}/{use.device}", f"slices: no such device in {use.pool}"),
        where=(at_node(use.pool), *map(at_pod, use.pods)),
    )


def _missing_device_fix(use: AllocatedDevice, reach: Relocation) -> str:
    """Its pods hold what is not there: they go on nowhere, unless made anew elsewhere."""
    if not use.pods:
        return ""
    places = [reach.place_for(pod, use.pool) for pod in use.pods]
    if all(places):
        return f"{delete_pods_command(use)}  # made anew, it gets {places[0]}"
    return (
        f"{delete_pods_command(use)}  # {no_place_reason(use, use.pool, reach)}"
        f": first bring {use.device} of {use.pool} back"
    )
