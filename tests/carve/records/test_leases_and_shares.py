"""Which replica reconciles a domain: leases, the limits after a lost one, and shares of the domains."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.reconcile import leases, records
from rackloom.carve.reconcile.records import LeaseLost
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import DeletePartition

LEASE = 5.0
DELETE = DeletePartition(partition_id=32766, name="Default Partition")


@pytest.fixture
def first(small_site: Any) -> str:
    """An endpoint that has been observed."""
    small_site.observe_all()
    return str(next(iter(small_site.endpoint.values())))


def acquire(site: Any, endpoint: str, holder: str) -> Any:
    return site.run(leases.try_acquire_lease, endpoint, holder, site.now, site.now + LEASE)


def begin(site: Any, lease: Any) -> Any:
    return site.run(records.begin_operation, lease, DELETE, site.now, site.now)


def share(site: Any, holder: str) -> set[str]:
    held = site.run(leases.take_share, holder, site.now, site.now + LEASE)
    return {share.endpoint.id for share in held}


def many(site: Any, count: int) -> None:
    """Endpoints that have not answered yet, up to `count` of them."""
    for number in range(2, count):
        site.run(
            endpoints.register_endpoint, f"http://switch/{number}", [f"MORE{number}"], site.now, site.ids
        )


def test_a_lease_is_one_holders_until_it_runs_out(small_site: Any, first: str) -> None:
    assert acquire(small_site, first, "a").epoch == 1
    assert acquire(small_site, first, "b") is None
    small_site.tick(LEASE - 0.1)
    assert acquire(small_site, first, "b") is None
    small_site.tick(0.2)
    assert acquire(small_site, first, "b").epoch == 2
    assert acquire(small_site, first, "a") is None


def test_a_renewed_lease_keeps_its_epoch(small_site: Any, first: str) -> None:
    lease = acquire(small_site, first, "a")
    small_site.tick(4.0)
    small_site.run(leases.renew_leases, "a", [first], small_site.now + LEASE)
    small_site.tick(4.0)
    assert small_site.read(leases.leases_held_by, "a", small_site.now) == {first: lease}
    assert acquire(small_site, first, "b") is None
    begin(small_site, lease)


def test_a_lease_that_ran_out_is_held_no_more_and_is_taken_anew(small_site: Any, first: str) -> None:
    lease = acquire(small_site, first, "a")
    small_site.tick(LEASE)
    assert small_site.read(leases.leases_held_by, "a", small_site.now) == {}
    taken = small_site.run(leases.take_share, "a", small_site.now, small_site.now + LEASE)
    (anew,) = [held.lease for held in taken if held.endpoint.id == first]
    assert anew.epoch > lease.epoch, "another replica may have had it meanwhile"


def test_only_what_is_named_is_renewed_and_no_lease_becomes_shorter(small_site: Any, first: str) -> None:
    (other,) = set(small_site.endpoint.values()) - {first}
    for endpoint in (first, other):
        acquire(small_site, endpoint, "a")
    small_site.run(leases.renew_leases, "a", [first], small_site.now + 1.0)
    small_site.tick(LEASE - 1.0)
    assert set(small_site.read(leases.leases_held_by, "a", small_site.now)) == {first, other}
    small_site.run(leases.renew_leases, "a", [first], small_site.now + LEASE)
    small_site.tick(LEASE - 1.0)
    assert set(small_site.read(leases.leases_held_by, "a", small_site.now)) == {first}


def test_nobody_renews_what_another_has_taken(small_site: Any, first: str) -> None:
    acquire(small_site, first, "a")
    small_site.tick(LEASE + 1)
    acquire(small_site, first, "b")
    small_site.run(leases.renew_leases, "a", [first], small_site.now + 100.0)
    assert small_site.read(leases.leases_held_by, "a", small_site.now) == {}
    small_site.tick(LEASE + 1)
    assert acquire(small_site, first, "c") is not None


def test_a_released_lease_is_free_at_once_and_forbids_what_was_planned_under_it(
    small_site: Any, first: str
) -> None:
    lease = acquire(small_site, first, "a")
    small_site.run(leases.release_leases, "a", [first])
    with pytest.raises(LeaseLost):
        begin(small_site, lease)
    assert acquire(small_site, first, "b").epoch > lease.epoch


def test_nobody_releases_what_another_holds(small_site: Any, first: str) -> None:
    lease = acquire(small_site, first, "b")
    small_site.run(leases.release_leases, "a", [first])
    assert small_site.read(leases.leases_held_by, "b", small_site.now) == {first: lease}
    begin(small_site, lease)


def test_an_operation_is_begun_under_the_newest_lease_only(small_site: Any, first: str) -> None:
    old = acquire(small_site, first, "a")
    small_site.tick(LEASE + 1)
    new = acquire(small_site, first, "b")
    with pytest.raises(LeaseLost):
        begin(small_site, old)
    begin(small_site, new)
    small_site.tick(LEASE + 1)
    # The same holder again is another life of it: what the former one planned is void.
    newest = acquire(small_site, first, "b")
    with pytest.raises(LeaseLost):
        begin(small_site, new)
    begin(small_site, newest)
    with pytest.raises(LeaseLost):
        begin(small_site, msgspec.structs.replace(newest, endpoint_id="no such endpoint"))
    count = sa.select(sa.func.count()).select_from(schema.operation)
    assert small_site.read(lambda conn: conn.execute(count).scalar_one()) == 2


def test_of_two_leases_in_one_domain_that_of_the_smaller_endpoint_counts(small_site: Any) -> None:
    small_site.observe_all()
    first, other = sorted(small_site.endpoint.values())
    small, large = acquire(small_site, first, "a"), acquire(small_site, other, "b")
    for lease in (small, large):
        begin(small_site, lease)  # in separate domains both count
    together = sa.update(schema.endpoint).values(domain=next(iter(small_site.endpoint)))
    small_site.run(lambda conn: conn.execute(together))
    begin(small_site, small)
    with pytest.raises(LeaseLost, match=r"^another replica reconciles this domain now$"):
        begin(small_site, large)
    small_site.tick(LEASE)
    begin(small_site, large)
    both = [acquire(small_site, endpoint, "c") for endpoint in (first, other)]
    for lease in both:
        begin(small_site, lease)


@pytest.mark.slow
def test_of_two_replicas_that_turn_out_to_hold_one_domain_only_one_may_act(small_site: Any) -> None:
    small_site.observe_all()
    domain = next(iter(small_site.endpoint))
    first, other = sorted(small_site.endpoint.values())
    winner, loser = acquire(small_site, first, "a"), acquire(small_site, other, "b")
    begin(small_site, loser)
    for endpoint in (first, other):
        seen = small_site.observation(domain, at=small_site.tick())
        small_site.run(records.record_observation, endpoint, seen, small_site.now)
    with pytest.raises(LeaseLost):
        begin(small_site, loser)
    begin(small_site, winner)
    assert share(small_site, "b") == set()
    small_site.run(leases.release_leases, "b", [other])
    assert share(small_site, "a") == {first, other}


def test_one_replica_has_everything(small_site: Any) -> None:
    assert share(small_site, "a") == set(small_site.endpoint.values())


def test_a_share_that_is_taken_again_is_renewed_and_the_work_under_it_goes_on(small_site: Any) -> None:
    small_site.observe_all()
    taken = small_site.run(leases.take_share, "a", small_site.now, small_site.now + LEASE)
    small_site.tick(LEASE - 1.0)
    assert small_site.run(leases.take_share, "a", small_site.now, small_site.now + LEASE) == taken
    small_site.tick(LEASE - 1.0)
    assert set(small_site.read(leases.leases_held_by, "a", small_site.now)) == set(
        small_site.endpoint.values()
    )
    for held in taken:
        begin(small_site, held.lease)


def test_domains_are_shared_evenly_and_each_has_one_holder(small_site: Any) -> None:
    many(small_site, 7)
    assert len(share(small_site, "a")) == 7
    assert share(small_site, "b") == set()
    kept = share(small_site, "a")
    assert len(kept) == 4
    everything = {endpoint.id for endpoint in small_site.read(endpoints.all_endpoints)}
    small_site.run(leases.release_leases, "a", everything - kept)
    assert share(small_site, "b") == everything - kept
    for _ in range(3):
        small_site.tick()
        assert share(small_site, "a") == kept
        assert share(small_site, "b") == everything - kept


def test_a_silent_replica_is_replaced_once_its_leases_have_run_out(small_site: Any) -> None:
    everything = set(small_site.endpoint.values())
    share(small_site, "a")
    share(small_site, "b")
    small_site.tick(LEASE - 0.5)
    share(small_site, "b")
    small_site.tick(1.0)
    assert share(small_site, "b") == everything
    assert share(small_site, "a") == set()


def test_a_replica_is_replaced_at_the_instant_at_which_its_leases_run_out(small_site: Any) -> None:
    share(small_site, "a")
    small_site.tick(LEASE)
    assert share(small_site, "b") == set(small_site.endpoint.values())


def test_a_replica_that_leaves_is_replaced_at_once(small_site: Any) -> None:
    share(small_site, "a")
    share(small_site, "b")
    small_site.run(leases.leave_replicas, "a")
    assert share(small_site, "b") == set(small_site.endpoint.values())


def test_a_process_that_is_alone_waits_for_nobody(small_site: Any) -> None:
    lasting = float("inf")
    (held, *_) = small_site.run(leases.take_share, "former life", small_site.now, lasting)
    small_site.observe_all()
    small_site.run(leases.start_as_sole_replica)
    with pytest.raises(LeaseLost):
        begin(small_site, held.lease)
    # Also where the name of the holder is the same: what the former life planned is void.
    for holder in ("former life", "alone"):
        assert share(small_site, holder) == set(small_site.endpoint.values())
        with pytest.raises(LeaseLost):
            begin(small_site, held.lease)
        small_site.run(leases.start_as_sole_replica)


def test_a_process_that_is_alone_need_not_write_to_keep_its_share(small_site: Any) -> None:
    forever = float("inf")
    small_site.run(leases.start_as_sole_replica)
    assert small_site.read(leases.share_of_sole_replica, "alone", small_site.now) is None
    taken = small_site.run(leases.take_share, "alone", small_site.now, forever)
    assert small_site.read(leases.share_of_sole_replica, "alone", small_site.tick()) == taken
    many(small_site, 3)
    assert small_site.read(leases.share_of_sole_replica, "alone", small_site.now) is None, (
        "a new one has to be taken"
    )
    small_site.run(leases.start_as_sole_replica)
    assert small_site.read(leases.share_of_sole_replica, "alone", small_site.now) is None
