"""Which readings count in a dispute: of the present, after our last change, and of hardware."""

from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import conflicts, latest
from rackloom.carve.observation.latest import READING_VALID_SECONDS
from rackloom.carve.reconcile import records
from rackloom.core.partitions.domain import DeletePartition, GpuHealth

OTHER = "00000000-0000-4000-8000-00000000dead"


def test_one_that_is_lost_after_it_contradicted_leaves_the_other_in_doubt_for_a_while(pair: Any) -> None:
    began = pair.record(pair.second, pair.without_partitions())
    pair.lose(pair.second)
    assert pair.record(pair.first, pair.seen()) == began
    assert pair.status() == "Unknown"
    # It can't be read: its last reading is too old to stand against the other.
    pair.site.tick(READING_VALID_SECONDS)
    assert pair.record(pair.first, pair.seen()) is None
    assert pair.status() == "Ready"
    # It comes back with the same reading as before.
    assert pair.record(pair.second, pair.without_partitions()) is not None
    assert pair.status() == "Unknown"


def test_neither_can_be_read_and_then_only_that_is_told(pair: Any) -> None:
    pair.record(pair.second, pair.without_partitions())
    for endpoint in (pair.second, pair.first):
        pair.lose(endpoint)
    assert pair.known().operators_doubt.endswith(": connection refused")


def test_one_that_cannot_be_read_contradicts_nobody(pair: Any) -> None:
    pair.record(pair.second, pair.seen())
    pair.lose(pair.second)
    assert pair.record(pair.first, pair.without_partitions()) is None
    assert pair.known().observation is not None


def test_one_that_nobody_reads_contradicts_nobody(pair: Any) -> None:
    pair.record(pair.second, pair.seen())
    pair.site.tick(READING_VALID_SECONDS)
    assert pair.record(pair.first, pair.without_partitions()) is None
    assert pair.status() == "Configuring"


def test_one_that_nobody_reads_any_more_ends_a_dispute(pair: Any) -> None:
    assert pair.record(pair.second, pair.without_partitions()) is not None
    pair.site.tick(READING_VALID_SECONDS)
    pair.lose(pair.second)
    assert pair.record(pair.first, pair.seen()) is None
    assert pair.status() == "Ready"


@pytest.mark.parametrize("domain", [None, OTHER])
def test_a_time_in_which_nobody_read_anything_ends_no_dispute(pair: Any, domain: str | None) -> None:
    changes = {"domain": domain} if domain else {"partitions": ()}
    began = pair.record(pair.second, pair.seen(**changes))
    pair.site.tick(2 * READING_VALID_SECONDS)
    again = pair.record(pair.second, pair.seen(**changes))
    assert again == began
    assert (pair.home(), pair.status()) == (pair.domain, "Unknown")
    # It was not lost, so it counts until it is read again.
    pair.record(pair.second, pair.seen())
    assert pair.record(pair.first, pair.seen()) is None
    assert pair.site.read(conflicts.conflicts_by_domain) == {}
    assert pair.status() == "Ready"


def test_a_standby_that_is_lost_later_does_not_move_the_beginning_of_the_doubt(pair: Any) -> None:
    pair.record(pair.second, pair.seen(gpus=(), partitions=()))
    pair.lose(pair.first)
    began = pair.known()
    pair.site.tick(60.0)
    pair.lose(pair.second)
    assert pair.known() == began


def test_a_reading_from_before_our_own_change_contradicts_nobody(pair: Any) -> None:
    pair.record(pair.second, pair.seen())
    (name,) = pair.site.partitions[pair.domain]
    begun = pair.site.run(
        records.begin_operation,
        pair.site.lease(pair.domain),
        DeletePartition(partition_id=1, name=name),
        pair.site.now,
        pair.site.tick(),
    )
    # While it is under way, either may show the domain before it or after it.
    assert pair.record(pair.second, pair.without_partitions()) is None
    pair.site.finish(begun)
    assert pair.record(pair.first, pair.seen()) is None
    assert pair.record(pair.second, pair.without_partitions()) is not None


