"""When the name of a partition is kept, dropped, copied or given up."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.partitions import found, ownership
from rackloom.carve.partitions.ownership import FORGET_NAME_SECONDS
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.values import Rejected
from rackloom.core.partitions.domain import CreatePartition, DeletePartition, PartitionOperation, RemoveGpus


class Named:
    """A partition "ours" of a tenant in one domain, created at `born` and answered, but not yet listed."""

    def __init__(self, site: Any, demo: Any) -> None:
        self.site = site
        site.observe_all()
        self.partition = demo.partition()
        self.domain, slot = demo.where(demo.instance([(self.partition, 0)]))
        self.guids = (site.guid(self.domain, slot, 0),)
        self.other = next(domain for domain in site.endpoint if domain != self.domain)
        self.born = site.tick()
        self.created = self.begin(self.create(), at=self.born)

    def create(self, name: str = "ours") -> CreatePartition:
        return CreatePartition(name=name, logical_partition=self.partition, guids=self.guids)

    def begin(self, wanted: PartitionOperation, domain: str | None = None, at: float | None = None) -> int:
        """Record that an operation is about to be requested, without the reconciler's checks."""
        begun = self.site.tick() if at is None else at
        here = self.domain if domain is None else domain

        def write(conn: sa.Connection) -> int:
            number = ownership.begin_operation_record(
                conn, self.site.endpoint[here], here, wanted, begun, begun
            )
            if isinstance(wanted, CreatePartition):
                ownership.claim_name(conn, here, wanted, number, begun)
            return number

        return int(self.site.run(write))

    def finish(self, operation: int, state: str = "done", at: float | None = None) -> float:
        now: float = self.site.tick() if at is None else at
        self.site.run(records.finish_operation, str(operation), state, None, None, now)
        return now

    def delete(self, name: str = "ours", domain: str | None = None, **at: float) -> float:
        """A deletion that the controller reports as done. Returns its time."""
        deletion = DeletePartition(partition_id=1, name=name)
        return self.finish(self.begin(deletion, domain, **at), **at)

    def read(self, *names: str, at: float | None = None, now: float | None = None) -> dict[str, int | None]:
        """The names that are ours after a reading that lists `names`."""
        self.site.partitions[self.domain] = dict.fromkeys(names, frozenset(self.guids))
        reading = self.site.observation(self.domain, at=self.site.tick() if at is None else at)
        moment = self.site.tick() if now is None else now
        self.site.run(ownership.update_owned_partitions, [reading], moment)
        return self.owned()

    def owned(self, domain: str | None = None) -> dict[str, int | None]:
        here = self.domain if domain is None else domain
        return {own.name: own.partition_id for own in self.site.read(ownership.owned_partitions, here)}


@pytest.fixture
def named(small_site: Any, demo: Any) -> Named:
    return Named(small_site, demo)


KEPT = {"ours": None}


def test_a_reading_from_before_the_last_sight_proves_nothing(named: Named) -> None:
    named.finish(named.created)
    seen_at = named.site.tick()
    assert named.read("ours", at=seen_at) == {"ours": 1}
    named.delete()
    for earlier in (seen_at, seen_at - 1.0):
        assert named.read(at=earlier) == {"ours": 1}
    assert named.read() == {}


def test_a_name_is_kept_for_the_whole_of_a_day(named: Named) -> None:
    named.finish(named.created)
    end = named.born + FORGET_NAME_SECONDS
    assert named.read(now=end) == KEPT
    assert named.read(now=end + 1.0) == {}


def test_a_name_is_kept_for_a_day_after_the_last_sight(named: Named) -> None:
    named.finish(named.created)
    seen_at = named.born + FORGET_NAME_SECONDS
    named.site.tick(FORGET_NAME_SECONDS)
    assert named.read("ours", at=seen_at) == {"ours": 1}
    assert named.read(now=seen_at + FORGET_NAME_SECONDS) == KEPT
    assert named.read(now=seen_at + FORGET_NAME_SECONDS + 1.0) == {}


def test_a_reading_as_old_as_the_refusal_shows_that_nothing_was_created(named: Named) -> None:
    answered = named.finish(named.created, "refused")
    assert named.read(at=answered - 0.5) == KEPT
    assert named.read(at=answered) == {}


def test_a_create_without_an_answer_keeps_the_name_for_a_day_and_no_longer(named: Named) -> None:
    named.finish(named.created, "unknown")
    named.site.tick(FORGET_NAME_SECONDS - 100.0)
    named.finish(named.begin(named.create()), "refused")
    end = named.born + FORGET_NAME_SECONDS
    assert named.read(now=end - 1.0) == KEPT, "the first create may be carried out yet"
    assert named.read(now=end) == {}


def test_a_deletion_from_before_the_name_was_claimed_again_proves_nothing(named: Named) -> None:
    named.finish(named.created)
    assert named.read("ours") == {"ours": 1}
    named.delete()
    named.finish(named.begin(named.create()))
    assert named.read() == KEPT


def test_a_deletion_of_the_same_instant_counts(named: Named) -> None:
    named.finish(named.created)
    assert named.read("ours", at=named.born) == {"ours": 1}
    named.delete(at=named.born)
    assert named.read() == {}


def test_a_deletion_of_another_partition_proves_nothing(named: Named) -> None:
    named.finish(named.created)
    assert named.read("ours") == {"ours": 1}
    named.delete("another")
    named.delete("ours", named.other)
    assert named.read() == KEPT


