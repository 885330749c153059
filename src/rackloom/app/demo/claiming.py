"""The demo's claims: the two templates of nixl-kv-transfer, allocated as users of the example write them."""

from collections import Counter
from collections.abc import Sequence

from rackloom.app.demo.story import Evidence, NotSeen
from rackloom.app.examples import example
from rackloom.claim.allocate.objects import DeviceResult, Node, ObjectMeta, ResourceSlice
from rackloom.claim.allocate.pods import Placed, Unplaced, allocate_each
from rackloom.claim.allocate.slices import GPU_DRIVER, device_classes, slices_of
from rackloom.claim.allocate.tell import told
from rackloom.claim.manifests.read import read
from rackloom.topology.affinity import Cell, PathClass, classes
from rackloom.topology.machine import Machine
from rackloom.topology.profiles import load_machine

PROFILE = "azure-nd96isr-h100-v5"
NODES = ("h100-a", "h100-b")
EXPECTED = {"h100-4gpu-4nic-numa-aligned": "near", "h100-4gpu-4nic-numa-unaligned": "far"}


async def allocate_templates() -> Evidence:
    """Both claims on two nodes; whether the NICs are near is read from the topology, not from the claim."""
    machine = load_machine(PROFILE)
    manifests = read(sorted(example("nixl-kv-transfer").glob("resource-claim-template-*.yaml")))
    slices = [one for node in NODES for one in slices_of(machine, node)]
    nodes = [Node(metadata=ObjectMeta(name=name)) for name in NODES]
    answers = allocate_each(nodes, device_classes(), slices, manifests.claims)
    seen = {answer.claim.rpartition("/")[2]: _seen(machine, slices, answer) for answer in answers}
    found = {claim: shown["nicsAre"] for claim, shown in seen.items()}
    if found != EXPECTED:
        raise NotSeen("the claims did not get the NICs that their names promise", claims=seen)
    return {"profile": PROFILE, "nodes": list(NODES), "claims": seen}


def _seen(machine: Machine, slices: Sequence[ResourceSlice], answer: Placed | Unplaced) -> Evidence:
    if isinstance(answer, Unplaced):
        raise NotSeen(answer.reason, claim=answer.claim, why=[told(account) for account in answer.nodes])
    numbers = _positions(slices)
    taken = answer.allocation.devices.results
    gpus = [numbers[_key(one)] for one in taken if one.driver == GPU_DRIVER]
    nics = [numbers[_key(one)] for one in taken if one.driver != GPU_DRIVER]
    matrix = classes(machine)
    cells = [matrix[gpu][nic] for gpu in gpus for nic in nics]
    return {
        "node": answer.node,
        "gpus": [machine.gpus[index].pci_address for index in gpus],
        "nics": [machine.nics[index].rdma_device for index in nics],
        "pathClasses": dict(Counter(cell.path_class for cell in cells)),
        "nicsAre": _distance(cells),
    }


def _distance(cells: Sequence[Cell]) -> str:
    """Near: every NIC on the socket of every GPU; far: none of them."""
    crossing = sum(cell.path_class is PathClass.SYS for cell in cells)
    return {0: "near", len(cells): "far"}.get(crossing, "mixed")


def _positions(slices: Sequence[ResourceSlice]) -> dict[tuple[str, str, str], int]:
    """Driver, pool and name of a device -> its place in the machine profile."""
    return {
        (one.spec.driver, one.spec.pool.name, device.name): place
        for one in slices
        for place, device in enumerate(one.spec.devices)
    }


def _key(result: DeviceResult) -> tuple[str, str, str]:
    return result.driver, result.pool, result.device
