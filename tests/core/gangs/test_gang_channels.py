"""Members with a channel each: every one takes a tray, whichever other trays there are."""

import pytest
from tests.core.cluster.views import lists_of
from tests.core.gangs.test_gang_objects import CHANNEL, node, pod, template

from rackloom.core.cluster.gang_objects import GangKey, read_member, read_tray_node
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.gangs.placement import answer_placement
from rackloom.core.gangs.snapshot import GangSettings, GangSnapshot, read_record
from rackloom.core.gangs.trays import SiteCache
from rackloom.errors import Refused
from rackloom.lab.kube.patches import merge_patch

KEY = GangKey("team", "big")
SETTINGS = GangSettings(settle=0.0)
OPENED = {"metadata": {"namespace": "team", "name": "big", "uid": "u", "resourceVersion": "1"}, "spec": {}}
RACK = [node(f"gb{number}") for number in range(4)]


def hgx(count, **spec):
    return [node(f"h{number}", gpus=8, clique="h.1", **spec) for number in range(count)]


def answered(nodes, plan=OPENED, *, size=2, gpus=4, claims=("channel",), others=(), **spec):
    meta = {"labels": {GANG_LABEL: "big"}, "annotations": {SIZE_ANNOTATION: str(size)}}
    names = {f"w{number}": meta | {"name": f"w{number}", "uid": f"w{number}"} for number in range(size)}
    pods = [
        pod(name, claims=claims, gpus=gpus, meta=template | {"namespace": "team"}, **spec)
        for name, template in names.items()
    ]
    templates = (template("channel", [CHANNEL]),)
    record = read_record(plan)
    cluster = lists_of(nodes, (*pods, *others), settings=SETTINGS, templates=templates, records=(record,))
    snapshot = GangSnapshot(
        key=KEY,
        now=0.0,
        record=record,
        members=tuple(map(read_member, pods)),
        nodes=nodes_of(nodes, record.reserved),
        cluster=cluster,
    )
    found = answer_placement(snapshot, SETTINGS, SiteCache())
    if record.plan is not None:
        return found
    (action,) = found.actions
    return merge_patch(plan, action.patch)


def nodes_of(nodes, names):
    found = {node["metadata"]["name"]: read_tray_node(node) for node in nodes}
    return {name: found[name] for name in names}


@pytest.mark.parametrize("larger", [hgx(1), hgx(1, unschedulable=True), hgx(4)])
def test_a_clique_with_larger_trays_keeps_no_gang_from_the_one_where_it_fits(larger):
    placed = read_record(answered([*RACK, *larger], size=4))
    assert len(set(placed.plan.trays)) == 4


def test_a_whole_tray_is_one_of_those_that_the_members_may_go_to():
    choosing = {"nodeSelector": {"nvidia.com/gpu.clique": "h.1"}}
    placed = read_record(answered([*RACK, *hgx(2)], **choosing))
    assert set(placed.plan.trays) == {"h0", "h1"}
    assert {group.gpus for group in placed.gang.groups} == {8}


def test_no_two_members_share_a_larger_tray():
    taken = [node(f"gb{number}", unschedulable=number > 0) for number in range(4)]
    placed = read_record(answered([*taken, *hgx(2)]))
    assert sorted(placed.plan.trays) == ["h0", "h1"]
    with pytest.raises(Refused):
        answered([*taken, *hgx(1)])


def test_a_node_that_came_since_does_not_take_a_plan_back():
    plan = answered(RACK)
    for larger in (hgx(1), hgx(4)):
        found = answered([*RACK, *larger], plan)
        assert (found.checked, found.actions) == (read_record(plan).plan, ())
    assert answered([*RACK[1:3], *hgx(4), RACK[0], RACK[3]], plan).checked is not None


def test_a_gang_that_asks_for_something_else_by_now_is_placed_anew():
    plan = answered(RACK)
    for how in ({"gpus": 8}, {"claims": (), "gpus": 2}, {"size": 3}):
        assert answered(RACK, plan, **how).checked is None
    shared = answered(RACK, gpus=2, claims=())
    assert len(set(read_record(shared).plan.trays)) == 1
    assert answered(RACK, shared, gpus=2).checked is None


def test_in_a_clique_of_mixed_trays_a_whole_tray_is_whatever_it_has():
    mixed = [node("gb0"), node("gb1"), node("gb2", gpus=2), node("gb3", gpus=2)]
    placed = read_record(answered(mixed, size=4, gpus=2))
    assert len(set(placed.plan.trays)) == 4
    assert sorted(set(read_record(answered(mixed, size=2, gpus=2)).plan.trays)) == ["gb0", "gb1"], (
        "no weak one"
    )
    with pytest.raises(Refused):
        answered(mixed, size=4, gpus=3)


def test_a_tray_that_lost_gpus_is_taken_where_too_few_others_are_free():
    weak = [*RACK[:3], node("gb3", gpus=3), *(node(f"b{at}", clique="u.2") for at in range(4))]
    other = [pod(f"b{at}", nodeName=f"b{at}", gpus=4) for at in range(4)]
    assert set(read_record(answered(weak, size=4, gpus=1)).plan.trays) == {f"b{at}" for at in range(4)}
    assert set(read_record(answered(weak, size=4, gpus=1, others=other)).plan.trays) == {
        f"gb{at}" for at in range(4)
    }