def test_an_unanswered_create_of_another_name_keeps_nothing(named: Named) -> None:
    named.finish(named.created, "refused")
    named.begin(named.create("another"))
    named.begin(named.create(), named.other)
    assert named.read() == {"another": None}


@pytest.mark.parametrize("what", ["domain", "endpoint"])
def test_a_deletion_counts_also_when_the_domain_or_its_endpoint_has_changed(named: Named, what: str) -> None:
    named.finish(named.created)
    assert named.read("ours") == {"ours": 1}
    named.delete()
    if what == "domain":
        change = sa.update(schema.operation).values(domain="the uuid before")
    else:
        change = sa.update(schema.endpoint).values(domain=named.other)
    named.site.run(lambda conn: conn.execute(change))
    assert named.read() == {}


def _release(named: Named, domain: str) -> Any:
    guids = frozenset((named.site.guid(domain, 1, 1), named.site.guid(domain, 1, 0)))
    named.site.partitions[domain]["legacy"] = guids
    named.site.observe(domain)
    order = OperatorOrder("ops", "because", named.site.tick())
    named.site.run(found.release_partition, domain, "legacy", order)
    in_order = sa.select(schema.operation).order_by(schema.operation.c.id.desc())
    row = named.site.read(lambda conn: conn.execute(in_order).first())
    assert (row.kind, row.partition_name, row.state) == ("release-partition", "legacy", "done")
    assert (row.asked_by, row.reason) == ("ops", "because")
    assert (row.domain, row.endpoint_id) == (domain, named.site.endpoint[domain])
    assert row.detail == {"guids": [str(guid) for guid in sorted(guids)]}
    assert (row.started, row.finished) == (order.now, order.now)
    return row


def test_what_an_operator_takes_over_is_recorded_in_full(named: Named) -> None:
    for domain in (named.domain, named.other):
        operation = _release(named, domain)
        (row,) = named.site.read(
            lambda conn, here=domain: conn.execute(
                sa.select(schema.owned_partition).where(
                    schema.owned_partition.c.domain == here, schema.owned_partition.c.name == "legacy"
                )
            ).all()
        )
        assert (row.partition_id, row.seen_at) == (1, operation.observed_at)
        assert (row.operation_id, row.created) == (operation.id, operation.started)


def test_the_removal_of_what_was_released_is_the_order_of_the_operator(named: Named) -> None:
    _release(named, named.other)
    named.begin(DeletePartition(partition_id=1, name="legacy"), named.other)
    named.begin(RemoveGpus(partition_id=1, name="ours", guids=named.guids))
    in_order = sa.select(schema.operation.c.asked_by, schema.operation.c.reason).order_by(
        schema.operation.c.id
    )
    asked = named.site.read(lambda conn: [tuple(row) for row in conn.execute(in_order)])
    assert asked[-2:] == [("ops", "because"), ("demo", "members of logical partition lp changed")]


def test_what_belongs_to_a_tenant_now_is_removed_for_the_tenant(named: Named) -> None:
    """Even if an operator took the partition over, only a released one is removed for an operator."""
    named.finish(named.created)
    asked = sa.update(schema.operation).values(asked_by="ops", reason="because")
    named.site.run(lambda conn: conn.execute(asked))
    last = named.begin(DeletePartition(partition_id=1, name="ours"))
    row = named.site.read(
        lambda conn: conn.execute(sa.select(schema.operation).where(schema.operation.c.id == last)).one()
    )
    assert (row.asked_by, row.reason) == ("demo", "members of logical partition lp changed")


def test_ownership_is_given_up_once_the_outcome_of_every_operation_on_it_was_seen(named: Named) -> None:
    named.finish(named.created)
    with pytest.raises(Rejected, match="not confirmed by an observation yet"):
        named.site.run(ownership.give_up_ownership, named.domain, "ours")
    named.site.observe(named.domain)
    named.begin(named.create("also"))
    named.begin(named.create(), named.other)
    named.site.run(ownership.give_up_ownership, named.domain, "ours")
    assert named.owned() == {"also": None}
    assert named.owned(named.other) == KEPT


def test_a_successor_that_has_the_name_keeps_its_own(named: Named) -> None:
    named.begin(named.create("also"))
    named.begin(named.create(), named.other)
    named.site.run(ownership.copy_ownership, named.domain, named.other)
    assert named.owned() == named.owned(named.other) == {"ours": None, "also": None}
    rows = named.site.read(lambda conn: conn.execute(sa.select(schema.owned_partition)).mappings().all())
    operations = {(row["domain"], row["name"]): row["operation_id"] for row in rows}
    assert operations[named.other, "also"] == operations[named.domain, "also"]
    assert operations[named.other, "ours"] != operations[named.domain, "ours"]


def test_a_second_reading_that_is_older_does_not_take_the_sight_back(named: Named) -> None:
    named.finish(named.created)
    named.read("ours")
    newer = named.site.observation(named.domain, at=named.site.tick())
    older = msgspec.structs.replace(newer, observed_at=named.born)
    seen = sa.select(schema.owned_partition.c.seen_at)
    for readings in ([newer], [older]):
        named.site.run(ownership.update_owned_partitions, readings, named.site.tick())
        assert named.site.read(lambda conn: conn.execute(seen).scalar_one()) == newer.observed_at
