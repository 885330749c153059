"""Actions of users on the cluster of a scenario, and faults of its nodes.

Users create the objects of a manifest and delete objects. Trays lose power, start again or reboot. GPUs
fall off the bus or report Xid errors. NIC links go down. Another writer or a late GPU Feature Discovery
makes the clique label wrong. A GPU reports that it is still joining its fabric. IMEX daemons are killed,
also so that two of them swap addresses.

After each fault the affected node's plugins check their devices, as their periodic loops would.
`heal_nodes` starts nodes, brings GPUs and links back, and lets labels come at once.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from rackloom.claim.node.fabric import FabricState
from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL, GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import NODE, POD, Object
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.scenario.model import action, require
from rackloom.lab.scenario.parameters import (
    Gpu,
    KindName,
    Manifest,
    Nic,
    Ordinal,
    Seconds,
    Tray,
    Trays,
    kind_named,
    manifest_objects,
)
from rackloom.lab.scenario.stage import Stage
from rackloom.topology.part_names import read_part_name

# Users.


@action(layer="cluster", breaks=False)
async def submit(stage: Stage, *, manifest: Manifest, namespace: str = "default") -> str:
    """A user creates the objects of a manifest (YAML)."""
    made = []
    for kind, wanted in manifest_objects(manifest, namespace):
        created = await stage.cluster.api.create(kind, wanted)
        made.append(f"{kind.kind} {created['metadata']['name']}")
    return f"created {', '.join(made)}"


@action(layer="cluster", breaks=False)
async def delete_object(stage: Stage, *, kind: KindName, name: str, namespace: str = "default") -> str:
    """A user deletes an object."""
    known = kind_named(kind)
    await stage.cluster.api.delete(known, name, namespace if known.namespaced else None)
    return f"{kind} {name} is to go"


# Nodes, GPUs and NICs.


@action(layer="cluster")
async def node_lost(stage: Stage, *, tray: Tray) -> str:
    """The power of a tray fails."""
    node = stage.truth.node(tray)
    await stage.cluster.nodes.lose(node)
    return f"{node} has no power"


@action(layer="cluster")
async def node_back(stage: Stage, *, tray: Tray) -> str:
    """It starts again."""
    node = stage.truth.node(tray)
    await stage.cluster.nodes.heal(node)
    return f"{node} has started"


@action(layer="cluster")
async def node_reboots(stage: Stage, *, tray: Tray) -> str:
    """A node goes and comes back at once."""
    node = stage.truth.node(tray)
    await stage.cluster.nodes.reboot(node)
    return f"{node} was rebooted"


@action(layer="cluster")
async def gpu_lost(stage: Stage, *, gpu: Gpu) -> str:
    """A GPU falls off the bus of its tray."""
    node = stage.truth.node(gpu)
    stage.cluster.nodes[node].gpus.lose(_module_of(gpu))
    await stage.cluster.nodes.look(node)
    return f"{gpu} ({node}) does not answer"


@action(layer="cluster")
async def gpu_xid(stage: Stage, *, gpu: Gpu, xid: Ordinal) -> str:
    """The driver reports an error of a GPU."""
    node = stage.truth.node(gpu)
    stage.cluster.nodes[node].gpus.strike(_module_of(gpu), xid)
    await stage.cluster.nodes.look(node)
    return f"{gpu} ({node}) reported Xid {xid}"


@action(layer="cluster")
async def nic_link_down(stage: Stage, *, nic: Nic) -> str:
    """The link of a NIC that serves a GPU goes down."""
    node, number = stage.truth.node(nic), read_part_name(nic).nic
    nics = stage.cluster.nodes[node].nics
    rails = nics.rails()
    require(number is not None and number < len(rails), f"{node} has {len(rails)} NICs that serve GPUs")
    device = rails[number or 0]
    nics.down = frozenset({*nics.down, device})
    await stage.cluster.nodes.look(node)
    return f"{nic} ({device} of {node}) has no link"


@action(layer="cluster")
async def fabric_state(stage: Stage, *, gpu: Gpu, state: Literal["in-progress", "completed"]) -> str:
    """A GPU reports (NVML) that it is joining its fabric (`in-progress`), or has joined (`completed`).

    The switches do not report it.
    """
    node, module = stage.truth.node(gpu), _module_of(gpu)
    gpus = stage.cluster.nodes[node].gpus
    by_id = {answering.module_id: answering for answering in gpus.answering}
    joined = module in by_id and by_id[module].fabric.clique_id
    require(joined, f"{gpu} ({node}) is in no partition that it could join")
    fabric = msgspec.structs.replace(by_id[module].fabric, state=FabricState[state.replace("-", "_").upper()])
    by_id[module] = msgspec.structs.replace(by_id[module], fabric=fabric)
    gpus.set_gpus(tuple(by_id.values()))
    stage.truth.joining.discard(node)
    if state == "in-progress":
        stage.truth.joining.add(node)
    await stage.cluster.nodes.look(node)
    return f"{gpu} ({node}) says: {state}"


def _module_of(gpu: str) -> int:
    return (read_part_name(gpu).gpu or 0) + 1


# The clique label.


OTHER_LABEL_WRITER = "another-labeller"
"""The user that overwrites labels of another writer."""


@action(layer="cluster")
async def clique_label_by_hand(stage: Stage, *, tray: Tray, value: str) -> str:
    """Somebody else writes nvidia.com/gpu.clique on the node of a tray."""
    node = stage.truth.node(tray)
    patch = {"metadata": {"labels": {GPU_CLIQUE_LABEL: value}}}
    await DirectApi(stage.cluster.kube, OTHER_LABEL_WRITER).patch(NODE, node, None, patch)
    return f"{OTHER_LABEL_WRITER} wrote {value} on {node}"


@action(layer="cluster")
async def clique_label_lags(stage: Stage, *, seconds: Seconds) -> str:
    """From now on GPU Feature Discovery writes each label `seconds` late."""
    # The real one checks once a minute, and not at every change.
    stage.cluster.discovery.lag = seconds
    return f"labels come {seconds:g} s late"


# IMEX daemons.


@action(layer="cluster")
async def imex_daemon_killed(stage: Stage, *, tray: Tray) -> str:
    """The pod of a ComputeDomain's IMEX daemon on a tray is killed."""
    node = stage.truth.node(tray)
    found = await _daemons(stage, node)
    await _kill(stage, found)
    return f"killed {', '.join(pod['metadata']['name'] for pod in found)} on {node}"


