"""Fabrics out of the records: whose partitions, since when in doubt, and controllers that disagree."""

import msgspec
import pytest

from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.snapshot.fabric import Staleness, read_fabrics
from rackloom.app.snapshot.records import read_records
from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile import records
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import CheckState
from rackloom.core.diagnosis.join import gpu_chains
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    DomainLimits,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.lab.switches.fabric import SeededNames
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

NOW = 1_800_000_000.0
FRESH = Staleness(NOW, 180.0)
SITE = build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("x"))
DOMAIN = SITE.domains[0]
URL = "http://127.0.0.1:9370"


def observed(at=NOW - 5, partitions=(), health=GpuHealth.HEALTHY):
    gpus = tuple(
        ObservedGpu(
            guid=0xFEED_0000_0000_0000 + 8 * tray.tray_index + module,
            chassis_serial=tray.chassis_serial,
            slot=tray.slot,
            tray_index=tray.tray_index,
            module_id=module,
            health=health,
        )
        for tray in DOMAIN.trays
        for module in range(1, 5)
    )
    return DomainObservation(
        domain=DOMAIN.uuid, gpus=gpus, partitions=tuple(partitions), limits=DomainLimits(), observed_at=at
    )


def partition(number, name, *members):
    return ObservedPartition(
        id=number,
        name=name,
        members=frozenset(members),
        health=PartitionHealth.HEALTHY,
        guid_based=True,
        multicast_groups=0,
    )


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def store():
    return Store.inline()


async def seeded(store):
    numbers = iter(range(10_000))
    await store.run(
        seed_embedded_site,
        SITE,
        profiles.load_rack("gb200-nvl72"),
        {DOMAIN.uuid: URL},
        now=NOW - 1000,
        ids=lambda: f"id-{next(numbers)}",
    )
    (endpoint,) = await store.read(endpoints.all_endpoints)
    return endpoint.id


async def fabrics(store, stale=FRESH):
    return await store.read(lambda conn: read_fabrics(conn, stale))


async def test_a_controller_that_never_answered_is_unknown(store):
    await seeded(store)
    (domain,) = (await fabrics(store)).domains
    assert (domain.uuid, domain.unknown_since) == (URL, NOW)
    assert "has answered yet" in domain.problem
    records = await store.read(read_records, 0.0)
    assert len(records.machines) == 18
    assert all(key.fabric_guid is None for machine in records.machines for key in machine.gpus)


async def test_what_was_read_is_joined_to_the_machines(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(), NOW)
    snapshot = await site_snapshot(NOW, records=store, stale=FRESH)
    assert examine(snapshot) == ()
    assert snapshot.layer(Layer.FABRIC).at == NOW - 5
    assert len(snapshot.fabric_gpus) == 72
    assert {machine.domain for machine in snapshot.machines} == {DOMAIN.uuid}


@pytest.mark.parametrize(
    ("number", "name", "check"),
    [(DEFAULT_PARTITION_ID, "Default", Check.DEFAULT_GONE), (9, "by-hand", Check.PARTITION_OWNED)],
)
async def test_partitions_say_whose_they_are(store, number, name, check):
    endpoint = await seeded(store)
    guids = [gpu.guid for gpu in observed().gpus]
    await store.run(
        records.record_observation, endpoint, observed(partitions=[partition(number, name, *guids)]), NOW
    )
    (found,) = examine(await site_snapshot(NOW, records=store, stale=FRESH))
    assert found.check == check


async def test_a_domain_has_the_multicast_groups_of_its_newest_reading(store):
    endpoint = await seeded(store)
    limits = DomainLimits(max_multicast_groups=1024, free_multicast_groups=8)
    reading = msgspec.structs.replace(observed(), limits=limits)
    await store.run(records.record_observation, endpoint, reading, NOW)
    (domain,) = (await fabrics(store)).domains
    assert (domain.multicast_limit, domain.multicast_used) == (1024, 1016)


async def test_a_reading_that_is_old_is_not_how_things_are(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(at=NOW - 181), NOW - 180)
    (domain,) = (await fabrics(store)).domains
    assert domain.unknown_since == domain.observed_at == NOW - 181
    assert len((await fabrics(store)).fabric_gpus) == 72


