"""Bugs of the kind that has been reported of real control planes, planted one at a time, must be found.

A simulation that finds nothing is only as good as the bugs that it can find. Each bug is a small change of
production code (in `planted`, by subject). The same seeds pass without it.
"""

import pytest
from tests.simulation.carving.run import LoadPlan as SimPlan
from tests.simulation.carving.run import simulate
from tests.simulation.planted import answering, knowing, owning, passing, planning, sharing, speaking
from tests.simulation.planted.plans import Bug

BUGS: dict[Bug, SimPlan] = {
    **speaking.BUGS,
    **planning.BUGS,
    **passing.BUGS,
    **knowing.BUGS,
    **owning.BUGS,
    **answering.BUGS,
    **sharing.BUGS,
}

SEEDS = 8
FOUND_BY = {
    speaking.return_code_ignored: 4,
    speaking.update_drops_members: 1,
    planning.owned_by_number_in_any_domain: 1,
    planning.one_name_for_two: 1,
    planning.gpus_of_strangers_touched: 4,
    knowing.removal_reported_but_not_seen: 1,
    knowing.ready_in_somebody_elses_partition: 1,
    knowing.interfaces_of_a_released_instance_stay_ready: 3,
    knowing.newest_of_two_controllers_believed: 1,
    knowing.contradiction_told_and_not_minded: 1,
    owning.released_machine_leaves_its_gpus: 1,
    owning.deleted_logical_partition_leaves_a_partition: 4,
    answering.empty_list_ignored: 5,
    sharing.epoch_of_the_lease_not_checked: 1,
}
"""The seed that finds a bug soonest, if that is not 0. The others are tried only if it does not."""


def seeds_for(bug: Bug) -> list[int]:
    """All seeds, the one that is known to find the bug first."""
    return sorted(range(SEEDS), key=lambda seed: seed != FOUND_BY.get(bug, 0))


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_it_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert any(simulate(seed, BUGS[bug]).broken for seed in seeds_for(bug)), f"{SEEDS} seeds pass with it"


@pytest.mark.slow
@pytest.mark.parametrize("plan", {id(plan): plan for plan in BUGS.values()}.values())
def test_without_it_the_same_runs_pass(plan: SimPlan) -> None:
    assert simulate(0, plan).broken is None
