"""The plan of a takeover: its order, its proofs, and the records that it leaves alone."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.takeover.readings import (
    ALLOCATION,
    DOMAIN,
    PARTITION,
    TENANT,
    TYPE,
    VPC,
    all_guids,
    guid,
    nico_instance,
    nico_interface,
    nico_reading,
    replaced,
    shown_partition,
    site_machine,
    site_reading,
    uuid,
)

from rackloom.core.takeover.planner import logical_partition_in_name, plan_takeover
from rackloom.core.takeover.records import (
    AdoptPartition,
    CordonMachine,
    CreateInstance,
    NicoFabricPartition,
    NicoMachine,
    NicoTenant,
    OwnedRecord,
    PlannedInterface,
    SiteInstance,
    TakeoverPlan,
    is_sealed,
    kind_of_step,
    seal_plan,
    subject_of_step,
)


def kinds(plan):
    return [kind_of_step(step) for step in plan.steps]


def left(plan):
    return {(entry.kind, entry.name): entry.reason for entry in plan.left_alone}


def adopted(plan):
    return [step for step in plan.steps if isinstance(step, AdoptPartition)]


def test_everything_is_planned_in_the_order_of_its_references():
    plan = plan_takeover(nico_reading(), site_reading())
    records = (
        "tenant instance-type allocation logical-partition vpc machine-type machine-type instance instance"
    )
    assert kinds(plan) == ["pause-domain", *records.split(), "adopt", "settle-domain"]
    assert plan.left_alone == ()
    ids = [subject_of_step(step) for step in plan.steps[1:6]]
    assert ids == [
        f"tenant/{TENANT}", f"instance-type/{TYPE}", f"allocation/{ALLOCATION}",
        f"logical-partition/{PARTITION}", f"vpc/{VPC}",
    ]  # fmt: skip
    instance = next(step for step in plan.steps if isinstance(step, CreateInstance))
    assert instance.interfaces[0] == PlannedInterface(
        id=uuid(1000), device=0, logical_partition=PARTITION, guid=guid(0, 0)
    )
    assert "site 'old' of NICo has id" in plan.notes[0]


def test_a_plan_survives_its_file_and_an_edit_shows():
    plan = plan_takeover(nico_reading(), site_reading())
    read = msgspec.json.decode(msgspec.json.encode(plan), type=TakeoverPlan)
    assert read == plan
    assert is_sealed(read)
    assert not is_sealed(msgspec.structs.replace(plan, steps=plan.steps[1:]))
    assert plan_takeover(nico_reading(), site_reading()).made_from == plan.made_from
    assert seal_plan(plan) == plan


def here_after(plan, site):
    """The reading of the site after the plan is applied."""
    records = {"allocation": [], "logical-partition": [], "vpc": []}
    instances, machines = [], {machine.id: machine for machine in site.machines}
    for step in plan.steps:
        if kind_of_step(step) in records:
            records[kind_of_step(step)].append(OwnedRecord(id=step.id, org=step.org, name=step.name))
        if isinstance(step, CreateInstance):
            wanted = {entry.device: entry.logical_partition for entry in step.interfaces}
            names = {"id": step.id, "org": step.org, "name": step.name}
            instances.append(SiteInstance(**names, vpc=step.vpc, machine=step.machine, interfaces=wanted))
            carrier = machines[step.machine]
            machines[step.machine] = msgspec.structs.replace(carrier, type_id=TYPE, instance=step.id)
    return msgspec.structs.replace(
        site,
        tenants={"acme": TENANT},
        types={TYPE: "gb200"},
        allocations=tuple(records["allocation"]),
        logical_partitions=tuple(records["logical-partition"]),
        vpcs=tuple(records["vpc"]),
        instances=tuple(instances),
        machines=tuple(machines.values()),
        partitions=tuple(
            msgspec.structs.replace(entry, owner="site", logical_partition=PARTITION)
            for entry in site.partitions
        ),
    )


def test_a_second_plan_has_nothing_to_do():
    first = plan_takeover(nico_reading(), site_reading())
    second = plan_takeover(nico_reading(), here_after(first, site_reading()))
    assert second.steps == ()
    assert second.left_alone == ()
    assert len(second.present) == 7


@given(st.sets(st.sampled_from(all_guids(0, 1, 2))), st.sets(st.sampled_from([0, 1])))
def test_a_partition_is_adopted_only_if_its_gpus_are_those_that_are_wanted(held, trays):
    """For any members and any instances: never an unwanted GPU, never one too few."""
    nico = nico_reading(instances=tuple(map(nico_instance, sorted(trays))))
    plan = plan_takeover(nico, site_reading(partitions=(shown_partition(sorted(held)),)))
    equal = bool(held) and held == set(all_guids(*trays))
    assert bool(adopted(plan)) == equal
    assert equal or any(entry.kind == "partition" for entry in plan.left_alone)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "made-by-hand"}, "NICo did not name it"),
        ({"name": "tray_partition_3"}, "free GPUs of a tray"),
        (
            {"name": f"{uuid(77)}15800000000000000000"},
            f"logical partition {uuid(77)} in its name is not imported",
        ),
        ({"is_guid_based": False}, "location-based"),
        ({"guids": all_guids(0)}, "4 GPUs"),
        ({"guids": ()}, "it holds no GPU"),
        ({"guids": (*all_guids(0, 1), guid(2, 0))}, f"1 GPUs ({int(guid(2, 0)):#x}) in it that no imported"),
    ],
)
def test_a_partition_without_proof_is_left_alone(changes, reason):
    partition = msgspec.structs.replace(shown_partition(all_guids(0, 1)), **changes)
    plan = plan_takeover(nico_reading(), site_reading(partitions=(partition,)))
    assert adopted(plan) == []
    assert reason in left(plan)["partition", partition.name]


@pytest.mark.parametrize(
    ("number", "named", "is_adopted"),
    [("1", PARTITION, True), ("1", uuid(77), False), ("2", PARTITION, False)],
)
def test_records_of_nico_that_contradict_the_name_win(number, named, is_adopted):
    fabric = (NicoFabricPartition(domain=DOMAIN, number=number, logical_partition=named),)
    plan = plan_takeover(nico_reading(fabric=fabric), site_reading())
    assert bool(adopted(plan)) == is_adopted


def test_one_partition_of_a_logical_partition_is_enough_in_a_domain():
    ours = shown_partition(all_guids(2), name="rl-x", number=7, owner="site", logical_partition=PARTITION)
    plan = plan_takeover(nico_reading(), site_reading(partitions=(shown_partition(all_guids(0, 1)), ours)))
    assert adopted(plan) == []
    assert "has a partition in this domain already" in str(plan.left_alone)


def test_a_domain_that_cannot_be_read_is_reported():
    plan = plan_takeover(nico_reading(), site_reading(partitions=(), unreadable=(DOMAIN,)))
    assert left(plan)["domain", DOMAIN].startswith("no controller of it can be read")


# Instances and their machines.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "Terminating"}, "it is Terminating in NICo"),
        ({"status": "Pending", "machine": None}, "it has no machine in NICo"),
        ({"vpc": uuid(77)}, "its VPC"),
        ({"type_id": uuid(77)}, "its instance type"),
        ({"interfaces": (nico_interface(0, 0, guid=guid(2, 0)),)}, "could be tray-0 or tray-2"),
        ({"interfaces": (nico_interface(0, 0, guid=guid(0, 1)),)}, "in NICo, and"),
        ({"interfaces": (nico_interface(0, 0), nico_interface(0, 0))}, "several interfaces of its gpu-0"),
        ({"interfaces": (nico_interface(0, 0, logical_partition=uuid(77)),)}, "is not imported"),
        ({"interfaces": (nico_interface(0, 7, guid=None),)}, "no controller here lists tray-0/gpu-7"),
    ],
)
def test_an_instance_that_cannot_be_imported_keeps_its_machine(changes, reason):
    """It is reported, nothing is placed on its machine, and its partition is not adopted without it."""
    plan = plan_takeover(replaced(nico_reading(), "instances", 0, **changes), site_reading())
    assert reason in left(plan)["instance", "job-0"]
    cordons = [step.machine for step in plan.steps if isinstance(step, CordonMachine)]
    known = changes.get("machine", "tray-0") is not None
    assert cordons == (["tray-0"] if known else []) + (["tray-2"] if "could be" in reason else [])
    assert adopted(plan) == []


def test_a_machine_is_found_by_its_place_or_its_gpus_under_another_id():
    machines = tuple(site_machine(tray, id=f"m{tray}") for tray in range(3))
    site = site_reading(machines=machines)
    by_gpus = plan_takeover(nico_reading(), site)
    assert [step.machine for step in by_gpus.steps if isinstance(step, CreateInstance)] == ["m0", "m1"]
    blind = tuple(
        nico_instance(tray, interfaces=tuple(nico_interface(tray, device, guid=None) for device in range(4)))
        for tray in range(2)
    )
    lost = plan_takeover(nico_reading(instances=blind), site)
    assert "its machine tray-0 is not known here" in left(lost)["instance", "job-0"]
    places = tuple(NicoMachine(id=f"tray-{tray}", chassis_serial="C1", slot=tray) for tray in range(2))
    by_place = plan_takeover(nico_reading(instances=blind, machines=places), site)
    assert [step.machine for step in by_place.steps if isinstance(step, CreateInstance)] == ["m0", "m1"]


@pytest.mark.parametrize("status", ["Provisioning", "Error", "Unknown", "BootCompleted"])
def test_an_instance_that_keeps_its_machine_is_imported_whatever_its_health(status):
    plan = plan_takeover(replaced(nico_reading(), "instances", 0, status=status), site_reading())
    assert kinds(plan).count("instance") == 2


def test_a_partition_that_became_equal_is_adopted_by_the_next_plan():
    unequal = site_reading(partitions=(shown_partition(all_guids(0)),))
    site = here_after(plan_takeover(nico_reading(), unequal), unequal)
    site = msgspec.structs.replace(site, partitions=(shown_partition(all_guids(0, 1)),))
    assert kinds(plan_takeover(nico_reading(), site)) == ["pause-domain", "adopt", "settle-domain"]


def test_two_instances_on_a_machine_are_not_both_imported():
    twice = nico_reading(
        instances=(nico_instance(0), nico_instance(0, id=uuid(500), name="late", interfaces=()))
    )
    assert left(plan_takeover(twice, site_reading()))["instance", "late"].startswith("machine tray-0 has")


def test_a_name_that_an_instance_of_the_organisation_has_here_is_not_taken_twice():
    here = SiteInstance(id=uuid(700), org="acme", name="job-0", vpc=VPC, machine="tray-2", interfaces={})
    site = site_reading(tenants={"acme": TENANT}, instances=(here,))
    left_alone = left(plan_takeover(nico_reading(), site))
    assert left_alone["instance", "job-0"] == "another instance of the organisation has this name here"
    others = msgspec.structs.replace(here, org="globex")
    assert ("instance", "job-0") not in left(
        plan_takeover(nico_reading(), msgspec.structs.replace(site, instances=(others,)))
    )


def test_a_machine_that_an_organisation_uses_which_was_not_read_is_cordoned():
    used = (NicoMachine(id="tray-2", type_id=TYPE, is_used=True),)
    plan = plan_takeover(nico_reading(machines=used), site_reading())
    (cordon,) = [step for step in plan.steps if isinstance(step, CordonMachine)]
    assert cordon.machine == "tray-2"
    machines = (*map(site_machine, range(2)), site_machine(2, is_cordoned=True))
    assert "cordon" not in kinds(plan_takeover(nico_reading(machines=used), site_reading(machines=machines)))


def test_a_released_gpu_of_an_instance_is_not_wanted():
    leaving = tuple(nico_interface(0, device, status="Deleting") for device in range(4))
    nico = replaced(nico_reading(), "instances", 0, interfaces=leaving)
    plan = plan_takeover(nico, site_reading(partitions=(shown_partition(all_guids(1)),)))
    assert len(adopted(plan)) == 1
    assert [len(step.interfaces) for step in plan.steps if isinstance(step, CreateInstance)] == [0, 4]


# Records that cannot be created, and the records that depend on them.


@pytest.mark.parametrize(
    ("site", "kind", "name", "reason"),
    [
        ({"tenants": {"other": TENANT}}, "tenant", "acme", "its id is that of other here"),
        ({"types": {uuid(77): "gb200"}}, "instance-type", "gb200", "has this name here"),
        (
            {"tenants": {"acme": uuid(77)}, "vpcs": (OwnedRecord(id=uuid(78), org="acme", name="net"),)},
            "vpc", "net", "has this name here",
        ),
        ({"vpcs": (OwnedRecord(id=VPC, org="other", name="x"),)}, "vpc", "net", "other has a record"),
    ],
)  # fmt: skip
def test_what_depends_on_a_record_that_is_left_alone_is_left_too(site, kind, name, reason):
    plan = plan_takeover(nico_reading(), site_reading(**site))
    assert reason in left(plan)[kind, name]
    assert {("instance", "job-0"), ("instance", "job-1")} <= left(plan).keys()
    assert adopted(plan) == []
    assert kinds(plan).count("cordon") == 2


def test_records_without_an_allocation_or_not_ready_are_left():
    plan = plan_takeover(nico_reading(allocations=()), site_reading())
    assert "no allocation at the site" in left(plan)["logical-partition", "train"]
    deleting = replaced(nico_reading(), "logical_partitions", 0, status="Deleting")
    plan = plan_takeover(deleting, site_reading())
    assert left(plan)["logical-partition", "train"] == "it is Deleting in NICo"
    assert "is not imported" in left(plan)["vpc", "net"]


def test_an_organisation_that_is_a_tenant_already_gets_its_records_under_its_id_here():
    plan = plan_takeover(nico_reading(), site_reading(tenants={"acme": uuid(77)}))
    assert "tenant" not in kinds(plan)
    assert any("has tenant id" in note for note in plan.notes)
    assert len(adopted(plan)) == 1


def test_an_organisation_with_nothing_is_created():
    plan = plan_takeover(
        nico_reading(tenants=(NicoTenant(id=TENANT, org="acme"), NicoTenant(id=uuid(2000), org="b"))),
        site_reading(),
    )
    assert kinds(plan)[1:3] == ["tenant", "tenant"]


def test_names_of_partitions():
    assert logical_partition_in_name(PARTITION + "123,456") == PARTITION
    assert logical_partition_in_name("rl-" + PARTITION) is None
