"""The devices that the members of a gang claim, counted on each tray by the planner's allocator."""

import pytest
from tests.core.cluster.views import lists_of
from tests.core.gangs.gang_toy import read_site

from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import GANG_GATE, read_member
from rackloom.core.cluster.pods import SIZE_ANNOTATION
from rackloom.core.gangs.requests import claim_specs, group_claims, member_demand
from rackloom.core.gangs.trays import TrayCountCache, with_claim_room
from rackloom.errors import Refused

NIC, GPU = "dra.net", names.GPU_DRIVER


def node(name):
    ready = {"type": "Ready", "status": "True"}
    status = {"allocatable": {"nvidia.com/gpu": "4"}, "conditions": [ready]}
    return {
        "metadata": {"name": name, "labels": {names.GPU_CLIQUE_LABEL: "c.1"}},
        "spec": {},
        "status": status,
    }


def offer(name, driver=NIC, count=2, **device):
    devices = [{"name": f"d{number}", **device} for number in range(count)]
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": name, "pool": pool, "devices": devices}
    return {"metadata": {"name": f"{name}-{driver}"}, "spec": spec}


def device_class(driver):
    selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
    return {"metadata": {"name": driver}, "spec": {"selectors": [selector]}}


def request(driver=NIC, count=1, **more):
    exactly = {"deviceClassName": driver, "allocationMode": "ExactCount", "count": count, **more}
    return {"name": "d", "exactly": exactly}


def template(name, *requests):
    meta = {"name": name, "namespace": "team"}
    return {"metadata": meta, "spec": {"spec": {"devices": {"requests": list(requests)}}}}


def claim(name, *requests, on=None, driver=NIC, user=None, device="d0"):
    result = {"request": "d", "driver": driver, "pool": on, "device": device, "newer": {"field": 1}}
    allocation = {"devices": {"results": [result]}}
    status = {"allocation": allocation} if on else {}
    return {
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"devices": {"requests": list(requests)}},
        "status": status | ({"reservedFor": [{"uid": f"uid-{user}"}]} if user else {}),
    }


def pod(name, *templates, claims=(), gang="big", gpus=0, on=None):
    limits = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if gpus else {}
    named = [{"name": name, "resourceClaimTemplateName": name} for name in templates]
    named += [{"name": name, "resourceClaimName": name} for name in claims]
    marked = {"labels": {GANG_GATE: gang}, "annotations": {SIZE_ANNOTATION: "1"}} if gang else {}
    spec = {"containers": [{"name": "main", **limits}], "resourceClaims": named}
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", **marked},
        "spec": spec | ({"nodeName": on} if on else {}),
    }


def taint_rule(name, effect="NoSchedule", **selector):
    taint = {"key": "example.com/checked", "effect": effect, "timeAdded": "2026-01-01T00:00:00Z"}
    meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"}
    return {"metadata": meta, "spec": {"deviceSelector": selector, "taint": taint}, "status": {"new": 1}}


def cluster(*, slices, templates=(), claims=(), pods=(), taint_rules=()):
    return lists_of(
        (node("n1"), node("n2")),
        pods,
        claims,
        slices,
        classes=(device_class(NIC), device_class(GPU)),
        templates=tuple(templates),
        taint_rules=tuple(taint_rules),
    )


def rooms(objects, *requests, mine="team/big", counted=None):
    """The number of members with such a claim that each tray serves."""
    known = claim_specs(cluster(slices=(), templates=(template("t", *requests),)), "team")
    found = group_claims([read_member(pod("w", "t"))], known)
    site = read_site(objects)
    site = with_claim_room(site, objects, {"t": found.claims}, mine, counted or TrayCountCache())
    return {tray.name: tray.rooms["t"].empty if "t" in tray.rooms else 0 for tray in site.trays}


def test_a_tray_serves_as_many_members_as_it_has_devices_for():
    objects = cluster(slices=[offer("n1", count=4), offer("n2", count=1)])
    assert rooms(objects, request(count=2)) == {"n1": 2, "n2": 0}
    assert rooms(objects, request(count=1)) == {"n1": 4, "n2": 1}


def test_a_device_that_a_rule_taints_serves_only_members_that_tolerate_it():
    slices = [offer("n1", count=4), offer("n2", count=4)]
    ruled = cluster(slices=slices, taint_rules=[taint_rule("bad", pool="n1", device="d3")])
    assert rooms(ruled, request(count=2)) == {"n1": 1, "n2": 2}
    tolerating = request(count=2, tolerations=[{"operator": "Exists"}])
    assert rooms(ruled, tolerating) == {"n1": 2, "n2": 2}
    preview = cluster(slices=slices, taint_rules=[taint_rule("preview", effect="None")])
    assert rooms(preview, request(count=2)) == {"n1": 2, "n2": 2}


def test_a_rule_that_cannot_be_read_taints_nothing():
    """It selects by class, as in 1.34."""
    rule = taint_rule("old", deviceClassName=NIC)
    assert rooms(cluster(slices=[offer("n1")], taint_rules=[rule]), request()) == {"n1": 2, "n2": 0}


