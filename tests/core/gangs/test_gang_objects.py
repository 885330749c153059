"""The facts that gangs read from pods, nodes and claims, and the patches that they write."""

from pathlib import Path

import msgspec
import pytest
import yaml
from tests.core.cluster.views import lists_of
from tests.core.gangs.gang_toy import read_site

from rackloom.core.cluster import names
from rackloom.core.cluster.claims import ClaimRequest, GpuDemand
from rackloom.core.cluster.gang_objects import (
    DEFAULT_GROUP,
    GANG_GATE,
    GANG_TAINT,
    SEGMENT_ANNOTATION,
    SPARES_ANNOTATION,
    GangKey,
    GangSpec,
    read_gang_spec,
    read_member,
    read_tray_node,
)
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import (
    FreeRegionCount,
    Gang,
    GangGroup,
    GangPlan,
    MemberAssignment,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
    without_foreign_names,
)
from rackloom.core.gangs.crd import gang_crd
from rackloom.core.gangs.requests import claim_specs, group_demand, whole_tray_gpus
from rackloom.core.gangs.slots import pin_and_ungate
from rackloom.core.gangs.snapshot import (
    ClusterLists,
    GangSettings,
    checked_gang_settings,
    create_record,
    read_record,
    record_plan,
    release_tray,
    reserve_tray,
)
from rackloom.errors import Refused
from rackloom.lab.kube.patches import json_patch, merge_patch

SETTINGS = GangSettings()
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
BASE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "base"


def pod(name="w", *, meta=None, claims=(), gpus=0, **spec):
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    named = [{"name": claim, "resourceClaimTemplateName": claim} for claim in claims]
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", **(meta or {})},
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": limits}}],
            "resourceClaims": named,
            "schedulingGates": [{"name": "other"}, {"name": GANG_GATE}],
            **spec,
        },
    }


def node(name, *, gpus=4, clique="c.1", ready="True", **spec):
    return {
        "metadata": {"name": name, "resourceVersion": "7", "labels": {names.GPU_CLIQUE_LABEL: clique}},
        "spec": spec,
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def test_the_crd_that_is_shipped_is_the_one_of_the_code():
    text = (BASE / "crd-gangs.yaml").read_text()
    assert list(yaml.safe_load_all(text)) == [gang_crd()], "run deploy/kubernetes/write_crds.py"


def test_the_api_server_prunes_no_field_of_a_recorded_gang():
    """The server drops fields that the schema lacks when it stores the object."""
    terms = PlacementTerms(where="w", channel=True, likeness="l", apart=("a",))
    group = GangGroup(name="g", members=1, gpus=1, devices="d", share="s", terms=terms, follows=True)
    gang = Gang(name="n", groups=(group,), priority=-1, preempts=False, segment=1, spares=1, exclusive=True)
    (version,) = gang_crd()["spec"]["versions"]
    kept = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["gang"]

    def pruned(value, schema):
        if isinstance(value, dict):
            known = schema["properties"]
            return {name: pruned(value[name], known[name]) for name in value if name in known}
        return [pruned(item, schema["items"]) for item in value] if isinstance(value, list | tuple) else value

    assert msgspec.convert(pruned(msgspec.to_builtins(gang), kept), Gang) == gang


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("status", {"conditions": [{"status": "True"}]}),
        ("status", {"conditions": {}}),
        ("spec", []),
        ("spec", {"trays": ["a", {"name": "b"}, {"name": "c", "clique": None}]}),
        ("spec", {"gang": 3, "plan": {"seats": 4}}),
    ],
)
def test_a_record_that_somebody_changed_is_read_without_its_unreadable_parts(part, value):
    """The index of a cache reads it, and an exception there would end the controller."""
    found = read_record({"metadata": {"name": "g", "namespace": "n", "uid": "u"}, part: value})
    assert (found.gang, found.plan, found.cliques, found.status.conditions) == (None, None, {}, ())


