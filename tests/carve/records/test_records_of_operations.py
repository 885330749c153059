"""Records of operations: which are closed, confirmed or open, and in which domain. Times are exact."""

from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.partitions import ownership
from rackloom.carve.partitions.ownership import ABANDONED_SECONDS, INTERRUPTED_REASON, LATE_SECONDS
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import (
    AddGpus,
    CreatePartition,
    DeletePartition,
    PartitionOperation,
    RemoveGpus,
)

READ_AT = 100_000.0
DELETE = DeletePartition(partition_id=1, name="ours")


class Records:
    """Operations in two domains, each with a separate controller."""

    def __init__(self, site: Any) -> None:
        site.observe_all()
        self.site = site
        self.here, self.there = site.endpoint

    def begin(self, at: float, wanted: PartitionOperation = DELETE, domain: str | None = None) -> int:
        where = self.here if domain is None else domain
        endpoint = self.site.endpoint[where]
        return int(self.site.run(ownership.begin_operation_record, endpoint, where, wanted, at, at))

    def answered(self, at: float, state: str = "done", **begun: Any) -> int:
        number = self.begin(at - 1.0, **begun)
        self.site.run(ownership.finish_operation_record, number, state, None, None, at)
        return number

    def claim(self, name: str, domain: str) -> int:
        wanted = CreatePartition(name=name, logical_partition="lp", guids=(1,))
        number = self.begin(READ_AT, wanted, domain)
        self.site.run(ownership.claim_name, domain, wanted, number, READ_AT)
        return number

    def read(self, number: int) -> Any:
        wanted = sa.select(schema.operation).where(schema.operation.c.id == number)
        return self.site.read(lambda conn: conn.execute(wanted).one())

    def states(self, *numbers: int) -> list[str]:
        return [str(self.read(number).state) for number in numbers]


@pytest.fixture
def records(small_site: Any) -> Records:
    return Records(small_site)


def test_what_began_before_a_reading_and_has_no_answer_was_interrupted(records: Records) -> None:
    before, at = records.begin(READ_AT - 0.1), records.begin(READ_AT)
    elsewhere, done = records.begin(READ_AT - 0.1, domain=records.there), records.answered(READ_AT - 1.0)
    endpoint = records.site.endpoint[records.here]
    records.site.run(ownership.close_interrupted_operations, endpoint, READ_AT, READ_AT + 1.0)
    assert records.states(before, at, elsewhere, done) == ["unknown", "pending", "pending", "done"]
    closed = records.read(before)
    assert (closed.message, closed.finished) == (INTERRUPTED_REASON, READ_AT + 1.0)


def test_what_began_long_ago_through_any_endpoint_of_the_domain_was_abandoned(records: Records) -> None:
    long_ago = READ_AT - ABANDONED_SECONDS
    before, at = records.begin(long_ago - 0.1), records.begin(long_ago)
    elsewhere = records.begin(long_ago - 0.1, domain=records.there)
    records.site.run(ownership.close_abandoned_operations, records.here, READ_AT, READ_AT + 1.0)
    assert records.states(before, at, elsewhere) == ["unknown", "pending", "pending"]


def test_the_first_reading_from_the_answer_on_confirms_an_operation(records: Records) -> None:
    at, later = records.answered(READ_AT), records.answered(READ_AT + 0.1)
    elsewhere = records.answered(READ_AT, domain=records.there)
    endpoint = records.site.endpoint[records.here]
    records.site.run(ownership.confirm_operations, endpoint, READ_AT)
    confirmed = [records.read(number).observed_after for number in (at, later, elsewhere)]
    assert confirmed == [READ_AT, None, None]
    records.site.run(ownership.confirm_operations, endpoint, READ_AT + 5.0)
    confirmed = [records.read(number).observed_after for number in (at, later, elsewhere)]
    assert confirmed == [READ_AT, READ_AT + 5.0, None]


def test_gpus_that_an_operation_may_still_join_are_named(records: Records) -> None:
    def create(guid: int) -> CreatePartition:
        return CreatePartition(name=f"p{guid}", logical_partition="lp", guids=(guid,))

    records.begin(READ_AT, create(1))
    records.begin(READ_AT, AddGpus(partition_id=1, name="ours", guids=(2, 3)))
    records.answered(READ_AT - LATE_SECONDS + 0.1, "unknown", wanted=create(4))
    records.answered(READ_AT + 0.1, wanted=create(5))
    # Settled: too late for a controller, or so early that the reading shows the effect.
    records.answered(READ_AT - LATE_SECONDS, "unknown", wanted=create(11))
    records.answered(READ_AT, wanted=create(12))
    records.answered(READ_AT + 0.1, "refused", wanted=create(13))
    # Joins nothing, or not here.
    records.begin(READ_AT, RemoveGpus(partition_id=1, name="ours", guids=(14,)))
    records.begin(READ_AT, create(15), records.there)
    joining = records.site.read(ownership.gpus_maybe_joining, records.here, READ_AT)
    assert joining == {1, 2, 3, 4, 5}


def test_a_name_belongs_to_its_domain(records: Records) -> None:
    for name, domain in (("b", records.here), ("a", records.here), ("b", records.there)):
        records.claim(name, domain)
    here = records.site.read(ownership.owned_partitions, records.here)
    assert [owned.name for owned in here] == ["a", "b"]
    # The requester is found by name and domain: there is no other "a", and another "b".
    for domain in (records.here, records.there):
        assert records.read(
            records.begin(READ_AT, DeletePartition(partition_id=1, name="b"), domain)
        ).reason == ("logical partition lp was deleted")
    reason = records.read(
        records.begin(READ_AT, DeletePartition(partition_id=1, name="a"), records.there)
    ).reason
    assert reason == "the site keeps no GPU in partition a"


def test_a_reading_of_a_domain_changes_the_names_of_no_other(records: Records) -> None:
    for domain in (records.here, records.there):
        operation = records.claim("ours", domain)
        records.site.run(ownership.finish_operation_record, operation, "refused", None, None, READ_AT + 1.0)
    reading = records.site.observation(records.here, at=READ_AT + 2.0)
    records.site.run(ownership.update_owned_partitions, [reading], READ_AT + 3.0)
    assert records.site.read(ownership.owned_partitions, records.here) == ()
    assert len(records.site.read(ownership.owned_partitions, records.there)) == 1


def test_a_partition_is_omitted_once_it_was_listed_and_is_not_any_more(records: Records) -> None:
    for domain in (records.here, records.there):
        for name in ("listed", "omitted", "never listed"):
            records.claim(name, domain)
    for at, names in ((1.0, ("listed", "omitted")), (2.0, ("listed",))):
        records.site.partitions[records.here] = dict.fromkeys(names, frozenset((1,)))
        reading = records.site.observation(records.here, at=READ_AT + at)
        records.site.run(ownership.update_owned_partitions, [reading], READ_AT + at)
    assert records.site.read(ownership.omitted_partitions, records.here) == {"omitted"}
    assert records.site.read(ownership.omitted_partitions, records.there) == frozenset()