def test_devices_of_others_are_taken_and_those_of_the_gang_are_not():
    slices = [offer("n1", count=2), offer("n2", count=2)]
    pods = [pod("mine"), pod("theirs", gang=None)]
    claims = [
        claim("a", on="n1", user="mine"),
        claim("b", on="n2", user="theirs"),
        claim("c", on="n2", device="d1"),
    ]
    objects = cluster(slices=slices, claims=claims, pods=pods)
    assert rooms(objects, request()) == {"n1": 2, "n2": 0}
    assert rooms(objects, request(), mine="team/other") == {"n1": 1, "n2": 0}


def test_what_goes_with_the_gpus_of_a_job_is_free_when_the_job_ends():
    """The planner tries the devices that the end of a job would free. It cannot end a pod without GPUs."""
    pods = [pod("job", gang=None, gpus=4, on="n1"), pod("plain", gang=None, on="n2")]
    claims = [claim("a", on="n1", user="job"), claim("b", on="n2", user="plain")]
    objects = cluster(slices=[offer("n1"), offer("n2")], claims=claims, pods=pods)
    assert rooms(objects, request()) == {"n1": 2, "n2": 1}


def test_a_device_that_anybody_may_share_ends_no_search():
    shared = offer("n1", allowMultipleAllocations=True)
    assert rooms(cluster(slices=[shared]), request())["n1"] >= 4


def test_slices_that_are_newer_than_this_program_offer_nothing():
    strange = offer("n1", count=2, fromTheFuture=True)
    assert rooms(cluster(slices=[strange, offer("n2")]), request()) == {"n1": 0, "n2": 2}


def known(*templates, claims=()):
    return claim_specs(cluster(slices=(), templates=templates, claims=claims), "team")


def test_channels_and_the_eyes_of_administrators_are_not_counted():
    channel, isolated = request(names.CHANNEL_CLASS), request(names.ISOLATED_CHANNEL_CLASS)
    found = known(template("c", channel), template("i", isolated), template("a", request(adminAccess=True)))
    assert group_claims([read_member(pod("w", "c", "i", "a"))], found) is None
    both = known(template("c", channel), template("n", request()))
    assert group_claims([read_member(pod("w", "c", "n"))], both).kind == "n"


def test_members_of_a_group_are_alike_or_claim_nothing():
    found = known(template("one", request()), template("same", request()), template("two", request(count=2)))
    members = [read_member(pod("a", "one")), read_member(pod("b")), read_member(pod("c", "same"))]
    assert group_claims(members, found).kind == "one"
    assert group_claims([read_member(pod("b"))], found) is None
    with pytest.raises(Refused, match="claim one and two") as refused:
        group_claims([*members, read_member(pod("d", "two"))], found)
    assert "gang-group" in refused.value.nearest_fix


def test_claims_that_are_named_count_once_and_for_one_member():
    found = known(claims=(claim("c0", request()), claim("c1", request())))
    members = [read_member(pod("a", claims=["c0"])), read_member(pod("b", claims=["c1"]))]
    assert group_claims(members, found).kind == "claim c0"
    with pytest.raises(Refused, match="c0 is named by several members") as refused:
        group_claims([*members, read_member(pod("d", claims=["c0"]))], found)
    assert "resourceClaimTemplateName" in refused.value.nearest_fix
    shared = known(claims=(claim("channel", request(names.CHANNEL_CLASS)),))
    assert group_claims([read_member(pod(name, claims=["channel"])) for name in "ab"], shared) is None


def test_what_is_missing_or_cannot_be_read_is_told():
    with pytest.raises(Refused, match="claim template none does not exist"):
        group_claims([read_member(pod("a", "none"))], known())
    with pytest.raises(Refused, match="what t claims cannot be read"):
        group_claims([read_member(pod("a", "t"))], known(template("t", request(newer=1))))
    with pytest.raises(Refused, match="claims t"):
        rooms(cluster(slices=[offer("n1")]), request("no-such-class"))


def test_a_resource_that_stands_for_a_device_class_is_refused_by_name():
    class_resource = "deviceclass.resource.kubernetes.io/gpu.nvidia.com"
    asking = pod("a")
    asking["spec"]["containers"][0]["resources"] = {"limits": {class_resource: "1"}}
    with pytest.raises(Refused, match=class_resource) as refused:
        member_demand(read_member(asking), known())
    assert "ResourceClaimTemplate" in refused.value.nearest_fix
    assert member_demand(read_member(pod("b", gpus=4)), known()).gpus == 4


def test_gpus_that_are_counted_and_claimed_are_held_once():
    """The scheduler makes a claim for counted GPUs if a driver publishes them (KEP-5004)."""
    mapping = {"containerName": "main", "resourceName": "nvidia.com/gpu", "requestName": "d"}
    status = {"extendedResourceClaimStatus": {"resourceClaimName": "made", "requestMappings": [mapping]}}
    counting = pod("theirs", gang=None, gpus=1, on="n1")
    made = claim("made", request(GPU), on="n1", driver=GPU, user="theirs")
    slices = [offer("n1", GPU, count=4)]

    def held(user):
        objects = cluster(slices=slices, claims=[made], pods=[user])
        return [(hold.tray, hold.gpus) for hold in read_site(objects).holds]

    assert held({**counting, "status": status}) == [("n1", 1)]
    elsewhere = {**counting, "metadata": {**counting["metadata"], "uid": "uid-other", "name": "other"}}
    assert held(elsewhere) == [("n1", 1), ("n1", 1)], "of a device plugin, beside the claim of another"
