"""The loss of a moved tray's GPUs stays recorded until the tray is back, or the instance is gone."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.inventory import enrolment, sync
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import GpuHealth


@pytest.fixture
def held(small_site: Any, demo: Any) -> Any:
    """An instance, its domain, its slot, and an empty slot."""
    instance_id = demo.instance([(demo.partition(), 0)])
    small_site.converge()
    domain, slot = demo.where(instance_id)
    return instance_id, domain, slot, (slot + 1) % 3


def exchange(site: Any, domain: str, first: int, second: int) -> None:
    """The controller lists the GPUs of two slots in one another's."""
    other = {first: second, second: first}
    seen = site.observation(domain, at=site.tick())
    gpus = tuple(msgspec.structs.replace(gpu, slot=other.get(gpu.slot, gpu.slot)) for gpu in seen.gpus)
    site.run(
        records.record_observation,
        site.endpoint[domain],
        msgspec.structs.replace(seen, gpus=gpus),
        site.tick(),
    )


def lost(site: Any) -> list[tuple[int, int]]:
    return [(row.module_id, int(row.guid)) for row in site.read(sync.lost_gpus_of_instances)]


def test_each_gpu_of_an_instance_that_was_moved_is_kept(small_site: Any, held: Any) -> None:
    _, domain, slot, free = held
    assert lost(small_site) == []
    exchange(small_site, domain, slot, free)
    gone = [(device + 1, small_site.guid(domain, slot, device)) for device in range(4)]
    assert lost(small_site) == gone
    small_site.health[gone[0][1]] = GpuHealth.DEGRADED
    exchange(small_site, domain, slot, free)
    assert lost(small_site) == gone, "still so"


def test_it_is_forgotten_when_they_are_back(small_site: Any, held: Any) -> None:
    _, domain, slot, free = held
    exchange(small_site, domain, slot, free)
    small_site.observe(domain)
    assert lost(small_site) == []


def test_it_says_nothing_of_whoever_has_the_machine_next(small_site: Any, demo: Any, held: Any) -> None:
    instance_id, domain, slot, free = held
    exchange(small_site, domain, slot, free)
    demo.release(instance_id)
    small_site.partitions[domain] = {}
    exchange(small_site, domain, slot, free)
    assert demo.status(instance_id) is None
    assert lost(small_site) == []
    for _ in range(3):
        demo.instance()
    assert lost(small_site) == []


def test_a_machine_can_be_removed_after_it(small_site: Any, demo: Any, held: Any) -> None:
    instance_id, domain, slot, free = held
    exchange(small_site, domain, slot, free)
    chosen = sa.select(schema.machine.c.id).where(
        schema.machine.c.domain == domain, schema.machine.c.slot == slot
    )
    machine = small_site.read(lambda conn: conn.execute(chosen).scalar_one())
    demo.release(instance_id)
    small_site.partitions[domain] = {}
    exchange(small_site, domain, slot, free)
    small_site.run(enrolment.remove_machine, machine, small_site.tick())
    left = small_site.read(lambda conn: conn.execute(sa.select(schema.moved_gpu)).all())
    assert left == []


@pytest.fixture
def neighbours(small_site: Any, demo: Any) -> Any:
    """A domain and the two slots of it in which instances are."""
    ones = [demo.instance(), demo.instance()]
    small_site.converge()
    (domain, first), (other, second) = map(demo.where, ones)
    assert domain == other
    return domain, first, second


def put(site: Any, domain: str, slots: dict[int, int | None]) -> None:
    """The controller lists the tray of each of `slots` at its new slot, or not at all if None: it is out."""
    seen = site.observation(domain, at=site.tick())
    to = {gpu.slot: slots.get(gpu.slot, gpu.slot) for gpu in seen.gpus}
    gpus = tuple(
        msgspec.structs.replace(gpu, slot=to[gpu.slot]) for gpu in seen.gpus if to[gpu.slot] is not None
    )
    changed = msgspec.structs.replace(seen, gpus=gpus)
    site.run(records.record_observation, site.endpoint[domain], changed, site.tick())


def guids(site: Any, domain: str, *slots: int) -> set[int]:
    return {site.guid(domain, slot, device) for slot in slots for device in range(4)}


def test_who_only_had_a_tray_in_its_slot_for_a_while_lost_nothing_once_both_are_back(
    small_site: Any, neighbours: Any
) -> None:
    domain, first, second = neighbours
    put(small_site, domain, {second: None, first: second})
    assert {guid for _, guid in lost(small_site)} == guids(small_site, domain, first, second)
    put(small_site, domain, {})
    assert lost(small_site) == []


def test_trays_that_are_exchanged_one_at_a_time_are_both_lost(small_site: Any, neighbours: Any) -> None:
    domain, first, second = neighbours
    put(small_site, domain, {first: None, second: None})
    assert lost(small_site) == [], "they may come back"
    put(small_site, domain, {second: None, first: second})
    put(small_site, domain, {first: second, second: first})
    assert {guid for _, guid in lost(small_site)} == guids(small_site, domain, first, second)
    put(small_site, domain, {})
    assert lost(small_site) == []


def test_a_tray_that_is_pulled_and_put_where_nobody_is_is_lost(small_site: Any, held: Any) -> None:
    _, domain, slot, free = held
    put(small_site, domain, {slot: None})
    put(small_site, domain, {free: None, slot: free})
    assert {guid for _, guid in lost(small_site)} == guids(small_site, domain, slot)


def test_each_place_keeps_the_first_that_it_lost(small_site: Any, neighbours: Any) -> None:
    domain, first, second = neighbours
    put(small_site, domain, {second: None, first: second})
    before = small_site.read(sync.lost_gpus_of_instances)
    third = ({0, 1, 2} - {first, second}).pop()
    put(small_site, domain, {first: None, third: second, second: third})
    assert small_site.read(sync.lost_gpus_of_instances) == before
