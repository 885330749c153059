"""A change in a domain counts once all its controllers have shown it: one may no longer lead."""

from typing import Any

import pytest

from rackloom.carve.observation.latest import READING_VALID_SECONDS
from rackloom.carve.partitions import ownership
from rackloom.carve.partitions.ownership import ABANDONED_SECONDS, LATE_SECONDS
from rackloom.carve.reconcile import leases, records
from rackloom.core.partitions.domain import DeletePartition, GpuHealth


@pytest.fixture
def removed(pair: Any) -> Any:
    """The instance is released, and the second controller has accepted it and shows it done."""
    assert pair.record(pair.second, pair.seen()) is None
    (partition,) = pair.site.partitions[pair.domain]
    pair.demo.release(pair.instance)
    site = pair.site
    lease = site.run(leases.try_acquire_lease, pair.second, "test", site.now, site.now + 60.0)
    removal = DeletePartition(partition_id=1, name=partition)
    site.finish(site.run(records.begin_operation, lease, removal, site.now, site.tick()))
    assert pair.record(pair.second, pair.without_partitions()) is None
    return pair


def test_a_machine_is_not_given_back_by_the_word_of_one(removed: Any) -> None:
    assert removed.status() == "Terminating"
    # The other one still has the GPU in the partition: the leader is unknown.
    assert removed.record(removed.first, removed.seen()) is not None
    assert removed.status() == "Terminating"


def test_it_is_once_the_other_shows_it_too(removed: Any) -> None:
    assert removed.record(removed.first, removed.without_partitions()) is None
    assert removed.demo.status(removed.instance) is None


def test_one_that_is_lost_or_that_nobody_reads_is_not_waited_for(removed: Any) -> None:
    removed.lose(removed.first)
    assert removed.record(removed.second, removed.without_partitions()) is None
    assert removed.demo.status(removed.instance) is None


def test_one_that_nobody_has_read_for_long_is_not_waited_for(removed: Any) -> None:
    removed.site.tick(READING_VALID_SECONDS)
    assert removed.record(removed.second, removed.without_partitions()) is None
    assert removed.demo.status(removed.instance) is None


def test_an_instance_is_ready_once_all_have_shown_it(pair: Any) -> None:
    pair.record(pair.second, pair.seen())
    made = pair.demo.instance([(pair.demo.partition("other"), 0)])
    pair.site.observe(pair.domain)
    domain, slot = pair.demo.where(made)
    assert domain == pair.domain
    (wanted,) = (
        assignment.logical_partition
        for assignment in pair.site.read(records.load_intent, domain).assignments
        if assignment.guid == pair.site.guid(domain, slot, 0)
    )
    guids = frozenset({pair.site.guid(domain, slot, 0)})
    pair.site.finish(pair.site.begin_create(domain, wanted, "p-other", guids))
    pair.site.partitions[domain]["p-other"] = guids
    assert pair.record(pair.first, pair.seen()) is None
    assert pair.demo.status(made) == "Provisioning"
    assert pair.record(pair.second, pair.seen()) is None
    assert pair.demo.status(made) == "Ready"


@pytest.fixture
def joining(pair: Any) -> Any:
    """Another instance, and a create for its GPU that the first controller is carrying out."""
    pair.record(pair.second, pair.seen())
    made = pair.demo.instance([(pair.demo.partition("other"), 0)])
    domain, slot = pair.demo.where(made)
    assert domain == pair.domain
    guid = pair.site.guid(domain, slot, 0)
    assigned = pair.site.read(records.load_intent, domain).assignments
    (wanted,) = (assignment.logical_partition for assignment in assigned if assignment.guid == guid)
    operation = pair.site.begin_create(domain, wanted, "p-other", frozenset({guid}))

    def carry_out() -> None:
        pair.site.tick()
        pair.site.partitions[domain]["p-other"] = frozenset({guid})
        pair.site.finish(operation)

    pair.made, pair.carry_out = made, carry_out
    return pair


def test_a_machine_is_not_given_back_while_one_shows_its_gpu_in_a_partition(joining: Any) -> None:
    joining.demo.release(joining.made)
    assert joining.record(joining.second, joining.seen()) is None
    joining.carry_out()
    # The second one's reading is later than the release, and older than the join.
    assert joining.record(joining.first, joining.seen()) is None
    assert joining.demo.status(joining.made) == "Terminating"


