"""Jobs that are placed side by side, and keep apart by required anti-affinity."""

from pathlib import Path
from typing import Any

import pytest
from tests.cli.place_objects import job, node, ran, saved

from rackloom.core.cluster.jobs import Job, read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.trays import GangPlan, MemberAssignment
from rackloom.core.place.gang_requests import are_anti_affine, avoiding_job

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def labelled(name: str, members: int = 1, bars: str = "") -> dict[str, Any]:
    """A job with its name on its pods, which may share no node with pods of the job `bars`."""
    unit = job(name, members, 2)
    template = unit["spec"]["template"]
    template["metadata"] = {"labels": {"app": name}}
    if bars:
        term = {"topologyKey": SchedulerLabels().host, "labelSelector": {"matchLabels": {"app": bars}}}
        template["spec"] = {**template["spec"], "affinity": {"podAntiAffinity": {REQUIRED: [term]}}}
    return unit


def read(*objects: dict[str, Any]) -> list[Job]:
    return read_jobs(objects, SchedulerLabels())


def test_jobs_are_strangers_whichever_of_them_says_so() -> None:
    assert are_anti_affine(read(labelled("a"), labelled("c"), labelled("b", bars="a")))
    assert are_anti_affine(read(labelled("a", bars="b"), labelled("b")))
    assert not are_anti_affine(read(labelled("a", bars="a"), labelled("b", bars="z")))


def test_what_was_avoided_still_is() -> None:
    planned, other = read(labelled("a"), labelled("b", bars="a"))
    seats = (MemberAssignment("pod", 0, "n1"), MemberAssignment("pod", 1, "n2"))
    plan = GangPlan(gang="a", seats=seats, cliques=("c",), spares=(), price=(), reason="")
    before = {"pod": {"n0": "kept apart from z", "n1": "kept apart from z"}}
    assert avoiding_job(other, planned, plan, before) == {
        "pod": {"n0": "kept apart from z", "n1": "kept apart from z", "n2": "kept apart from a"}
    }
    assert avoiding_job(planned, planned, plan, {}) == {}


@pytest.mark.parametrize("bars", [("b", ""), ("", "a")])
def test_two_jobs_of_one_call_share_no_tray_where_either_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bars: tuple[str, str]
) -> None:
    jobs = (labelled("a", bars=bars[0]), labelled("b", bars=bars[1]), labelled("c"))
    assert ran(saved(tmp_path, *jobs, node("n1", "k"), node("n2", "k"))) == 0
    trays = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("pod ")]
    assert (trays[0] != trays[1], len(trays)) == (True, 3)
    assert ran(saved(tmp_path, *jobs[:2], node("n1", "k"))) == 1
    assert "it may use none of the 1 nodes (kept apart from a)" in capsys.readouterr().out
