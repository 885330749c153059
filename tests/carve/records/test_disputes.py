"""Controllers of one domain that contradict one another: then nothing is known of it, and nothing is done."""

from typing import Any

import msgspec
import pytest

from rackloom.carve.inventory import endpoints, enrolment
from rackloom.carve.observation import latest
from rackloom.carve.observation.conflicts import ConflictingControllers, ControllerConflict
from rackloom.carve.partitions import found
from rackloom.carve.reconcile import leases, records
from rackloom.carve.store import journal, schema
from rackloom.carve.tenancy import capacity
from rackloom.core.partitions.domain import DeletePartition


def test_two_that_show_the_same_are_one_domain(pair: Any) -> None:
    assert pair.record(pair.second, pair.seen()) is None
    assert pair.record(pair.first, pair.seen()) is None
    assert pair.status() == "Ready"


def test_two_that_do_not_leave_everything_unknown_and_say_who_says_what(pair: Any) -> None:
    seen = pair.without_partitions()
    dispute = pair.record(pair.second, seen)
    assert dispute == pair.dispute()
    assert dispute == ControllerConflict(
        pair.domain,
        f"switch controllers {pair.second_url} and {pair.url} contradict one another: "
        "partition 1 has 0 and 1 members",
        seen.observed_at,
    )
    since = f"unknown since {latest.rfc3339(seen.observed_at)}"
    doubt = f"{since}: {latest.CONFLICT_REASON}"
    assert pair.known() == latest.LatestObservation(None, doubt, seen.observed_at, dispute.reason)
    assert pair.known().operators_doubt == f"{since}: {dispute.reason}"
    assert pair.status() == "Unknown"
    assert pair.demo.interfaces(pair.instance) == {0: ("Pending", doubt)}
    (newest,) = pair.site.read(journal.newest_statuses, [pair.instance]).values()
    assert (newest.status, doubt in newest.message) == ("Unknown", True)
    assert list(pair.site.read(found.partitions_of_domains, [pair.domain])) == []


def test_it_is_unknown_since_it_began_and_not_since_it_was_last_heard(pair: Any) -> None:
    first = pair.record(pair.second, pair.without_partitions())
    newest = pair.site.read(journal.newest_event_number, pair.site.tenant.id)
    for endpoint in (pair.first, pair.second, pair.first):
        seen = pair.seen() if endpoint == pair.first else pair.without_partitions()
        assert pair.record(endpoint, seen) == first
    # No event is repeated.
    assert pair.site.read(journal.newest_event_number, pair.site.tenant.id) == newest


def test_it_ends_when_they_agree_and_what_they_show_then_is_taken_over(pair: Any) -> None:
    pair.record(pair.second, pair.without_partitions())
    assert pair.record(pair.first, pair.without_partitions()) is None
    assert pair.dispute() is None
    assert pair.status() == "Configuring"
    pair.record(pair.first, pair.seen())
    assert pair.record(pair.second, pair.seen()) is None
    assert pair.status() == "Ready"


def test_it_ends_when_one_of_them_is_deleted(pair: Any) -> None:
    pair.record(pair.second, pair.without_partitions())
    pair.site.run(endpoints.delete_chassis_endpoint, "CHASSIS9", pair.order())
    assert pair.dispute() is None
    assert pair.status() == "Ready"


def test_what_the_last_one_showed_meanwhile_is_taken_over_when_the_other_is_deleted(pair: Any) -> None:
    pair.record(pair.second, pair.without_partitions())
    guid = pair.site.guid(pair.domain, pair.slot, 0)
    swapped = tuple(
        msgspec.structs.replace(gpu, guid=0xF00D) if gpu.guid == guid else gpu for gpu in pair.seen().gpus
    )
    pair.record(pair.first, pair.seen(gpus=swapped, partitions=()))
    assert guid in pair.site.read(records.load_intent, pair.domain).managed
    pair.site.run(endpoints.delete_chassis_endpoint, "CHASSIS9", pair.order())
    assert pair.dispute() is None
    managed = pair.site.read(records.load_intent, pair.domain).managed
    assert 0xF00D in managed
    assert guid not in managed


def test_no_operation_is_begun_in_a_dispute(pair: Any) -> None:
    pair.record(pair.second, pair.without_partitions())
    for endpoint in (pair.first, pair.second):
        until = pair.site.now + 60.0
        lease = pair.site.run(leases.try_acquire_lease, endpoint, "test", pair.site.now, until)
        with pytest.raises(ConflictingControllers, match="contradict one another") as refusal:
            pair.site.run(
                records.begin_operation,
                lease,
                DeletePartition(partition_id=1, name="whichever"),
                pair.site.now,
                pair.site.tick(),
            )
        assert refusal.value.nearest_fix is not None


def test_a_machine_that_only_a_contradicted_controller_shows_is_not_enrolled(pair: Any) -> None:
    ghosts = tuple(
        msgspec.structs.replace(gpu, guid=gpu.guid + 0xF0000, chassis_serial="GHOST")
        for gpu in pair.seen().gpus
    )
    assert pair.record(pair.second, pair.seen(gpus=ghosts)) is not None
    enrol(pair)
    assert of_chassis(pair, "GHOST") == []
    # Both show it: then it is there.
    pair.record(pair.second, pair.seen(gpus=pair.seen().gpus + ghosts))
    assert pair.record(pair.first, pair.seen(gpus=pair.seen().gpus + ghosts)) is None
    enrol(pair)
    assert {row.domain for row in of_chassis(pair, "GHOST")} == {pair.domain}
    assert {gpu.guid for gpu in ghosts} <= pair.site.read(records.load_intent, pair.domain).managed


def enrol(pair: Any) -> None:
    site = pair.site
    site.run(enrolment.enrol_machines_of_domain, site.site_id, pair.domain, "Ready", site.tick())


def of_chassis(pair: Any, serial: str) -> list[Any]:
    chosen = schema.machine.select().where(schema.machine.c.chassis_serial == serial)
    return list(pair.site.read(lambda conn: conn.execute(chosen).all()))


def test_a_new_instance_goes_where_no_controllers_contradict(pair: Any) -> None:
    def room() -> tuple[int, int]:
        views = pair.site.read(
            capacity.capacity_of_domains, [pair.domain], pair.site.tenant.id, None, pair.site.now
        )
        return views[pair.domain].free, views[pair.domain].closed

    pair.site.observe_all()
    assert room() == (2, 0)
    assert pair.record(pair.second, pair.without_partitions()) is not None
    assert room() == (0, 2)
    new = pair.demo.instance([(pair.demo.partition("other"), 0)])
    assert pair.demo.where(new)[0] != pair.domain


def test_no_dispute_ends_because_a_controller_contradicts_itself(pair: Any) -> None:
    pair.record(pair.first, pair.seen())
    dispute = pair.record(pair.second, pair.without_partitions())
    assert dispute is not None
    guid = pair.seen().gpus[-1].guid
    assert pair.record(pair.second, pair.seen(partitions=(), uncertain=frozenset({guid}))) is not None
    assert pair.dispute() is not None
    assert pair.status() == "Unknown"
    pair.record(pair.second, pair.seen())
    pair.record(pair.first, pair.seen())
    assert (pair.dispute(), pair.status()) == (None, "Ready")
