"""The command and the gang controller agree about trays with an IMEX channel in use."""

from typing import Any

import pytest
from tests.core.cluster.views import lists_of, read_site
from tests.core.gangs.gang_toy import read_site as seen_by_the_controller

from rackloom.core.cluster.trays import Gang, GangGroup, PlacementSite, PlacementTerms
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.errors import Refused


def node(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.clique": "c"}},
        "status": {
            "allocatable": {"nvidia.com/gpu": "4"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def claim(device: str, on: str, driver: str = "compute-domain.nvidia.com") -> dict[str, Any]:
    result = {"request": "c", "driver": driver, "pool": on, "device": device}
    return {
        "metadata": {"name": "old", "namespace": "team", "uid": "u"},
        "spec": {"devices": {}},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }


NODES = (node("n0"), node("n1"))


def from_the_command(held: dict[str, Any]) -> PlacementSite:
    return read_site(NODES, claims=[held])


def from_the_controller(held: dict[str, Any]) -> PlacementSite:
    return seen_by_the_controller(lists_of(NODES, claims=[held]))


@pytest.mark.parametrize("site", [from_the_command, from_the_controller])
def test_a_member_with_a_channel_is_not_where_one_is_in_use(site: Any) -> None:
    linked, daemon = site(claim("channel-0", "n0")), site(claim("daemon-0", "n0"))
    assert plan_gang(linked, linking(1)).trays == ("n1",)
    with pytest.raises(Refused, match="n0 "):
        plan_gang(linked, linking(2))
    assert plan_gang(daemon, linking(2)).trays == ("n0", "n1"), "the daemon of a node is none of its users"


def linking(members: int) -> Gang:
    group = GangGroup(name="w", members=members, gpus=4, terms=PlacementTerms(channel=True))
    return Gang(name="g", groups=(group,), exclusive=True)
