"""Steps that concern every layer of a site, and what must hold at the end of each scenario."""

from rackloom.lab.scenario.cluster_actions import heal_nodes
from rackloom.lab.scenario.control_plane import heal_api_server, heal_controllers, require_one_leader
from rackloom.lab.scenario.model import action, expectation, require
from rackloom.lab.scenario.site_faults import heal_site, require_all_struck
from rackloom.lab.scenario.stage import Stage
from rackloom.lab.scenario.switch_leaders import heal_leaders


@action()
async def heal(stage: Stage) -> str:
    """Whatever still is broken is repaired, on every layer."""
    healed = [await heal_site(stage)]
    await heal_leaders(stage)
    if stage.has_cluster:
        healed += [heal_api_server(stage), await heal_controllers(stage), await heal_nodes(stage)]
    return "; ".join(healed)


@expectation()
async def invariants(stage: Stage) -> str:
    """S1, S2 and S4 held at every change of a fabric so far; what was acknowledged is there (S10)."""
    broken = list(stage.truth.broken)
    kept = list(stage.rest.kept())
    for made in kept:
        shown = await stage.rest.shown(made)
        if shown is None:
            broken.append(f"S10: instance {made.id} was acknowledged, and is gone")
        elif shown["machineId"] != made.machine:
            broken.append(f"S10: instance {made.id} moved from {made.machine} to {shown['machineId']}")
    require(not broken, "; ".join(broken))
    require_one_leader(stage)
    text = f"S1, S2, S4 at {stage.truth.judged} changes of fabrics; S10 of {len(kept)} instances"
    return f"{text}; never did two of Rackloom's controllers lead at once" if stage.candidates else text


def require_end(stage: Stage) -> None:
    """After the last step: every fault has struck, and no two controllers ever led at once."""
    require_all_struck(stage)
    require_one_leader(stage)
