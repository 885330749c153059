"""For Slurm: the options of a job, and the blocks of topology/block (topology.yaml) that they rest on."""

from rackloom.claim.place.search.blocks import blocks_of
from rackloom.claim.place.values import Gang, Plan, Site
from rackloom.errors import Refused


def options(gang: Gang, plan: Plan) -> str:
    """`#SBATCH` lines. Raises Refused where members share trays, or groups or segments differ."""
    serious = [group for group in gang.groups if not group.is_helper]
    if len({group.gpus for group in serious}) != 1 or len(plan.trays) != sum(one.members for one in serious):
        raise Refused(
            f"{gang.name}: a Slurm segment counts nodes, and here members share trays or differ in GPUs",
            nearest_fix="give every member a whole tray",
        )
    words = {
        "job-name": gang.name.rpartition("/")[2],
        "nodes": len(plan.trays),
        "ntasks-per-node": serious[0].gpus,
        "gpus-per-node": serious[0].gpus,
        "segment": _segment(gang),
        "nodelist": ",".join(plan.trays),
    }
    return "".join(f"#SBATCH --{name}={value}\n" for name, value in words.items())


def _segment(gang: Gang) -> int:
    """Nodes that must share a block: Slurm knows one number for the whole job."""
    sizes = {sum(part.members for part in block) for block in blocks_of(gang)}
    if len(sizes) > 1:
        told = " and ".join(map(str, sorted(sizes)))
        raise Refused(
            f"{gang.name}: the segments of a Slurm job are alike, and here {told} members share a clique",
            nearest_fix="use a --segment that divides the members of every group",
        )
    return sizes.pop()


def topology(site: Site) -> list[dict[str, object]]:
    """topology.yaml: a block for each clique; the base block is the largest of them."""
    blocks: dict[str, list[str]] = {}
    for tray in site.trays:
        if tray.clique is not None:
            blocks.setdefault(tray.clique, []).append(tray.name)
    largest = max((len(nodes) for nodes in blocks.values()), default=1)
    listed = [{"block": name.replace(".", "-"), "nodes": ",".join(nodes)} for name, nodes in blocks.items()]
    block = {"block_sizes": [largest], "blocks": listed}
    return [{"topology": "nvlink", "cluster_default": True, "block": block}]