async def test_lists_that_contradict_each_other_accuse_nobody(store):
    endpoint = await seeded(store)
    guids = frozenset(gpu.guid for gpu in observed().gpus)
    doubtful = msgspec.structs.replace(
        observed(partitions=[partition(9, "by-hand", *guids)]), uncertain=guids
    )
    await store.run(records.record_observation, endpoint, doubtful, NOW)
    read = await fabrics(store)
    assert (read.domains[0].uncertain, read.domains[0].answers) == (72, True)
    (found,) = examine(await site_snapshot(NOW, records=store, stale=FRESH))
    assert found.check == Check.CONTROLLER
    assert "the lists of the switch controller contradict each other" in found.message
    assert "and 64 more" in found.message


async def test_only_the_gpus_of_a_contradiction_are_unknown(store):
    endpoint = await seeded(store)
    guids = sorted(gpu.guid for gpu in observed().gpus)
    doubtful = msgspec.structs.replace(
        observed(partitions=[partition(9, "by-hand", *guids[:2]), partition(8, "too", *guids[4:6])]),
        uncertain=frozenset(guids[:2]),
    )
    await store.run(records.record_observation, endpoint, doubtful, NOW)
    read = await fabrics(store)
    assert {gpu.guid for gpu in read.fabric_gpus if gpu.uncertain} == set(guids[:2])
    assert [(shown.name, shown.uncertain) for shown in read.partitions] == [("too", False), ("by-hand", True)]
    found = examine(await site_snapshot(NOW, records=store, stale=FRESH))
    assert {finding.check for finding in found} == {Check.CONTROLLER, Check.PARTITION_OWNED}
    (named,) = (finding for finding in found if finding.check == Check.CONTROLLER)
    assert all(f"0x{guid:016x}" in named.message for guid in guids[:2])


async def test_a_controller_that_was_lost_says_since_when_and_why(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(), NOW - 5)
    await store.run(records.record_unreadable, endpoint, "GetGpuInfoList: UNAVAILABLE", NOW - 2)
    (found,) = examine(await site_snapshot(NOW, records=store, stale=FRESH))
    assert (found.check, found.since) == (Check.CONTROLLER, NOW - 2)
    assert "UNAVAILABLE" in found.message


async def test_one_that_stays_away_is_told_as_gone_for_good(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(at=NOW - 7201), NOW - 7201)
    await store.run(records.record_unreadable, endpoint, "UNAVAILABLE", NOW - 7200)
    await store.run(records.record_unreadable, endpoint, "UNAVAILABLE", NOW - 5)
    (found,) = examine(await site_snapshot(NOW, records=store, stale=FRESH))
    assert (found.check, found.state, found.since) == (
        Check.CONTROLLER_AWAY,
        CheckState.FAILS,
        NOW - 7200,
    )
    assert f"--chassis-serial {DOMAIN.trays[0].chassis_serial} " in found.fix
    assert found.consequences == (f"switch controller: domain {DOMAIN.uuid}",)


async def test_a_domain_whose_controller_was_taken_out_of_the_site_is_told(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(), NOW)
    taken = OperatorOrder("an operator", "test", NOW)
    await store.run(endpoints.delete_chassis_endpoint, DOMAIN.trays[0].chassis_serial, taken)
    (found,) = examine(await site_snapshot(NOW, records=store, stale=FRESH))
    assert (found.check, found.subject) == (Check.CONTROLLER_AWAY, f"domain {DOMAIN.uuid}")
    assert "no switch controller is registered for it" in found.message


async def test_a_controller_that_has_not_answered_yet_is_registered_all_the_same(store):
    await seeded(store)
    found = examine(await site_snapshot(NOW, records=store, stale=FRESH))
    assert Check.CONTROLLER_AWAY not in {finding.check for finding in found}


async def test_controllers_that_show_different_things_are_believed_by_nobody(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(), NOW)
    await store.run(endpoints.register_endpoint, "http://127.0.0.1:9371", ["other"], NOW, lambda: "second")
    members = [gpu.guid for gpu in observed().gpus[:4]]
    other = observed(at=NOW - 3, partitions=[partition(3, "x", *members)])
    await store.run(records.record_observation, "second", other, NOW)
    found = examine(await site_snapshot(NOW, records=store, stale=FRESH))
    assert [finding.check for finding in found] == [Check.CONTROLLER]
    assert "contradict one another: partition 3 has 0 and 4 members" in found[0].message
    agreed = msgspec.structs.replace(observed(), observed_at=NOW - 1)
    await store.run(records.record_observation, "second", agreed, NOW)
    assert examine(await site_snapshot(NOW, records=store, stale=FRESH)) == ()