def test_a_plan_for_a_group_that_the_gang_lacks_is_none():
    gang = {"name": "n/g", "groups": [{"name": "w", "members": 1, "gpus": 4}]}
    plan = {"gang": "n/g", "cliques": ["c"], "spares": [], "price": [], "reason": "r"}
    for group, is_plan in (("w", True), ("zz", False)):
        seats = [{"group": group, "member": 0, "tray": "t"}]
        spec = {"gang": gang, "plan": {**plan, "seats": seats}}
        found = read_record({"metadata": {"name": "g", "namespace": "n", "uid": "u"}, "spec": spec})
        assert (found.plan is not None) == is_plan


def test_a_wish_has_groups_segments_and_spares():
    annotations = {
        SIZE_ANNOTATION: "launcher=1, worker=18",
        SEGMENT_ANNOTATION: "16",
        SPARES_ANNOTATION: "2",
    }
    assert read_gang_spec(annotations) == GangSpec(
        sizes=(("launcher", 1), ("worker", 18)), segment=16, spares=2
    )
    assert read_gang_spec({SIZE_ANNOTATION: "4"}) == GangSpec(sizes=((DEFAULT_GROUP, 4),))
    with pytest.raises(Refused, match="from 1 to"):
        read_gang_spec(annotations | {SEGMENT_ANNOTATION: "0"})


