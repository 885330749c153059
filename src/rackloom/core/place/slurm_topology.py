"""Slurm's `topology/block` from a site, and the steps by which a topology follows the site.

A block is a clique. `topology_of` is the only rule: `rackloom place --render slurm` prints its result
once, and `rackloom topology slurm` keeps it up to date. Blocks and nodes are in natural order, so that the
same site always gives the same text.

`SLURM_TAINT` marks the nodes of a cluster that are Slurm's. The same taint keeps kube-scheduler, gangs and
`rackloom place` off them, so a tray is in the topology of Slurm or open to Kubernetes, never both.

The behaviour of slurmctld (tried on 26.05.5, and read in its source):

- It ends with `fatal` if a topology has no block, or two blocks with one name. `scontrol reconfigure`
  reports success all the same. So no empty topology is ever returned.
- It lets a node change its block while a job runs there: the job keeps its nodes, and is then spread over
  two blocks. So a node enters a block only when no job runs on it (`next_topology`). Until then it is in no
  block, and gets no new job. That needs no memory: a node that waits is a node that enters.
- A node that the file does not have is a warning. A block may be without nodes.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.reader import ReadObject, read_state
from rackloom.core.cluster.trays import PlacementSite, placement_site
from rackloom.errors import Refused
from rackloom.runtime.foreign_text import decode_yaml_document

SLURM_TAINT = "slinky.slurm.net/slurm"
"""Key of the taint that Slinky's documentation puts on the nodes of Slurm."""
TOPOLOGY_NAME = "nvlink"
"""The name that partitions of Slurm give as their `Topology`."""


class SlurmTopology(msgspec.Struct, frozen=True):
    """Nodes by block, in order. Every node is in one block."""

    blocks: Mapping[str, tuple[str, ...]]
    block_size: int
    """Nodes of the base block that Slurm plans with."""

    @property
    def block_of(self) -> dict[str, str]:
        """The block of each node."""
        return {node: block for block, nodes in self.blocks.items() for node in nodes}


# From a site.


def topology_of(site: PlacementSite, block_size: int | None = None) -> SlurmTopology:
    """A block for each clique. Trays without a clique are in no block.

    `block_size`: None for the size of the largest block. Raises Refused if two cliques would be blocks with
    one name, which slurmctld does not survive.
    """
    cliques: dict[str, list[str]] = {}
    for tray in site.trays:
        if tray.clique is not None:
            cliques.setdefault(tray.clique, []).append(tray.name)
    # A block is called `<clusterUUID>-<cliqueID>`: the clique with a dash for its dot.
    blocks = {clique.replace(".", "-"): _in_order(nodes) for clique, nodes in cliques.items()}
    if len(blocks) < len(cliques):
        raise Refused(
            f"two of the cliques {', '.join(sorted(cliques))} would be one block of Slurm",
            nearest_fix="give them names that differ in more than dots and dashes",
        )
    largest = max((len(nodes) for nodes in blocks.values()), default=1)
    ordered = {name: blocks[name] for name in _in_order(blocks)}
    return SlurmTopology(blocks=ordered, block_size=block_size or largest)


def topology_of_nodes(
    nodes: Iterable[ReadObject],
    labels: SchedulerLabels = SchedulerLabels(),  # noqa: B008 (a frozen value)
    *,
    taint: str | None = None,
    block_size: int | None = None,
) -> SlurmTopology:
    """The topology of Kubernetes nodes. `taint`: only of nodes that have a taint with this key.

    Raises Refused for a node that cannot be read: Slurm would lose the node of running jobs.
    """
    state = read_state(nodes, labels=labels)
    if state.unreadable:
        raise Refused(str(state.unreadable[0]), nearest_fix="correct it; Slurm keeps what it has until then")
    chosen = tuple(
        node for node in state.nodes if taint is None or taint in (found.key for found in node.taints)
    )
    return topology_of(placement_site(replace(state, nodes=chosen)), block_size)


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Numbers count as numbers: tray-9 is before tray-10."""
    return tuple(sorted(names, key=_natural))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


# As Slurm reads it.


def topology_document(topology: SlurmTopology) -> list[dict[str, Any]]:
    """The value of topology.yaml."""
    listed = [
        {"block": name} | ({"nodes": ",".join(nodes)} if nodes else {})
        for name, nodes in topology.blocks.items()
    ]
    block = {"block_sizes": [topology.block_size], "blocks": listed}
    return [{"topology": TOPOLOGY_NAME, "cluster_default": True, "block": block}]


def topology_text(topology: SlurmTopology) -> str:
    """The text of topology.yaml."""
    return yaml.safe_dump(topology_document(topology), sort_keys=False)


class _BlockDocument(msgspec.Struct):
    block: str
    nodes: str = ""


class _BlocksDocument(msgspec.Struct):
    block_sizes: list[int]
    blocks: list[_BlockDocument]


class _TopologyDocument(msgspec.Struct):
    topology: str
    block: _BlocksDocument


def read_topology(text: str) -> SlurmTopology | None:
    """The topology in a text from `topology_text`. None for other text, such as a file with node ranges."""
    try:
        (found,) = msgspec.convert(decode_yaml_document(text, "topology.yaml"), list[_TopologyDocument])
    except ValueError:
        return None
    if found.topology != TOPOLOGY_NAME or any("[" in block.nodes for block in found.block.blocks):
        return None
    sizes = found.block.block_sizes or [1]
    blocks = {block.block: tuple(filter(None, block.nodes.split(","))) for block in found.block.blocks}
    return SlurmTopology(blocks=blocks, block_size=sizes[0])


# The next step.


class NodeMove(msgspec.Struct, frozen=True):
    """A node that leaves one block for another."""

    node: str
    source: str
    target: str


class TopologyStep(msgspec.Struct, frozen=True, kw_only=True):
    """The next topology for Slurm."""

    topology: SlurmTopology | None
    """None to keep Slurm's topology, because the site shows no block, or every node has to wait."""
    moved: tuple[NodeMove, ...] = ()
    """Nodes that change their block with this step."""
    waiting: tuple[str, ...] = ()
    """Nodes that are in no block for now, because jobs run on them or may."""


def entering_nodes(last: SlurmTopology | None, found: SlurmTopology) -> tuple[str, ...]:
    """Nodes that are not yet in the block that the site shows. Empty if Slurm has no topology from us."""
    if last is None:
        return ()
    before = last.block_of
    return tuple(node for node, block in found.block_of.items() if before.get(node) != block)


def next_topology(
    last: SlurmTopology | None, found: SlurmTopology, busy: Collection[str] | None
) -> TopologyStep:
    """The step from Slurm's topology (`last`, None if it has none from us) to that of the site.

    `busy`: nodes on which jobs run, or None if they are unknown, so that any node may be busy.
    """
    entering = entering_nodes(last, found)
    waiting = tuple(node for node in entering if busy is None or node in busy)
    before = {} if last is None else last.block_of
    after = found.block_of
    moved = tuple(
        NodeMove(node, before[node], after[node])
        for node in entering
        if node in before and node not in waiting
    )
    blocks = {
        name: tuple(node for node in nodes if node not in waiting) for name, nodes in found.blocks.items()
    }
    kept = {name: nodes for name, nodes in blocks.items() if nodes}
    topology = replace(found, blocks=kept) if kept else None
    return TopologyStep(topology=topology, moved=moved, waiting=waiting)
