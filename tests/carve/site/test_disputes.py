"""Controllers of one domain that contradict one another: then nothing is known of it, and nothing is done."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.admin import machine_book
from rackloom.carve.plan.values import DeletePartition, GpuHealth, Observation
from rackloom.carve.site import (
    capacity,
    disputes,
    endpoint_registry,
    endpoints,
    events,
    fabric_book,
    history,
    knowledge,
    leases,
    physical_partitions,
    tables,
)
from rackloom.carve.site.disputes import STANDS_SECONDS, Contradicted, Dispute
from rackloom.carve.site.operator_steps import Order

SECOND = "http://second"


class Pair:
    """Two controllers of the domain where an instance has its GPU in a partition."""

    def __init__(self, site: Any, demo: Any) -> None:
        self.site = site
        self.demo = demo
        partition = demo.partition()
        self.instance = demo.instance([(partition, 0)])
        site.converge()
        self.domain, self.slot = demo.where(self.instance)
        self.first = site.endpoint[self.domain]
        site.run(endpoints.register, SECOND, ["CHASSIS9"], site.tick(), site.ids)
        found = {one.url: one.id for one in site.read(fabric_book.endpoints)}
        self.second = found[SECOND]
        self.url = next(url for url, key in found.items() if key == self.first)

    def seen(self, **changed: Any) -> Observation:
        self.site.tick()
        return msgspec.structs.replace(self.site.observation(self.domain), **changed)

    def without_partitions(self) -> Observation:
        return self.seen(partitions=())

    def tell(self, endpoint: str, seen: Observation) -> Dispute | None:
        found: Dispute | None = self.site.run(
            fabric_book.record_observation, endpoint, seen, self.site.tick(0.5)
        )
        return found

    def lose(self, endpoint: str) -> None:
        self.site.run(fabric_book.record_unknown, endpoint, "connection refused", self.site.tick())

    def dispute(self) -> Dispute | None:
        found: Dispute | None = self.site.read(disputes.of_domain, self.domain)
        return found

    def known(self) -> knowledge.Knowledge:
        found: knowledge.Knowledge = self.site.read(knowledge.of_domain, self.domain)
        return found

    def status(self) -> str | None:
        return str(self.demo.status(self.instance))

    def order(self) -> Order:
        return Order("an operator", "test", self.site.tick())


@pytest.fixture
def pair(small_site: Any, demo: Any) -> Pair:
    return Pair(small_site, demo)


def test_two_that_show_the_same_are_one_domain(pair: Pair) -> None:
    assert pair.tell(pair.second, pair.seen()) is None
    assert pair.tell(pair.first, pair.seen()) is None
    assert pair.status() == "Ready"


def test_two_that_do_not_leave_everything_unknown_and_say_who_says_what(pair: Pair) -> None:
    seen = pair.without_partitions()
    dispute = pair.tell(pair.second, seen)
    assert dispute == pair.dispute()
    assert dispute == Dispute(
        pair.domain,
        f"switch controllers {SECOND} and {pair.url} contradict one another: partition 1 has 0 and 1 members",
        seen.observed_at,
    )
    doubt = f"unknown since {knowledge.moment(seen.observed_at)}: {dispute.reason}"
    assert pair.known() == knowledge.Knowledge(None, doubt, seen.observed_at)
    assert pair.status() == "Unknown"
    assert pair.demo.interfaces(pair.instance) == {0: ("Pending", doubt)}
    (newest,) = pair.site.read(history.newest, [pair.instance]).values()
    assert (newest.status, doubt in newest.message) == ("Unknown", True)
    assert list(pair.site.read(physical_partitions.of_domains, [pair.domain])) == []


def test_it_is_unknown_since_it_began_and_not_since_it_was_last_heard(pair: Pair) -> None:
    first = pair.tell(pair.second, pair.without_partitions())
    told = pair.site.read(events.newest, pair.site.tenant.id)
    for endpoint in (pair.first, pair.second, pair.first):
        seen = pair.seen() if endpoint == pair.first else pair.without_partitions()
        assert pair.tell(endpoint, seen) == first
    # Nothing is said twice.
    assert pair.site.read(events.newest, pair.site.tenant.id) == told


def test_it_ends_when_they_agree_and_what_they_show_then_is_taken_over(pair: Pair) -> None:
    pair.tell(pair.second, pair.without_partitions())
    assert pair.tell(pair.first, pair.without_partitions()) is None
    assert pair.dispute() is None
    assert pair.status() == "Configuring"
    pair.tell(pair.first, pair.seen())
    assert pair.tell(pair.second, pair.seen()) is None
    assert pair.status() == "Ready"


def test_it_ends_when_one_of_them_is_deleted(pair: Pair) -> None:
    pair.tell(pair.second, pair.without_partitions())
    pair.site.run(endpoint_registry.delete, "CHASSIS9", pair.order())
    assert pair.dispute() is None
    assert pair.status() == "Ready"


def test_what_the_last_one_showed_meanwhile_is_taken_over_when_the_other_is_deleted(pair: Pair) -> None:
    pair.tell(pair.second, pair.without_partitions())
    guid = pair.site.guid(pair.domain, pair.slot, 0)
    swapped = tuple(
        msgspec.structs.replace(gpu, guid=0xF00D) if gpu.guid == guid else gpu for gpu in pair.seen().gpus
    )
    pair.tell(pair.first, pair.seen(gpus=swapped, partitions=()))
    assert guid in pair.site.read(fabric_book.intent, pair.domain).managed
    pair.site.run(endpoint_registry.delete, "CHASSIS9", pair.order())
    assert pair.dispute() is None
    managed = pair.site.read(fabric_book.intent, pair.domain).managed
    assert 0xF00D in managed
    assert guid not in managed


def test_one_that_is_lost_after_it_contradicted_leaves_the_other_in_doubt_for_a_while(pair: Pair) -> None:
    began = pair.tell(pair.second, pair.without_partitions())
    pair.lose(pair.second)
    assert pair.tell(pair.first, pair.seen()) == began
    assert pair.status() == "Unknown"
    # Nobody can read it: what it said is too old to stand against the other.
    pair.site.tick(STANDS_SECONDS)
    assert pair.tell(pair.first, pair.seen()) is None
    assert pair.status() == "Ready"
    # It comes back, and says the same as before.
    assert pair.tell(pair.second, pair.without_partitions()) is not None
    assert pair.status() == "Unknown"


def test_neither_can_be_read_and_then_only_that_is_told(pair: Pair) -> None:
    pair.tell(pair.second, pair.without_partitions())
    for endpoint in (pair.second, pair.first):
        pair.lose(endpoint)
    assert pair.known().doubt.endswith(": connection refused")


def test_one_that_cannot_be_read_contradicts_nobody(pair: Pair) -> None:
    pair.tell(pair.second, pair.seen())
    pair.lose(pair.second)
    assert pair.tell(pair.first, pair.without_partitions()) is None
    assert pair.known().observation is not None


def test_one_that_nobody_reads_contradicts_nobody(pair: Pair) -> None:
    pair.tell(pair.second, pair.seen())
    pair.site.tick(STANDS_SECONDS)
    assert pair.tell(pair.first, pair.without_partitions()) is None
    assert pair.status() == "Configuring"


def test_one_that_nobody_reads_any_more_ends_a_dispute(pair: Pair) -> None:
    assert pair.tell(pair.second, pair.without_partitions()) is not None
    pair.site.tick(STANDS_SECONDS)
    assert pair.tell(pair.first, pair.seen()) is None
    assert pair.status() == "Ready"


def test_a_reading_from_before_our_own_change_contradicts_nobody(pair: Pair) -> None:
    pair.tell(pair.second, pair.seen())
    (name,) = pair.site.partitions[pair.domain]
    begun = pair.site.run(
        fabric_book.begin_operation,
        pair.site.lease(pair.domain),
        DeletePartition(partition_id=1, name=name),
        pair.site.now,
        pair.site.tick(),
    )
    # While it is under way, either may show the domain before it or after it.
    assert pair.tell(pair.second, pair.without_partitions()) is None
    pair.site.finish(begun)
    assert pair.tell(pair.first, pair.seen()) is None
    assert pair.tell(pair.second, pair.without_partitions()) is not None


def test_hardware_is_compared_whatever_is_under_way(pair: Pair) -> None:
    pair.site.begin_create(pair.domain, pair.demo.partition("other"), "other", frozenset())
    dispute = pair.tell(pair.second, pair.seen(gpus=pair.seen().gpus[4:]))
    assert dispute is not None
    assert f"only {pair.url} lists 4 of the GPUs" in dispute.reason


def test_an_answer_that_comes_late_does_not_end_a_dispute(pair: Pair) -> None:
    partition = pair.demo.partition("other")
    begun = pair.site.begin_create(pair.domain, partition, "other", frozenset())
    pair.tell(pair.second, pair.seen(gpus=pair.seen().gpus[4:], partitions=()))
    pair.site.finish(begun)
    assert pair.tell(pair.first, pair.seen()) is not None


def test_healths_are_measured_and_contradict_nobody(pair: Pair) -> None:
    pair.tell(pair.second, pair.seen())
    pair.site.health[pair.site.guid(pair.domain, pair.slot, 0)] = GpuHealth.DEGRADED
    assert pair.tell(pair.first, pair.seen()) is None
    # Another order of the same is the same.
    assert pair.tell(pair.second, pair.seen(gpus=pair.seen().gpus[::-1])) is None


def test_a_leader_that_moves_to_another_tray_contradicts_nobody(pair: Pair) -> None:
    serial = f"CHASSIS{list(pair.site.endpoint).index(pair.domain)}"
    order = pair.order()
    pair.site.run(endpoint_registry.update, serial, "http://other-tray", order, pair.site.ids)
    assert pair.status() == "Ready"
    moved = next(one for one in pair.site.read(fabric_book.endpoints) if one.url == "http://other-tray")
    assert pair.tell(moved.id, pair.without_partitions()) is None
    assert pair.status() == "Configuring"
    assert pair.tell(moved.id, pair.seen()) is None
    assert pair.status() == "Ready"


def test_no_operation_is_begun_in_a_dispute(pair: Pair) -> None:
    pair.tell(pair.second, pair.without_partitions())
    for endpoint in (pair.first, pair.second):
        until = pair.site.now + 60.0
        lease = pair.site.run(leases.try_acquire, endpoint, "test", pair.site.now, until)
        with pytest.raises(Contradicted, match="contradict one another") as refusal:
            pair.site.run(
                fabric_book.begin_operation,
                lease,
                DeletePartition(partition_id=1, name="whichever"),
                pair.site.now,
                pair.site.tick(),
            )
        assert refusal.value.nearest_fix is not None


def test_another_rack_that_takes_the_uuid_takes_nothing_else(pair: Pair, small_site: Any) -> None:
    other = next(one for one in small_site.endpoint if one != pair.domain)
    seen = msgspec.structs.replace(small_site.observation(other, at=small_site.tick()), domain=pair.domain)
    dispute = pair.tell(small_site.endpoint[other], seen)
    assert dispute is not None
    assert f"only {pair.url} lists 12 of the GPUs; only http://switch/{other} lists 12" in dispute.reason
    machines = small_site.read(lambda conn: conn.execute(tables.machine.select()).all())
    assert {(row.domain, row.missing_since) for row in machines} == {(pair.domain, None), (other, None)}
    # It is itself again.
    small_site.observe(other)
    assert pair.dispute() is None
    assert pair.status() == "Ready"
    assert small_site.read(knowledge.of_domain, other).observation is not None


def test_one_that_showed_the_tray_before_it_went_away_and_is_lost_then_leaves_no_doubt(pair: Pair) -> None:
    pair.tell(pair.second, pair.seen())
    gone = tuple(gpu for gpu in pair.seen().gpus if gpu.slot != (pair.slot + 1) % 3)
    assert pair.tell(pair.first, pair.seen(gpus=gone)) is not None
    pair.lose(pair.second)
    assert pair.dispute() is None
    assert pair.tell(pair.first, pair.seen(gpus=gone)) is None
    assert pair.status() == "Ready"


def test_a_standby_that_shows_nothing_takes_nothing(pair: Pair) -> None:
    for _ in range(2):
        assert pair.tell(pair.second, pair.seen(gpus=(), partitions=())) is None
        assert pair.status() == "Ready"
        assert pair.tell(pair.first, pair.seen()) is None
        assert pair.status() == "Ready"
    # Where nobody lists a GPU, there is none.
    assert pair.tell(pair.first, pair.seen(gpus=(), partitions=())) is None
    assert pair.status() == "Configuring"


def test_the_operations_of_a_domain_are_looked_through_only_where_something_contradicts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disputes, "_CHANGED", None)
    pair.tell(pair.second, pair.seen())
    pair.site.health[pair.site.guid(pair.domain, pair.slot, 0)] = GpuHealth.DEGRADED
    assert pair.tell(pair.first, pair.seen()) is None
    with pytest.raises(sa.exc.ObjectNotExecutableError):
        pair.tell(pair.second, pair.without_partitions())


def test_a_machine_that_only_a_contradicted_controller_shows_is_not_enrolled(pair: Pair) -> None:
    ghosts = tuple(
        msgspec.structs.replace(gpu, guid=gpu.guid + 0xF0000, chassis_serial="GHOST")
        for gpu in pair.seen().gpus
    )
    assert pair.tell(pair.second, pair.seen(gpus=ghosts)) is not None
    enrol(pair)
    assert of_chassis(pair, "GHOST") == []
    # Both show it: then it is there.
    pair.tell(pair.second, pair.seen(gpus=pair.seen().gpus + ghosts))
    assert pair.tell(pair.first, pair.seen(gpus=pair.seen().gpus + ghosts)) is None
    enrol(pair)
    assert {row.domain for row in of_chassis(pair, "GHOST")} == {pair.domain}
    assert {gpu.guid for gpu in ghosts} <= pair.site.read(fabric_book.intent, pair.domain).managed


def enrol(pair: Pair) -> None:
    site = pair.site
    site.run(machine_book.enrol_known, site.site_id, pair.domain, "Ready", site.tick())


def of_chassis(pair: Pair, serial: str) -> list[Any]:
    chosen = tables.machine.select().where(tables.machine.c.chassis_serial == serial)
    return list(pair.site.read(lambda conn: conn.execute(chosen).all()))


def test_a_new_instance_goes_where_no_controllers_contradict(pair: Pair) -> None:
    def room() -> tuple[int, int]:
        views = pair.site.read(capacity.of_domains, [pair.domain], pair.site.tenant.id, None)
        return views[pair.domain].free, views[pair.domain].closed

    pair.site.observe_all()
    assert room() == (2, 0)
    assert pair.tell(pair.second, pair.without_partitions()) is not None
    assert room() == (0, 2)
    new = pair.demo.instance([(pair.demo.partition("other"), 0)])
    assert pair.demo.where(new)[0] != pair.domain


def test_one_that_shows_the_machines_under_another_uuid_does_not_take_them(pair: Pair) -> None:
    other = "00000000-0000-4000-8000-00000000dead"
    pair.tell(pair.first, pair.without_partitions())
    assert pair.status() == "Configuring"
    pair.tell(pair.second, pair.seen(domain=other))
    assert pair.demo.where(pair.instance)[0] == pair.domain
    assert pair.status() == "Configuring"
    # It takes them when the one that speaks for their chassis cannot be read,
    pair.lose(pair.first)
    pair.tell(pair.second, pair.seen(domain=other))
    assert pair.demo.where(pair.instance)[0] == other
    # and gives them back.
    pair.tell(pair.first, pair.seen())
    assert pair.demo.where(pair.instance)[0] == pair.domain


def test_machines_go_when_the_controller_of_their_chassis_lists_none_of_them(pair: Pair) -> None:
    other = "00000000-0000-4000-8000-00000000dead"
    tray = tuple(gpu for gpu in pair.seen().gpus if gpu.slot == pair.slot)
    pair.tell(pair.first, pair.seen(gpus=tray))
    # A tray that is away is nobody else's while the rest of its chassis is there.
    pair.tell(pair.second, pair.seen(domain=other))
    assert {row.domain for row in of_chassis(pair, tray[0].chassis_serial)} == {pair.domain}
    pair.tell(pair.first, pair.seen(gpus=()))
    pair.tell(pair.second, pair.seen(domain=other))
    assert {row.domain for row in of_chassis(pair, tray[0].chassis_serial)} == {other}
