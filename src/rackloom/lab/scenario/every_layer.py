"""Steps that concern every layer of a site, and the conditions at the end of each scenario."""

from rackloom.lab.invariants.acknowledged import lost_object
from rackloom.lab.scenario.cluster_actions import heal_nodes
from rackloom.lab.scenario.control_plane import heal_api_server, heal_controllers, require_one_leader
from rackloom.lab.scenario.model import action, expectation, require
from rackloom.lab.scenario.site_faults import heal_site, require_all_struck
from rackloom.lab.scenario.stage import Stage
from rackloom.lab.scenario.switch_leaders import heal_leaders


@action()
async def heal(stage: Stage) -> str:
    """Everything that still is broken is repaired, on every layer."""
    healed = [await heal_site(stage)]
    await heal_leaders(stage)
    if stage.has_cluster:
        healed += [heal_api_server(stage), await heal_controllers(stage), await heal_nodes(stage)]
    return "; ".join(healed)


async def clear(stage: Stage) -> str:
    """Repair everything, and forget the faults that were to strike coming calls and have not."""
    for switch in stage.truth.switches:
        switch.faults.clear()
    return await heal.run(stage)


@expectation()
async def invariants(stage: Stage) -> str:
    """S1, S2 and S4 held at every change of a fabric so far, and acknowledged objects exist (S10)."""
    broken = list(stage.truth.invariants.broken)
    kept = list(stage.rest.kept())
    for made in kept:
        lost = lost_object(f"instance {made.id}", made.machine, await stage.rest.shown(made))
        broken += [f"S10: {text}" for text in lost]
    require(not broken, "; ".join(broken))
    require_one_leader(stage)
    text = f"S1, S2, S4 at {stage.truth.invariants.checks} changes of fabrics; S10 of {len(kept)} instances"
    return f"{text}; never did two of Rackloom's controllers lead at once" if stage.candidates else text


def require_end(stage: Stage) -> None:
    """After the last step: every fault has struck, and no two controllers ever led at once."""
    require_all_struck(stage)
    require_one_leader(stage)
