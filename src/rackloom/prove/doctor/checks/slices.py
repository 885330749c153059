"""What nodes publish, and who was given it: slices, device taints, allocated devices."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.mending import delete, mend, stands_still
from rackloom.prove.doctor.checks.reach import Reach, kept_off
from rackloom.prove.doctor.checks.view import View, at_device, at_node, at_pod
from rackloom.prove.doctor.findings import Finding, Severity, fails, unknown
from rackloom.prove.picture.values import DeviceUse, NodeSeen


def check_slices(view: View) -> Iterator[Finding]:
    """All findings about nodes, the devices that they publish, and claims that hold them."""
    published = {(one.driver, one.node) for one in view.picture.pools}
    expected = _expected(view)
    for node in view.picture.nodes:
        yield from _ready(node, view)
        yield from _publishes(node, [one for one in expected if (one, node.name) not in published], view)
    yield from _gone(view)
    reach = Reach(view)
    yield from _taints(view, reach)
    drivers = {one.driver for one in view.picture.pools}
    for use in view.picture.uses:
        if use.driver in drivers:
            yield from _allocated(use, view, reach)


def _ready(node: NodeSeen, view: View) -> Iterator[Finding]:
    if node.ready is True:
        return
    subject, where = f"node {node.name}", view.at_tray(node.name)
    fix = f"kubectl describe node {node.name}  # then systemctl status kubelet on its machine"
    if node.ready is None:
        said = "the cluster does not know how it is: its kubelet is silent"
        told = (f"cluster: condition Ready of {node.name} is Unknown",)
        yield unknown(
            names.NODE_READY, subject, said, fix, evidence=told, where=where, since=node.ready_since
        )
    else:
        evidence = (f"cluster: condition Ready of {node.name} is False",)
        yield fails(
            names.NODE_READY,
            subject,
            "it is not ready",
            fix,
            evidence=evidence,
            where=where,
            since=node.ready_since,
        )


def _expected(view: View) -> tuple[str, ...]:
    """Drivers that most nodes of cliques publish through: the others lack theirs."""
    nodes = {one.name for one in view.picture.nodes if one.clique is not None}
    counts = Counter(one.driver for one in view.picture.pools if one.node in nodes)
    return tuple(sorted(driver for driver, count in counts.items() if 2 * count > len(nodes)))


def _publishes(node: NodeSeen, missing: list[str], view: View) -> Iterator[Finding]:
    if node.clique is not None and missing:
        yield fails(
            names.NODE_PUBLISHES,
            f"node {node.name}",
            f"{', '.join(missing)} publishes no devices of it, as it does of other nodes",
            f"kubectl get pods -A -o wide --field-selector spec.nodeName={node.name}  # is its plugin there?",
            evidence=(
                f"cluster: node {node.name} is in clique {node.clique}",
                f"slices: none of {', '.join(missing)} for it",
            ),
            where=view.at_tray(node.name),
        )


def _gone(view: View) -> Iterator[Finding]:
    gone: defaultdict[str, set[str]] = defaultdict(set)
    for one in view.picture.pools:
        if one.node and one.node not in view.nodes:
            gone[one.node].add(one.driver)
    for node, drivers in sorted(gone.items()):
        yield fails(
            names.SLICE_OF_NODE,
            f"node {node}",
            f"slices of {', '.join(sorted(drivers))} are left of a node that is gone",
            f"kubectl delete resourceslices --field-selector spec.nodeName={node}",
            evidence=(f"slices: {', '.join(sorted(drivers))}", f"cluster: no node {node}"),
            where=(at_node(node),),
        )


def _taints(view: View, reach: Reach) -> Iterator[Finding]:
    for device in view.picture.devices:
        kept = kept_off(device.taints)
        if kept and device.node in view.nodes:
            use = view.uses.get((device.driver, device.pool, device.name))
            held = "it is free" if use is None else f"claim {use.claim} has it"
            yield fails(
                names.DEVICE_TAINT,
                f"device {device.node}/{device.name}",
                f"its plugin keeps workloads off it: {', '.join(kept)}",
                mend(device, use, reach),
                severity=Severity.WARNING if use is None else Severity.ERROR,
                evidence=(f"slice: {', '.join(kept)}", f"claims: {held}"),
                where=(at_device(device), *view.at_tray(device.node)),
            )


def _allocated(use: DeviceUse, view: View, reach: Reach) -> Iterator[Finding]:
    if (use.driver, use.pool, use.device) in view.devices:
        return
    namespace, _, name = use.claim.partition("/")
    yield fails(
        names.DEVICE_THERE,
        f"ResourceClaim {use.claim}",
        f"it was given {use.device} of {use.pool}, which {use.driver} no longer publishes",
        _let_go(use, reach) or f"kubectl -n {namespace} delete resourceclaim {name}",
        evidence=(f"claim: {use.driver}/{use.pool}/{use.device}", f"slices: no such device in {use.pool}"),
        where=(at_node(use.pool), *map(at_pod, use.pods)),
    )


def _let_go(use: DeviceUse, reach: Reach) -> str:
    """Its pods hold what is not there: they go on nowhere, unless made anew elsewhere."""
    if not use.pods:
        return ""
    places = [reach.place_for(pod, use.pool) for pod in use.pods]
    if all(places):
        return f"{delete(use)}  # made anew, it gets {places[0]}"
    return (
        f"{delete(use)}  # {stands_still(use, use.pool, reach)}: first bring {use.device} of {use.pool} back"
    )