@action(layer="cluster")
async def imex_addresses_swapped(stage: Stage, *, trays: Trays) -> str:
    """The pods of the IMEX daemons on two trays are killed, and each new one has the address of the other."""
    nodes = [stage.truth.node(tray) for tray in trays]
    pods = [(await _daemons(stage, node))[0] for node in nodes]
    planned = dict(zip(nodes, (pod["status"]["podIP"] for pod in reversed(pods)), strict=True))
    stage.cluster.addresses.update(planned)
    await _kill(stage, pods)
    return f"killed, and next on {', on '.join(f'{node} {address}' for node, address in planned.items())}"


async def _daemons(stage: Stage, node: str) -> list[Object]:
    daemons = (await stage.cluster.api.list(POD, labels=COMPUTE_DOMAIN_LABEL)).items
    found = [daemon for daemon in daemons if daemon["spec"].get("nodeName") == node]
    require(found, f"no IMEX daemon runs on {node}")
    return found


async def _kill(stage: Stage, pods: Sequence[Object]) -> None:
    for pod in pods:
        meta = pod["metadata"]
        await stage.cluster.api.delete(POD, meta["name"], meta["namespace"], grace_seconds=0)


# Repair.


async def heal_nodes(stage: Stage) -> str:
    """Nodes run, GPUs and links are back, labels come at once."""
    nodes = stage.cluster.nodes
    stage.cluster.discovery.lag = 0.0
    for name in sorted(nodes.off):
        await nodes.heal(name)
    for node in nodes:
        node.gpus.find_all()
        node.nics.down = frozenset()
        await nodes.look(node.name)
    return "the nodes are repaired"
