"""The intent for the reconciler, and the facts that observations teach about machines."""

from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import DefaultPartitionPolicy, DeletePartition, GpuAssignment, GpuHealth
from rackloom.core.partitions.planner import make_plan


def intent(site: Any, domain: str) -> Any:
    return site.read(records.load_intent, domain)


def test_an_unknown_domain_is_left_exactly_as_it_is(small_site: Any) -> None:
    found = intent(small_site, "no such domain")
    assert found.default_partition is DefaultPartitionPolicy.KEEP
    assert (found.assignments, found.owned, found.managed, found.revision) == ((), (), frozenset(), 0)


def test_machines_learn_domain_and_guids_from_the_first_observation(small_site: Any) -> None:
    first, second = small_site.partitions
    assert small_site.row(schema.endpoint, small_site.endpoint[first]).domain is None
    small_site.observe(first)
    assert small_site.row(schema.endpoint, small_site.endpoint[first]).domain == first
    assert intent(small_site, first).managed == {
        small_site.guid(first, slot, device) for slot in range(3) for device in range(4)
    }
    assert intent(small_site, second).managed == frozenset()
    assert intent(small_site, first).default_partition is DefaultPartitionPolicy.NONE


def test_the_same_observation_again_changes_nothing(small_site: Any) -> None:
    first = next(iter(small_site.partitions))
    small_site.observe(first)
    before = intent(small_site, first)
    small_site.observe(first)
    assert intent(small_site, first) == before


def test_assignments_are_the_live_interfaces_only(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0), (partition, 3)])
    domain, slot = demo.where(instance_id)
    before = intent(small_site, domain)
    assert set(before.assignments) == {
        GpuAssignment(
            guid=small_site.guid(domain, slot, device), logical_partition=partition, tenant=demo.tenant.id
        )
        for device in (0, 3)
    }
    demo.rewire(instance_id, [(partition, 3)])
    after = intent(small_site, domain)
    assert [found.guid for found in after.assignments] == [small_site.guid(domain, slot, 3)]
    demo.release(instance_id)
    assert intent(small_site, domain).assignments == ()
    assert before.revision < after.revision < intent(small_site, domain).revision


