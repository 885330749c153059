"""Bugs of the kind that has been reported of real control planes, planted one at a time, must be found.

A simulation that finds nothing is worth what it can find. Each bug is a small change of production code (in
`planted`, by what it is about); the same seeds pass without it.
"""

import pytest
from tests.simulation.planted import answering, knowing, owning, passing, planning, sharing, speaking
from tests.simulation.planted.plans import Bug

from rackloom.lab.carving.run import LoadPlan as SimPlan
from rackloom.lab.carving.run import simulate

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


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_it_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert any(simulate(seed, BUGS[bug]).broken for seed in range(SEEDS)), f"{SEEDS} seeds pass with it"


@pytest.mark.slow
@pytest.mark.parametrize("plan", {id(plan): plan for plan in BUGS.values()}.values())
def test_without_it_the_same_runs_pass(plan: SimPlan) -> None:
    assert simulate(0, plan).broken is None