async def test_hardware_that_two_domains_list_is_in_doubt_in_both_and_stays_where_the_records_have_it(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(), NOW)
    await store.run(endpoints.register_endpoint, "http://127.0.0.1:9371", ["other"], NOW, lambda: "second")
    copy = "ffffffff-0000-4000-8000-000000000000"
    doubled = msgspec.structs.replace(observed(at=NOW - 3), domain=copy)
    await store.run(records.record_observation, "second", doubled, NOW)
    snapshot = await site_snapshot(NOW, records=store, stale=FRESH)
    assert {(domain.uuid, domain.disputed, domain.unknown_since) for domain in snapshot.domains} == {
        (DOMAIN.uuid, True, NOW - 3),
        (copy, True, NOW - 3),
    }
    found = examine(snapshot)
    assert {finding.check for finding in found} == {Check.CONTROLLER}
    for named in (DOMAIN.uuid, copy, "both list the same 72 GPUs"):
        assert any(named in finding.message for finding in found)
    joined = gpu_chains(snapshot)
    assert len(joined) == 72
    assert {chain.fabric.domain for chain in joined} == {DOMAIN.uuid}


async def test_a_controller_that_cannot_be_read_does_not_speak_for_its_domain(store):
    lost = await seeded(store)
    members = [gpu.guid for gpu in observed().gpus[:4]]
    await store.run(endpoints.register_endpoint, "http://127.0.0.1:9371", ["other"], NOW, lambda: "second")
    await store.run(records.record_observation, "second", observed(at=NOW - 9), NOW)
    await store.run(records.record_observation, lost, observed(partitions=[partition(3, "x", *members)]), NOW)
    await store.run(records.record_unreadable, lost, "UNAVAILABLE", NOW - 2)
    found = await fabrics(store)
    assert ([domain.observed_at for domain in found.domains], found.partitions) == ([NOW - 9], ())
    await store.run(records.record_unreadable, "second", "UNAVAILABLE", NOW - 1)
    both = await fabrics(store)
    assert [(domain.observed_at, domain.unknown_since) for domain in both.domains] == [(NOW - 5, NOW - 1)]
    assert [partition.name for partition in both.partitions] == ["x"]


async def test_a_standby_that_is_lost_last_does_not_tell_since_when_the_fabric_is_silent(store):
    leader = await seeded(store)
    await store.run(endpoints.register_endpoint, "http://127.0.0.1:9371", ["other"], NOW, lambda: "second")
    standby = msgspec.structs.replace(observed(at=NOW - 9), gpus=())
    await store.run(records.record_observation, "second", standby, NOW)
    await store.run(records.record_observation, leader, observed(), NOW)
    await store.run(records.record_unreadable, leader, "the leader is gone", NOW - 3)
    await store.run(records.record_unreadable, "second", "UNAVAILABLE", NOW - 1)
    (domain,) = (await fabrics(store)).domains
    assert (domain.unknown_since, domain.problem) == (NOW - 3, "the leader is gone")


async def test_a_standby_that_lists_no_gpu_does_not_hide_those_of_the_other(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(), NOW)
    await store.run(endpoints.register_endpoint, "http://127.0.0.1:9371", ["other"], NOW, lambda: "second")
    nothing = msgspec.structs.replace(observed(at=NOW + 1), gpus=())
    await store.run(records.record_observation, "second", nothing, NOW + 1)
    assert len((await fabrics(store)).fabric_gpus) == 72


async def test_a_service_that_is_not_running_makes_the_whole_layer_unknown(store):
    endpoint = await seeded(store)
    await store.run(records.record_observation, endpoint, observed(), NOW)
    stopped = Staleness(NOW, 0.0, "it is not running", "rackloom up")
    (found,) = examine(await site_snapshot(NOW, records=store, stale=stopped))
    assert (found.check, found.fix, found.since) == (Check.LAYER, "rackloom up", NOW - 5)
    assert found.consequences == (f"{Check.CONTROLLER}: domain {DOMAIN.uuid}",)


async def test_a_gpu_that_is_listed_twice_is_told_with_both_partitions(store):
    endpoint = await seeded(store)
    guid = observed().gpus[0].guid
    twice = [partition(3, "a", guid), partition(4, "b", guid)]
    await store.run(records.record_observation, endpoint, observed(partitions=twice), NOW)
    gpu = next(gpu for gpu in (await fabrics(store)).fabric_gpus if gpu.guid == guid)
    assert (gpu.partition, gpu.also) == (3, (4,))
