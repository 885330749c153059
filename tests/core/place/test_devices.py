"""Claims for GPUs and NICs: the trays that can serve them are those where `core/allocate` does."""

from typing import Any

import msgspec
import pytest
from tests.core.cluster.views import read_site

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.allocate.objects import DeviceClass, Node, ObjectMeta, ResourceClaim, ResourceClaimStatus
from rackloom.core.allocate.outcome import Allocation
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import gpus_by_node
from rackloom.core.cluster.pods import SIZE_ANNOTATION
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.state import HIGHEST_PRIORITY, ClusterState, TrayHold
from rackloom.core.cluster.trays import (
    ClaimCapacity,
    DraDevices,
    Gang,
    GangGroup,
    PlacementSite,
    PlacementTray,
    claims_devices,
)
from rackloom.core.place.claim_capacity import gpus_per_member, with_claim_capacity
from rackloom.core.place.gang_fixes import find_fixes
from rackloom.core.place.gang_planner import try_gang, with_plan_reserved
from rackloom.core.place.search.site_view import capacity_for
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused
from rackloom.topology import profiles

LABELS = SchedulerLabels()
OF_GPUS = 'device.driver == "gpu.nvidia.com"'
NODES = ("n0", "n1", "n2")


def claim(gpus: int, nics: int, selector: str | None = None) -> ResourceClaim:
    chosen = [{"cel": {"expression": selector}}] if selector else []
    exact = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": gpus}
    requests = [{"name": "gpu", "exactly": {**exact, "selectors": chosen}}] if gpus else []
    if nics:
        requests.append({"name": "nic", "exactly": {**exact, "deviceClassName": "dranet.net", "count": nics}})
    return msgspec.convert(
        {"metadata": {"name": "pair"}, "spec": {"devices": {"requests": requests}}}, ResourceClaim
    )


def devices(*held: ResourceClaim) -> DraDevices:
    machine = profiles.load_machine("oci-bm.gpu.gb200-v3.4")
    return DraDevices(
        nodes=tuple(Node(metadata=ObjectMeta(name=name)) for name in NODES),
        classes=device_classes(),
        slices=tuple(slice_ for name in NODES for slice_ in slices_of(machine, name)),
        claims=held,
        owners={"default/pair": "claim pair"},
    )


def known(has: DraDevices) -> ClusterState:
    return read_state(slices=map(msgspec.to_builtins, has.slices), labels=LABELS)


def holds(known: DraDevices, *pods: dict[str, Any]) -> tuple[TrayHold, ...]:
    claims, slices = (map(msgspec.to_builtins, objects) for objects in (known.claims, known.slices))
    return read_state((), pods, claims, slices, LABELS).holds


def allocated(name: str, gpus: int, nics: int) -> ResourceClaim:
    """A claim that has its devices on a node."""
    asked, has = claim(gpus, nics), devices()
    found = allocate(Node(metadata=ObjectMeta(name=name)), has.classes, has.slices, [asked])
    assert isinstance(found, Allocation)
    return msgspec.structs.replace(asked, status=ResourceClaimStatus(allocation=found.results[0]))


SITE = PlacementSite(tuple(PlacementTray(name=name, clique="c0", gpus=4) for name in NODES))


def test_rooms_are_what_the_allocator_can_give_now_and_when_nothing_is_in_use() -> None:
    busy = devices(allocated("n1", 1, 8))
    found = with_claim_capacity(PlacementSite(SITE.trays, holds(busy)), busy, {"pair": (claim(2, 2),)})
    assert [tray.rooms["pair"] for tray in found.trays] == [
        ClaimCapacity(2, 2),
        ClaimCapacity(1, 2),
        ClaimCapacity(2, 2),
    ]
    assert holds(busy) == (TrayHold(owner="claim pair", tray="n1", gpus=1, priority=HIGHEST_PRIORITY),)
    assert gpus_by_node(read_state(slices=map(msgspec.to_builtins, busy.slices)).published) == {
        "n0": 4,
        "n1": 4,
        "n2": 4,
    }


