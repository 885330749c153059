"""Controllers of two domains that list the same hardware: a GPU is on one switch fabric."""

from typing import Any

import msgspec
import pytest

from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import conflicts, latest
from rackloom.carve.observation.conflicts import ConflictingControllers, ControllerConflict
from rackloom.carve.observation.latest import READING_VALID_SECONDS
from rackloom.carve.reconcile import leases, records
from rackloom.carve.store import journal, schema
from rackloom.core.partitions.domain import DeletePartition

OTHER = "00000000-0000-4000-8000-00000000dead"


def test_another_rack_that_takes_the_uuid_takes_nothing_else(pair: Any, small_site: Any) -> None:
    other = next(uuid for uuid in small_site.endpoint if uuid != pair.domain)
    seen = msgspec.structs.replace(small_site.observation(other, at=small_site.tick()), domain=pair.domain)
    dispute = pair.record(small_site.endpoint[other], seen)
    assert dispute is not None
    assert f"only {pair.url} lists 12 of the GPUs; only http://switch/{other} lists 12" in dispute.reason
    machines = small_site.read(lambda conn: conn.execute(schema.machine.select()).all())
    assert {(row.domain, row.missing_since) for row in machines} == {(pair.domain, None), (other, None)}
    # It is itself again.
    small_site.observe(other)
    assert pair.dispute() is None
    assert pair.status() == "Ready"
    assert small_site.read(latest.latest_of_domain, other).observation is not None


def test_both_domains_are_in_dispute_and_each_names_the_other(pair: Any) -> None:
    shown = pair.seen(domain=OTHER)
    dispute = pair.record(pair.second, shown)
    reason = (
        f"switch controllers {pair.second_url} of domain {OTHER} and {pair.url} of domain {pair.domain} "
        f"contradict one another: both list the same {len(shown.gpus)} GPUs"
    )
    assert dispute == ControllerConflict(OTHER, reason, shown.observed_at, pair.domain)
    assert pair.dispute() == ControllerConflict(pair.domain, reason, shown.observed_at, OTHER)
    assert dispute.domains == pair.dispute().domains == {pair.domain, OTHER}
    for domain in (pair.domain, OTHER):
        known = pair.site.read(latest.latest_of_domain, domain)
        assert (known.observation, known.unknown_since) == (None, shown.observed_at)
    assert pair.status() == "Unknown"
    assert pair.home() == pair.domain


def test_it_is_one_dispute_whoever_is_read_next(pair: Any) -> None:
    pair.record(pair.second, pair.seen(domain=OTHER))
    began = pair.dispute()
    for endpoint, domain in ((pair.first, pair.domain), (pair.second, OTHER), (pair.first, pair.domain)):
        conflict = pair.record(endpoint, pair.seen(domain=domain))
        assert conflict is not None
        assert (conflict.domain, conflict.reason, conflict.since) == (domain, began.reason, began.since)
    assert pair.dispute() == began


def test_nothing_is_begun_in_either_and_nothing_new_is_placed_there(pair: Any) -> None:
    pair.site.observe_all()
    pair.record(pair.second, pair.seen(domain=OTHER))
    step = DeletePartition(partition_id=1, name="whichever")
    for endpoint in (pair.first, pair.second):
        lease = pair.site.run(leases.try_acquire_lease, endpoint, "test", pair.site.now, pair.site.now + 60.0)
        with pytest.raises(ConflictingControllers, match="both list the same"):
            pair.site.run(records.begin_operation, lease, step, pair.site.now, pair.site.tick())
    new = pair.demo.instance([(pair.demo.partition("other"), 0)])
    assert pair.demo.where(new)[0] not in (pair.domain, OTHER)