def test_a_wish_for_what_already_is_changes_nothing(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    small_site.converge()
    before = intent(small_site, demo.where(instance_id)[0])
    assert demo.rewire(instance_id, [(partition, 0)]).domains == frozenset()
    assert intent(small_site, demo.where(instance_id)[0]) == before
    assert demo.status(instance_id) == "Ready"


def test_a_swapped_tray_is_learnt_by_its_place(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    instance_id = demo.instance([(demo.partition(), 0)])
    domain, slot = demo.where(instance_id)
    revision = intent(small_site, domain).revision
    seen = small_site.observation(domain, at=small_site.tick())
    gpus = tuple(
        msgspec.structs.replace(gpu, guid=gpu.guid + 2**20) if gpu.slot == slot else gpu for gpu in seen.gpus
    )
    swapped = msgspec.structs.replace(seen, gpus=gpus)
    small_site.run(records.record_observation, small_site.endpoint[domain], swapped, small_site.tick())
    found = intent(small_site, domain)
    assert [assignment.guid for assignment in found.assignments] == [small_site.guid(domain, slot, 0) + 2**20]
    assert small_site.guid(domain, slot, 0) not in found.managed
    assert found.revision > revision


def test_a_tray_moved_to_another_slot_is_in_one_place_only(small_site: Any) -> None:
    domain = next(iter(small_site.partitions))
    small_site.observe(domain)
    seen = small_site.observation(domain, at=small_site.tick())
    moved = tuple(msgspec.structs.replace(gpu, slot=1) for gpu in seen.gpus if gpu.slot == 0)
    small_site.run(
        records.record_observation,
        small_site.endpoint[domain],
        msgspec.structs.replace(seen, gpus=moved),
        small_site.tick(),
    )
    rows = small_site.read(
        lambda conn: conn.execute(
            sa.select(schema.machine.c.slot, schema.machine_gpu.c.guid)
            .join(schema.machine, schema.machine.c.id == schema.machine_gpu.c.machine_id)
            .where(schema.machine_gpu.c.guid.is_not(None))
        ).all()
    )
    guids = [row.guid for row in rows]
    assert len(guids) == len(set(guids))
    assert {row.slot for row in rows if int(row.guid) == small_site.guid(domain, 0, 0)} == {1}


def test_trays_that_changed_places_take_their_gpus_out_of_where_others_are(
    small_site: Any, demo: Any, rival: Any
) -> None:
    """A machine is a place, and a partition holds GPUs: the two tenants' GPUs are never left together."""
    small_site.observe_all()
    instance_id, other = demo.instance([(demo.partition(), 0)]), rival.instance()
    small_site.converge()
    (domain, slot), (there, beside) = demo.where(instance_id), rival.where(other)
    assert (there, demo.status(instance_id), rival.status(other)) == (domain, "Ready", "Ready")
    places = {slot: beside, beside: slot}
    seen = small_site.observation(domain, at=small_site.tick())
    gpus = tuple(msgspec.structs.replace(gpu, slot=places.get(gpu.slot, gpu.slot)) for gpu in seen.gpus)
    exchanged = msgspec.structs.replace(seen, gpus=gpus)
    small_site.run(records.record_observation, small_site.endpoint[domain], exchanged, small_site.tick())
    assert "Ready" not in (demo.status(instance_id), rival.status(other))
    wanted = intent(small_site, domain)
    assert [assignment.guid for assignment in wanted.assignments] == [small_site.guid(domain, beside, 0)]
    (first,) = make_plan(wanted, exchanged).operations
    assert isinstance(first, DeletePartition), (
        "what left the place leaves the partition before anything joins it"
    )


def test_an_endpoint_that_answers_with_a_new_domain_takes_its_machines_along(
    small_site: Any, demo: Any
) -> None:
    small_site.observe_all()
    instance_id = demo.instance()
    domain, _ = demo.where(instance_id)
    small_site.observe(domain)
    assert demo.status(instance_id) == "Ready"
    renamed = msgspec.structs.replace(small_site.observation(domain, at=small_site.tick()), domain="d-new")
    small_site.run(records.record_observation, small_site.endpoint[domain], renamed, small_site.tick())
    assert demo.where(instance_id)[0] == "d-new"
    assert intent(small_site, domain).managed == frozenset()
    assert len(intent(small_site, "d-new").managed) == 12


def test_two_endpoints_of_one_domain_are_one_domain_and_one_good_one_is_enough(
    small_site: Any, demo: Any
) -> None:
    small_site.observe_all()
    instance_id = demo.instance()
    domain, _ = demo.where(instance_id)
    other = next(endpoint for name, endpoint in small_site.endpoint.items() if name != domain)
    for endpoint in (small_site.endpoint[domain], other):
        small_site.run(
            records.record_observation,
            endpoint,
            small_site.observation(domain, at=small_site.tick()),
            small_site.tick(),
        )
    assert demo.status(instance_id) == "Ready"
    small_site.lose(domain)
    assert demo.status(instance_id) == "Ready"
    small_site.run(records.record_unreadable, other, "gone too", small_site.tick())
    assert demo.status(instance_id) == "Unknown"


def test_health_is_learnt_without_counting_as_a_change_of_intent(small_site: Any) -> None:
    domain = next(iter(small_site.partitions))
    small_site.observe(domain)
    before = intent(small_site, domain)
    small_site.health[small_site.guid(domain, 0, 0)] = GpuHealth.NO_NVLINK
    small_site.observe(domain)
    assert intent(small_site, domain) == before


def test_a_failure_that_is_older_than_the_reading_makes_nothing_unknown(small_site: Any) -> None:
    """A stopped replica records a failure late, after another one has read the controller."""
    domain = next(iter(small_site.partitions))
    began = small_site.tick()
    small_site.observe(domain)
    endpoint = small_site.endpoint[domain]
    small_site.run(records.record_unreadable, endpoint, "no answer", small_site.tick(), began)
    assert small_site.read(latest.latest_of_domain, domain).observation is not None
    small_site.run(records.record_unreadable, endpoint, "no answer", small_site.tick(), small_site.tick())
    assert small_site.read(latest.latest_of_domain, domain).observation is None