def test_members_go_where_their_gpus_and_nics_are() -> None:
    busy = devices(allocated("n1", 1, 8))
    where = PlacementSite(SITE.trays, holds(busy))
    where = with_claim_capacity(where, busy, {"pair": (claim(1, 3),)})
    gang = Gang(name="job", groups=(GangGroup(name="worker", members=4, gpus=1, devices="pair"),))
    plan = try_gang(where, gang, SearchBudget())
    assert plan is not None
    assert set(plan.trays) == {"n0", "n2"}, "n1 has GPUs, but too few NICs"
    assert (
        try_gang(
            with_plan_reserved(where, gang, plan), msgspec.structs.replace(gang, name="next"), SearchBudget()
        )
        is None
    )


def test_two_kinds_of_claims_are_not_mixed_on_a_tray() -> None:
    has = devices()
    where = with_claim_capacity(SITE, has, {"one": (claim(1, 1),), "two": (claim(2, 2),)})
    groups = (
        GangGroup(name="prefill", members=1, gpus=1, devices="one"),
        GangGroup(name="decode", members=2, gpus=2, devices="two"),
    )
    plan = try_gang(where, Gang(name="job", groups=groups), SearchBudget())
    assert plan is not None
    assert not {s.tray for s in plan.seats if s.group == "prefill"} & {
        s.tray for s in plan.seats if s.group == "decode"
    }


def test_claims_that_no_tray_can_serve_leave_no_room() -> None:
    found = with_claim_capacity(SITE, devices(), {"all": (claim(5, 0),)})
    assert all(not tray.rooms for tray in found.trays)


def test_a_selector_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(Refused, match="claims bad") as refused:
        with_claim_capacity(SITE, devices(), {"bad": (claim(1, 0, "device.nope("),)})
    assert refused.value.nearest_fix


def test_devices_of_a_pod_without_gpus_are_not_had_by_moving_what_has_gpus() -> None:
    busy = devices(allocated("n1", 0, 8))
    found = with_claim_capacity(SITE, busy, {"pair": (claim(1, 4),)})
    assert [tray.rooms.get("pair") for tray in found.trays] == [
        ClaimCapacity(2, 2),
        None,
        ClaimCapacity(2, 2),
    ]
    gang = Gang(name="job", groups=(GangGroup(name="worker", members=5, gpus=1, devices="pair"),))
    assert try_gang(found, gang, SearchBudget()) is None


def test_a_claim_is_held_by_the_job_of_its_pod() -> None:
    metadata = {"name": "p", "namespace": "lab", "labels": {LABELS.gang: "g", LABELS.movable: "true"}}
    metadata["annotations"] = {SIZE_ANNOTATION: "1"}
    pod = {"metadata": metadata, "spec": {"nodeName": "n1", "priority": 9}}
    meta = ObjectMeta(name="pair", namespace="lab")
    mine = msgspec.structs.replace(allocated("n1", 2, 0), metadata=meta)
    status = msgspec.structs.replace(mine.status, reserved_for=({"resource": "pods", "name": "p"},))
    mine = msgspec.structs.replace(mine, status=status)
    assert holds(devices(mine), pod) == (
        TrayHold(owner="lab/g", tray="n1", gpus=2, priority=9, movable=True),
    )
    (unknown,) = holds(devices(mine))
    assert (unknown.owner, unknown.priority, unknown.movable) == ("lab/pod p", HIGHEST_PRIORITY, False)


def test_gpus_that_are_counted_and_claimed_are_held_once() -> None:
    """The scheduler makes a claim for counted GPUs if a driver publishes them (KEP-5004)."""
    containers = [{"name": "main", "resources": {"limits": {LABELS.gpu: "2"}}}]
    mapping = {"containerName": "main", "resourceName": LABELS.gpu, "requestName": "container-0-request-0"}
    pod = {
        "metadata": {"name": "p", "namespace": "lab"},
        "spec": {"nodeName": "n1", "containers": containers},
        "status": {
            "extendedResourceClaimStatus": {"resourceClaimName": "p-made", "requestMappings": [mapping]}
        },
    }
    made = msgspec.structs.replace(allocated("n1", 2, 0), metadata=ObjectMeta(name="p-made", namespace="lab"))
    status = msgspec.structs.replace(made.status, reserved_for=({"resource": "pods", "name": "p"},))
    known = msgspec.to_builtins(msgspec.structs.replace(made, status=status))
    held = read_site((), (pod,), LABELS, claims=(known,)).holds
    assert [(hold.owner, hold.tray, hold.gpus) for hold in held] == [("lab/pod p", "n1", 2)]
    by_plugin = {**pod, "status": {}}
    assert [hold.gpus for hold in read_site((), (by_plugin,), LABELS).holds] == [2]


