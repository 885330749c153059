"""What was changed in a domain counts once all its controllers have shown it: one may no longer lead."""

from typing import Any

import pytest

from rackloom.carve.plan.values import DeletePartition
from rackloom.carve.site import fabric_book, leases
from rackloom.carve.site.knowledge import STANDS_SECONDS


@pytest.fixture
def removed(pair: Any) -> Any:
    """The instance is released, and the second controller has accepted it and shows it done."""
    assert pair.tell(pair.second, pair.seen()) is None
    (partition,) = pair.site.partitions[pair.domain]
    pair.demo.release(pair.instance)
    site = pair.site
    lease = site.run(leases.try_acquire, pair.second, "test", site.now, site.now + 60.0)
    removal = DeletePartition(partition_id=1, name=partition)
    site.finish(site.run(fabric_book.begin_operation, lease, removal, site.now, site.tick()))
    assert pair.tell(pair.second, pair.without_partitions()) is None
    return pair


def test_a_machine_is_not_given_back_by_the_word_of_one(removed: Any) -> None:
    assert removed.status() == "Terminating"
    # The other one still has the GPU in the partition: who leads cannot be told.
    assert removed.tell(removed.first, removed.seen()) is not None
    assert removed.status() == "Terminating"


def test_it_is_once_the_other_shows_it_too(removed: Any) -> None:
    assert removed.tell(removed.first, removed.without_partitions()) is None
    assert removed.demo.status(removed.instance) is None


def test_one_that_is_lost_or_that_nobody_reads_is_not_waited_for(removed: Any) -> None:
    removed.lose(removed.first)
    assert removed.tell(removed.second, removed.without_partitions()) is None
    assert removed.demo.status(removed.instance) is None


def test_one_that_nobody_has_read_for_long_is_not_waited_for(removed: Any) -> None:
    removed.site.tick(STANDS_SECONDS)
    assert removed.tell(removed.second, removed.without_partitions()) is None
    assert removed.demo.status(removed.instance) is None


def test_an_instance_is_ready_once_all_have_shown_it(pair: Any) -> None:
    pair.tell(pair.second, pair.seen())
    made = pair.demo.instance([(pair.demo.partition("other"), 0)])
    pair.site.observe(pair.domain)
    domain, slot = pair.demo.where(made)
    assert domain == pair.domain
    (wanted,) = (
        one.logical_partition
        for one in pair.site.read(fabric_book.intent, domain).assignments
        if one.guid == pair.site.guid(domain, slot, 0)
    )
    guids = frozenset({pair.site.guid(domain, slot, 0)})
    pair.site.finish(pair.site.begin_create(domain, wanted, "p-other", guids))
    pair.site.partitions[domain]["p-other"] = guids
    assert pair.tell(pair.first, pair.seen()) is None
    assert pair.demo.status(made) == "Provisioning"
    assert pair.tell(pair.second, pair.seen()) is None
    assert pair.demo.status(made) == "Ready"