def test_hardware_is_compared_whatever_is_under_way(pair: Any) -> None:
    pair.site.begin_create(pair.domain, pair.demo.partition("other"), "other", frozenset())
    dispute = pair.record(pair.second, pair.seen(gpus=pair.seen().gpus[4:]))
    assert dispute is not None
    assert f"only {pair.url} lists 4 of the GPUs" in dispute.reason


def test_an_answer_that_comes_late_does_not_end_a_dispute(pair: Any) -> None:
    partition = pair.demo.partition("other")
    begun = pair.site.begin_create(pair.domain, partition, "other", frozenset())
    pair.record(pair.second, pair.seen(gpus=pair.seen().gpus[4:], partitions=()))
    pair.site.finish(begun)
    assert pair.record(pair.first, pair.seen()) is not None


def test_healths_are_measured_and_contradict_nobody(pair: Any) -> None:
    pair.record(pair.second, pair.seen())
    pair.site.health[pair.site.guid(pair.domain, pair.slot, 0)] = GpuHealth.DEGRADED
    assert pair.record(pair.first, pair.seen()) is None
    # Another order of the same is the same.
    assert pair.record(pair.second, pair.seen(gpus=pair.seen().gpus[::-1])) is None


def test_a_leader_that_moves_to_another_tray_contradicts_nobody(pair: Any) -> None:
    serial = f"CHASSIS{list(pair.site.endpoint).index(pair.domain)}"
    order = pair.order()
    pair.site.run(endpoints.update_chassis_endpoint, serial, "http://other-tray", order, pair.site.ids)
    assert pair.status() == "Ready"
    moved = next(
        endpoint
        for endpoint in pair.site.read(endpoints.all_endpoints)
        if endpoint.url == "http://other-tray"
    )
    assert pair.record(moved.id, pair.without_partitions()) is None
    assert pair.status() == "Configuring"
    assert pair.record(moved.id, pair.seen()) is None
    assert pair.status() == "Ready"


def test_one_that_showed_the_tray_before_it_went_away_and_is_lost_then_leaves_no_doubt(pair: Any) -> None:
    pair.record(pair.second, pair.seen())
    gone = tuple(gpu for gpu in pair.seen().gpus if gpu.slot != (pair.slot + 1) % 3)
    assert pair.record(pair.first, pair.seen(gpus=gone)) is not None
    pair.lose(pair.second)
    assert pair.dispute() is None
    assert pair.record(pair.first, pair.seen(gpus=gone)) is None
    assert pair.status() == "Ready"


def test_a_standby_that_shows_nothing_takes_nothing(pair: Any) -> None:
    for _ in range(2):
        assert pair.record(pair.second, pair.seen(gpus=(), partitions=())) is None
        assert pair.status() == "Ready"
        assert pair.record(pair.first, pair.seen()) is None
        assert pair.status() == "Ready"
    # If no controller lists a recorded GPU, its state is unknown.
    assert pair.record(pair.first, pair.seen(gpus=(), partitions=())) is None
    assert pair.status() == "Unknown"


def test_a_standby_does_not_say_that_all_is_gone_when_the_leader_is_lost(pair: Any) -> None:
    pair.record(pair.second, pair.seen(gpus=(), partitions=()))
    pair.lose(pair.first)
    known = pair.site.read(latest.latest_of_domain, pair.domain)
    assert known.observation is None
    assert known.unknown_since is not None
    pair.record(pair.second, pair.seen(gpus=(), partitions=()))
    assert pair.site.read(latest.latest_of_domain, pair.domain) == known
    pair.record(pair.second, pair.seen())
    assert pair.status() == "Ready"


def test_the_operations_of_a_domain_are_looked_through_only_where_something_contradicts(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflicts, "_LAST_CHANGE", None)
    pair.record(pair.second, pair.seen())
    pair.site.health[pair.site.guid(pair.domain, pair.slot, 0)] = GpuHealth.DEGRADED
    assert pair.record(pair.first, pair.seen()) is None
    with pytest.raises(sa.exc.ObjectNotExecutableError):
        pair.record(pair.second, pair.without_partitions())