@pytest.mark.parametrize(
    ("terms", "after"),
    [
        (None, [[]]),
        ([{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}], [["zone"]]),
        ([{"matchFields": [{"key": "f", "operator": "In", "values": ["x"]}]}, {}], [["f"], None]),
    ],
)
def test_a_pod_is_pinned_by_narrowing_what_it_asks_itself(terms, after):
    affinity = {} if terms is None else {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    obj = pod(affinity=affinity, tolerations=[{"key": "mine", "operator": "Exists"}])
    done = json_patch(obj, pin_and_ungate(read_member(obj), "n1", "uid-plan", 1e9).patch)
    pin = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    found = done["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    for term, kept in zip(found, after, strict=True):
        if kept is None:
            assert term == {}, "an empty term selects nothing, and stays so"
            continue
        assert pin in term["matchFields"]
        rest = [*term.get("matchExpressions", []), *(field for field in term["matchFields"] if field != pin)]
        assert [taint["key"] for taint in rest] == kept
    assert done["spec"]["schedulingGates"] == [{"name": "other"}]
    assert [toleration["key"] for toleration in done["spec"]["tolerations"]] == [
        "mine",
        GANG_TAINT,
    ]
    member = read_member(done)
    assert (member.tray, member.released_at) == ("n1", 1e9)


CHANNEL = {"exactly": {"deviceClassName": names.CHANNEL_CLASS}}


def test_what_claims_ask_for():
    gpu = {"exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}}
    every = {"exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}}
    either = {"firstAvailable": [{"deviceClassName": "gpu.nvidia.com", "count": 3}]}
    watched = {"exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All", "adminAccess": True}}
    nic = {"exactly": {"deviceClassName": "dra.net"}}
    for requests, demand in (
        ([gpu, nic], GpuDemand(2)),
        ([gpu, watched], GpuDemand(2)),
        ([either], GpuDemand(3)),
        ([every], GpuDemand(0, whole=True)),
        ([gpu, CHANNEL], GpuDemand(2, whole=True)),
        ([], GpuDemand()),
    ):
        assert ClaimRequest({"devices": {"requests": requests}}).demand == demand
    templates = (template("gpus", [gpu]), template("channel", [CHANNEL]))
    known = claim_specs(ClusterLists(templates=templates), "team")
    members = [read_member(pod(claims=["gpus"], gpus=1)), read_member(pod(gpus=2))]
    assert group_demand(members, known) == GpuDemand(3)
    assert group_demand([read_member(pod(claims=["channel"], gpus=2))], known) == GpuDemand(2, whole=True)
    assert group_demand([read_member(pod())], known) == GpuDemand()
    with pytest.raises(Refused, match="claim template none does not exist"):
        group_demand([read_member(pod(claims=["none"]))], known)


def trays(clique, gpus, count, **how):
    return [
        PlacementTray(name=f"{clique}-{gpus}-{number}", clique=clique, gpus=gpus, **how)
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("found", "whole"),
    [
        (trays("a", 4, 2), 4),
        ([*trays(None, 8, 3), *trays("a", 4, 2)], 4),
        (trays(None, 8, 3), 8),
        ([*trays("a", 4, 2), *trays("h", 8, 1, shut="cordoned")], 4),
        ([*trays("a", 4, 2), *trays("h", 8, 2)], 4),
        ([*trays("a", 4, 1), *trays("h", 8, 2)], 8),
        ([*trays("a", 2, 2), *trays("h", 4, 2)], 4),
        ([*trays("a", 4, 3), *trays("a", 3, 2), *trays("a", 8, 1)], 4),
        (trays("a", 4, 2, shut="cordoned"), 4),
        ([], 0),
    ],
)
def test_a_whole_tray_is_one_of_the_cliques_where_the_members_fit(found, whole):
    """Two members share a clique, and count three GPUs each."""
    assert whole_tray_gpus(found, 2, 3) == whole


def template(name, requests):
    meta = {"name": name, "namespace": "team"}
    return {"metadata": meta, "spec": {"spec": {"devices": {"requests": requests}}}}


def test_a_site_has_trays_with_gpus_and_who_has_them():
    nodes = (
        node("n1"),
        node("n2"),
        node("n3"),
        node("n4", unschedulable=True),
        node("n5", ready="Unknown"),
        node("n6", gpus=0),
        node("n7", gpus=0),
    )
    gang = {"labels": {GANG_LABEL: "big"}, "annotations": {SIZE_ANNOTATION: "1"}}
    pods = (
        pod("a", gpus=2, nodeName="n1"),
        pod("b", gpus=4, nodeName="n2", meta=gang),
        pod("idle", nodeName="n1"),
        {**pod("done", gpus=4, nodeName="n3"), "status": {"phase": "Succeeded"}},
    )
    results = [
        {"driver": names.GPU_DRIVER, "pool": "n7", "device": "gpu-0"},
        {"driver": names.IMEX_DRIVER, "pool": "n3", "device": "channel-0"},
    ]
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": [{"uid": "uid-b"}]}
    claim = {"metadata": {"name": "c", "namespace": "team"}, "status": status}
    devices = [{"name": "gpu-0"}, {"name": "mig", "attributes": {"type": {"string": "mig"}}}]
    slices = {
        "spec": {"driver": names.GPU_DRIVER, "nodeName": "n7", "pool": {"name": "n7"}, "devices": devices}
    }
    site = read_site(lists_of(nodes, pods, (claim,), (slices,)))
    shut = {tray.name: tray.shut for tray in site.trays}
    assert shut == {
        "n1": None,
        "n2": None,
        "n3": None,
        "n4": "cordoned",
        "n5": "not ready",
        "n7": None,
    }
    assert {tray.name: tray.gpus for tray in site.trays}["n7"] == 1
    assert set(site.holds) == {
        TrayHold(owner="team/pod a", tray="n1", gpus=2),
        TrayHold(owner="team/big", tray="n2", gpus=4),
        TrayHold(owner="team/big", tray="n7", gpus=1),
        TrayHold(owner="team/big", tray="n3", gpus=0, channel=True),
    }


def test_an_operator_names_the_clique_of_his_nodes():
    labelled = node("n1")
    labelled["metadata"]["labels"] |= {"topo/domain": "d7"}
    (plain,) = read_site(lists_of([labelled])).trays
    assert plain.clique == "c.1"
    (named,) = read_site(lists_of([labelled], settings=GangSettings(clique_label="topo/domain"))).trays
    assert named.clique == "d7"


@pytest.mark.parametrize(
    "wrong",
    [
        {"settle": 0.0},
        {"again": -1.0},
        {"lost_after": float("nan")},
        {"max_spares": -1},
        {"clique_label": ""},
    ],
)
def test_settings_that_nobody_can_mean_are_refused(wrong):
    assert checked_gang_settings(SETTINGS) == SETTINGS
    with pytest.raises(Refused, match=next(iter(wrong))):
        checked_gang_settings(GangSettings(**wrong))


def test_limits_are_quantities_and_an_unreadable_pod_is_named_and_holds_nothing():
    nodes = (node("n1", gpus=8), node("n2", gpus="2k"), node("n3"))
    pods = (
        pod("thousand", gpus="1k", nodeName="n2"),
        pod("odd", gpus="half", nodeName="n1"),
        pod("waits", gpus="half"),
        {**pod("done", gpus="half", nodeName="n3"), "status": {"phase": "Failed"}},
    )
    assert set(read_site(lists_of(nodes, pods)).holds) == {
        TrayHold(owner="team/pod thousand", tray="n2", gpus=1000),
    }
    names = [unreadable.title for unreadable in read_state(pods=pods).unreadable]
    assert names == ["Pod team/odd", "Pod team/waits", "Pod team/done"]


def test_owners_in_other_namespaces_are_not_named_and_stay_apart():
    owners = ("secret/merger", "team/mine", "teams/other", "secret/merger", "claim c")
    holds = tuple(TrayHold(owner=owner, tray=f"n{at}", gpus=4) for at, owner in enumerate(owners))
    named = [hold.owner for hold in without_foreign_names(holds, "team")]
    assert named == ["another job", "team/mine", "another job 2", "another job", "another job 3"]


def test_spares_are_as_many_as_members_or_a_few():
    def spares(size, number):
        return read_gang_spec({SIZE_ANNOTATION: size, SPARES_ANNOTATION: number}).spares

    assert (spares("1", "4"), spares("a=3,b=4", "7")) == (4, 7)
    for size, most in (("1", 4), ("a=3,b=4", 7)):
        with pytest.raises(Refused, match=f"use a number from 0 to {most}"):
            spares(size, str(most + 1))


@pytest.mark.parametrize("text", ["000000000999", "0" * 5000, "00000409699"])
def test_leading_zeros_hide_no_number_above_the_limit(text):
    for annotation in (SIZE_ANNOTATION, SPARES_ANNOTATION, SEGMENT_ANNOTATION):
        with pytest.raises(Refused, match=annotation):
            read_gang_spec({SIZE_ANNOTATION: "4", annotation: text})


def test_a_plan_is_recorded_and_read_back_and_reserves_its_trays():
    made = create_record(GangKey("team", "big")).obj
    empty = read_record({**made, "metadata": {**made["metadata"], "uid": "u", "resourceVersion": "1"}})
    assert (empty.plan, empty.reserved) == (None, ())
    gang = Gang(name="team/big", groups=(GangGroup(name="worker", members=1, gpus=4),), exclusive=True)
    plan = GangPlan(
        gang="team/big",
        seats=(MemberAssignment("worker", 0, "n1"),),
        cliques=("c.1",),
        spares=("n2",),
        price=(FreeRegionCount(1, 2, 0),),
        reason="why",
    )
    site = PlacementSite(
        (PlacementTray(name="n1", clique="c.1", gpus=4), PlacementTray(name="n2", clique=None, gpus=4))
    )
    stored = {**made, "metadata": {**made["metadata"], "uid": "u", "resourceVersion": "1"}}
    found = read_record(merge_patch(stored, record_plan(empty, gang, plan, site).patch))
    assert (found.gang, found.plan, found.reserved) == (gang, plan, ("n1", "n2"))
    assert found.cliques == {"n1": "c.1"}
    other = TrayHold(owner="team/big", tray="n1", gpus=4)
    assert other in read_site(lists_of([node("n1")]), [found]).holds


def test_taints_of_others_stay():
    theirs = {"key": "k", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}
    before = node("n1", taints=[theirs])
    reserved = merge_patch(before, reserve_tray(read_tray_node(before), "u").patch)
    assert reserved["spec"]["taints"] == [
        theirs,
        {"key": GANG_TAINT, "effect": "NoSchedule", "value": "u"},
    ]
    assert read_tray_node(reserved).holders == ("u",)
    assert merge_patch(reserved, release_tray(read_tray_node(reserved), "other").patch) == reserved
    assert merge_patch(reserved, release_tray(read_tray_node(reserved), "u").patch)["spec"]["taints"] == [
        theirs
    ]