def test_a_machine_is_not_given_back_by_what_was_shown_before_a_join_was_done(joining: Any) -> None:
    joining.demo.release(joining.made)
    assert joining.record(joining.second, joining.seen()) is None
    joining.carry_out()
    joining.lose(joining.first)
    assert joining.demo.status(joining.made) == "Terminating"
    assert joining.record(joining.second, joining.seen()) is None
    assert joining.demo.status(joining.made) == "Terminating"


def test_an_instance_is_not_ready_while_one_shows_its_gpu_in_no_partition(pair: Any) -> None:
    pair.record(pair.second, pair.seen())
    (name,) = pair.site.partitions[pair.domain]
    (mine,) = pair.site.read(ownership.owned_partitions, pair.domain)
    pair.demo.rewire(pair.instance, [(pair.demo.partition("q"), 0)])
    removal = DeletePartition(partition_id=1, name=name)
    lease = pair.site.lease(pair.domain)
    operation = pair.site.run(records.begin_operation, lease, removal, pair.site.now, pair.site.tick())
    pair.demo.rewire(pair.instance, [(mine.logical_partition, 0)])
    pair.record(pair.second, pair.seen())
    pair.site.tick()
    del pair.site.partitions[pair.domain][name]
    pair.site.finish(operation)
    assert pair.record(pair.first, pair.seen()) is None
    assert pair.status() == "Configuring"
    # A name stays ours as long as any controller lists the partition.
    assert name in {partition.name for partition in pair.site.read(ownership.owned_partitions, pair.domain)}


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_gpu_without_nvlink_is_told_by_one_of_them(pair: Any, which: str) -> None:
    for endpoint in (pair.first, pair.second):
        assert pair.record(endpoint, pair.seen()) is None
    assert pair.status() == "Ready"
    pair.site.health[pair.site.guid(pair.domain, pair.slot, 0)] = GpuHealth.NO_NVLINK
    assert pair.record(getattr(pair, which), pair.seen()) is None
    assert pair.status() == "Configuring"
    pair.site.health.clear()
    other = pair.second if which == "first" else pair.first
    assert pair.record(other, pair.seen()) is None
    assert pair.status() == "Configuring", "one of them still says so"
    assert pair.record(getattr(pair, which), pair.seen()) is None
    assert pair.status() == "Ready"


def test_the_newest_is_what_is_looked_at(pair: Any) -> None:
    pair.record(pair.first, pair.seen())
    newest = pair.seen()
    pair.record(pair.second, newest)
    known = pair.known()
    assert known.observation == newest
    assert [reading.observed_at for reading in known.shown] == sorted(
        (reading.observed_at for reading in known.shown), reverse=True
    )
    assert len(known.shown) == 2


def test_the_name_of_a_partition_that_was_seen_while_its_deletion_was_under_way_is_forgotten(
    pair: Any,
) -> None:
    pair.record(pair.second, pair.seen())
    (name,) = pair.site.partitions[pair.domain]
    pair.demo.release(pair.instance)
    removal = DeletePartition(partition_id=1, name=name)
    lease = pair.site.lease(pair.domain)
    operation = pair.site.run(records.begin_operation, lease, removal, pair.site.now, pair.site.tick())
    pair.record(pair.second, pair.seen())
    pair.site.tick()
    del pair.site.partitions[pair.domain][name]
    pair.site.finish(operation)
    for endpoint in (pair.first, pair.second):
        assert pair.record(endpoint, pair.seen()) is None
    assert pair.site.read(ownership.owned_partitions, pair.domain) == ()


def test_what_was_begun_through_one_that_never_answers_again_is_given_up_in_the_end(joining: Any) -> None:
    joining.demo.release(joining.made)
    joining.lose(joining.first)
    joining.site.tick(READING_VALID_SECONDS)
    assert joining.record(joining.second, joining.seen()) is None
    assert joining.demo.status(joining.made) == "Terminating", "it may be under way"
    joining.site.tick(ABANDONED_SECONDS)
    assert joining.record(joining.second, joining.seen()) is None
    assert joining.demo.status(joining.made) == "Terminating", "it may be carried out late"
    joining.site.tick(LATE_SECONDS)
    assert joining.record(joining.second, joining.seen()) is None
    assert joining.demo.status(joining.made) is None