@pytest.mark.parametrize("liar", ["first", "second"])
def test_the_one_that_is_repaired_gives_the_hardware_to_the_other(pair: Any, liar: str) -> None:
    pair.record(pair.second, pair.seen(domain=OTHER))
    pair.record(pair.first, pair.seen())
    repaired = pair.domain if liar == "first" else OTHER
    elsewhere = msgspec.structs.replace(pair.seen().gpus[0], guid=0xF00D, chassis_serial="ELSEWHERE")
    mended = pair.seen(domain=repaired, gpus=(elsewhere,), partitions=())
    assert pair.record(getattr(pair, liar), mended) is None
    assert pair.site.read(conflicts.conflicts_by_domain) == {}
    assert pair.home() == (OTHER if liar == "first" else pair.domain)
    assert pair.status() == "Ready"


@pytest.mark.parametrize("deleted", ["CHASSIS9", "registered"])
def test_deleting_the_endpoint_of_either_settles_it(pair: Any, deleted: str) -> None:
    pair.record(pair.second, pair.seen(domain=OTHER))
    pair.record(pair.first, pair.seen())
    serial = deleted if deleted == "CHASSIS9" else pair.seen().gpus[0].chassis_serial
    pair.site.run(endpoints.delete_chassis_endpoint, serial, pair.order())
    assert pair.site.read(conflicts.conflicts_by_domain) == {}
    assert pair.home() == (pair.domain if deleted == "CHASSIS9" else OTHER)
    assert pair.status() == "Ready"


def test_one_that_was_read_in_the_dispute_and_is_lost_then_stands_for_a_while(pair: Any) -> None:
    pair.record(pair.second, pair.seen(domain=OTHER))
    pair.record(pair.first, pair.seen())
    pair.lose(pair.first)
    assert pair.record(pair.second, pair.seen(domain=OTHER)) is not None
    assert pair.home() == pair.domain
    pair.site.tick(READING_VALID_SECONDS)
    assert pair.record(pair.second, pair.seen(domain=OTHER)) is None
    assert pair.home() == OTHER
    # It comes back and still lists them.
    assert pair.record(pair.first, pair.seen()) is not None
    assert pair.home() == OTHER
    assert pair.status() == "Unknown"


def test_one_that_is_lost_already_contradicts_nobody(pair: Any) -> None:
    pair.lose(pair.first)
    assert pair.record(pair.second, pair.seen(domain=OTHER)) is None
    assert pair.home() == OTHER


def test_one_whose_uuid_changes_is_in_no_dispute_with_what_it_was(pair: Any) -> None:
    newest = pair.site.read(journal.newest_event_number, pair.site.tenant.id)
    assert pair.record(pair.first, pair.seen(domain=OTHER)) is None
    assert pair.site.read(conflicts.conflicts_by_domain) == {}
    assert (pair.home(), pair.status()) == (OTHER, "Ready")
    # No event reported it as unknown in between.
    assert pair.site.read(journal.newest_event_number, pair.site.tenant.id) == newest


def test_the_two_controllers_of_a_domain_may_take_a_new_uuid_one_after_the_other(pair: Any) -> None:
    pair.record(pair.second, pair.seen())
    assert pair.record(pair.first, pair.seen(domain=OTHER)) is not None
    assert pair.record(pair.second, pair.seen(domain=OTHER)) is None
    assert pair.site.read(conflicts.conflicts_by_domain) == {}
    assert (pair.home(), pair.status()) == (OTHER, "Ready")


def test_another_gpu_in_the_same_place_is_another_gpu(pair: Any) -> None:
    others = tuple(msgspec.structs.replace(gpu, guid=gpu.guid + 0xF0000) for gpu in pair.seen().gpus)
    assert pair.record(pair.second, pair.seen(domain=OTHER, gpus=others, partitions=())) is None
    assert (pair.home(), pair.status()) == (pair.domain, "Ready")