def test_whoever_is_not_known_is_not_preempted() -> None:
    busy = devices(*(allocated(name, 4, 0) for name in NODES))
    where = with_claim_capacity(PlacementSite(SITE.trays, holds(busy)), busy, {"pair": (claim(4, 0),)})
    group = GangGroup(name="worker", members=1, gpus=4, devices="pair")
    greedy = Gang(name="job", groups=(group,), priority=10**9)
    texts = [fix.text for fix in find_fixes(capacity_for(where, greedy), greedy, SearchBudget())]
    assert texts
    assert not [text for text in texts if "preempt" in text]


def test_trays_without_gpus_are_taken_by_those_that_have_their_nics() -> None:
    plain = PlacementSite(tuple(PlacementTray(name=name, clique="c0", gpus=0) for name in NODES))
    where = with_claim_capacity(plain, devices(), {"nics": (claim(0, 8),)})
    gang = Gang(name="job", groups=(GangGroup(name="worker", members=2, gpus=0, devices="nics"),))
    plan = try_gang(where, gang, SearchBudget())
    assert plan is not None
    then = with_plan_reserved(where, gang, plan)
    assert try_gang(then, msgspec.structs.replace(gang, name="next"), SearchBudget()) is None
    assert try_gang(then, gang, SearchBudget()) == plan, "its own trays are not in its way"


def test_claims_that_take_nothing_are_refused_where_members_are_counted() -> None:
    look = {"name": "look", "exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}}
    look["exactly"]["adminAccess"] = True  # type: ignore[index]
    admin = msgspec.convert({"spec": {"devices": {"requests": [look]}}}, ResourceClaim)
    for claim in (admin, ResourceClaim()):
        assert not claims_devices(claim)
        with pytest.raises(Refused, match="take nothing"):
            with_claim_capacity(SITE, devices(), {"none": (claim,)})


@pytest.mark.parametrize("order", [("big", "small"), ("small", "big")])
def test_of_all_gpus_a_member_is_sure_of_the_fewest_that_a_tray_has(order: tuple[str, ...]) -> None:
    machine = profiles.load_machine("oci-bm.gpu.gb200-v3.4")
    big = [slice_ for slice_ in slices_of(machine, "big") if slice_.spec.driver == LABELS.gpu_driver]
    small = [
        msgspec.structs.replace(
            slice_, spec=msgspec.structs.replace(slice_.spec, devices=slice_.spec.devices[:2])
        )
        for slice_ in slices_of(machine, "small")
        if slice_.spec.driver == LABELS.gpu_driver
    ]
    nodes = tuple(Node(metadata=ObjectMeta(name=name)) for name in order)
    has = msgspec.structs.replace(devices(), nodes=nodes, slices=(*big, *small))
    every = {"name": "all", "exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}}
    asked = msgspec.convert({"spec": {"devices": {"requests": [every]}}}, ResourceClaim)
    assert gpus_per_member(has, [asked], known(has)) == 2
    every["exactly"]["adminAccess"] = True  # type: ignore[index]
    looks = msgspec.convert({"spec": {"devices": {"requests": [every]}}}, ResourceClaim)
    assert gpus_per_member(has, [looks], known(has)) == 0


def test_gpus_are_those_that_the_allocator_gives_whatever_the_class_is_called() -> None:
    every = {"name": "all", "exactly": {"deviceClassName": "ours", "allocationMode": "All"}}
    asked = msgspec.convert({"spec": {"devices": {"requests": [every]}}}, ResourceClaim)
    ours = msgspec.convert(
        {"metadata": {"name": "ours"}, "spec": {"selectors": [{"cel": {"expression": OF_GPUS}}]}}, DeviceClass
    )
    has = msgspec.structs.replace(devices(), classes=(*device_classes(), ours))
    assert gpus_per_member(has, [asked], known(has)) == 4
    assert gpus_per_member(has, [claim(3, 2), claim(1, 0)], known(has)) == 4
    assert gpus_per_member(has, [claim(0, 2)], known(has)) == 0