def test_what_the_controllers_of_one_domain_contradict_is_told_first(pair: Any) -> None:
    third = "http://third"
    pair.site.run(endpoints.register_endpoint, third, ["CHASSIS8"], pair.site.tick(), pair.site.ids)
    key = next(endpoint.id for endpoint in pair.site.read(endpoints.all_endpoints) if endpoint.url == third)
    pair.record(pair.second, pair.seen(domain=OTHER))
    pair.record(key, pair.without_partitions())
    assert pair.dispute().rival is None
    assert pair.site.read(conflicts.conflict_of_domain, OTHER).rival == pair.domain
    pair.record(key, pair.seen())
    assert pair.dispute().rival == OTHER
    assert pair.record(pair.second, pair.seen(domain=OTHER, gpus=())) is None
    assert pair.site.read(conflicts.conflicts_by_domain) == {}
    assert pair.status() == "Ready"


def test_one_that_lists_the_gpus_of_another_rack_in_its_own_places_takes_them_from_nobody(
    pair: Any, small_site: Any
) -> None:
    other = next(uuid for uuid in small_site.endpoint if uuid != pair.domain)
    taken = tuple(
        msgspec.structs.replace(gpu, guid=real.guid)
        for gpu, real in zip(small_site.observation(other).gpus, pair.seen().gpus, strict=True)
    )
    managed = small_site.read(records.load_intent, pair.domain).managed
    lying = msgspec.structs.replace(small_site.observation(other, at=small_site.tick()), gpus=taken)
    pair.record(small_site.endpoint[other], lying)
    intent = small_site.read(records.load_intent, pair.domain)
    assert (intent.managed, len(intent.assignments)) == (managed, 1)
    pair.demo.release(pair.instance)
    assert pair.status() == "Terminating"
    pair.record(pair.first, pair.seen())
    assert pair.status() == "Terminating"
    pair.record(pair.first, pair.without_partitions())
    assert pair.demo.status(pair.instance) is None


def test_a_tray_that_was_put_into_another_rack_is_no_longer_where_nobody_uses_it(
    pair: Any, small_site: Any
) -> None:
    other = next(uuid for uuid in small_site.endpoint if uuid != pair.domain)
    used, free = pair.slot, (pair.slot + 1) % 3
    pair.record(
        pair.first, pair.seen(gpus=tuple(gpu for gpu in pair.seen().gpus if gpu.slot not in (used, free)))
    )
    gone = [gpu.guid for gpu in pair.seen().gpus if gpu.slot in (used, free)]
    places = small_site.observation(other)
    moved = tuple(
        msgspec.structs.replace(gpu, guid=guid) for gpu, guid in zip(places.gpus, gone, strict=False)
    )
    pair.record(
        small_site.endpoint[other],
        msgspec.structs.replace(places, gpus=moved, observed_at=pair.seen().observed_at),
    )
    kept = small_site.read(records.load_intent, pair.domain).managed
    assert {guid: guid in kept for guid in gone} == {
        gpu.guid: gpu.slot == used for gpu in pair.seen().gpus if gpu.guid in gone
    }


def test_machines_go_when_the_controller_of_their_chassis_lists_none_of_them(pair: Any) -> None:
    pair.record(pair.first, pair.seen(gpus=()))
    pair.record(pair.second, pair.seen(domain=OTHER))
    assert pair.home() == OTHER


def test_a_tray_that_is_away_is_nobody_elses_while_the_rest_of_its_chassis_is_there(pair: Any) -> None:
    tray = tuple(gpu for gpu in pair.seen().gpus if gpu.slot == pair.slot)
    others = tuple(gpu for gpu in pair.seen().gpus if gpu.slot != pair.slot)
    pair.record(pair.first, pair.seen(gpus=tray))
    assert pair.record(pair.second, pair.seen(domain=OTHER, gpus=others)) is None
    chosen = schema.machine.select().where(schema.machine.c.chassis_serial == tray[0].chassis_serial)
    rows = pair.site.read(lambda conn: conn.execute(chosen).all())
    assert {row.domain for row in rows} == {pair.domain}
