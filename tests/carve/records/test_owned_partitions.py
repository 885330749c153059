"""Ownership by recorded name: crashes, refusals, late arrivals, and partitions without an owner."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.partitions.ownership import FORGET_NAME_SECONDS, LATE_SECONDS
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import AddGpus, CreatePartition, DeletePartition
from rackloom.errors import Refused


def owned(site: Any, domain: str) -> dict[str, int | None]:
    return {
        partition.name: partition.partition_id for partition in site.read(records.load_intent, domain).owned
    }


def operations(site: Any) -> list[Any]:
    in_order = sa.select(schema.operation).order_by(schema.operation.c.id)
    return list(site.read(lambda conn: conn.execute(in_order).all()))


@pytest.fixture
def begun(small_site: Any, demo: Any) -> Any:
    """A partition with a recorded create. The process died before it recorded an answer."""
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    domain, slot = demo.where(instance_id)
    guids = frozenset({small_site.guid(domain, slot, 0)})
    operation = small_site.begin_create(domain, partition, "ours", guids)
    return domain, partition, instance_id, guids, operation


def test_a_create_is_recorded_before_it_is_asked_for(small_site: Any, begun: Any) -> None:
    domain, partition, *_ = begun
    assert owned(small_site, domain) == {"ours": None}
    (row,) = operations(small_site)
    assert (row.kind, row.state, row.asked_by) == ("create-partition", "pending", "demo")
    assert row.reason == "members of logical partition lp changed"
    assert partition == row.detail["logical_partition"]
    assert all(isinstance(guid, str) for guid in row.detail["guids"])


def test_after_a_crash_the_partition_is_recognised_by_its_name(
    small_site: Any, demo: Any, begun: Any
) -> None:
    domain, _, instance_id, guids, _ = begun
    small_site.partitions[domain] = {"ours": guids}
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": 1}
    assert demo.status(instance_id) == "Ready"
    (row,) = operations(small_site)
    assert row.state == "unknown"


def test_after_a_crash_before_the_fabric_was_asked_the_name_stays_known(small_site: Any, begun: Any) -> None:
    domain, *_ = begun
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": None}


def test_a_late_answer_to_an_interrupted_operation_is_recorded(small_site: Any, begun: Any) -> None:
    domain, *_, operation = begun
    small_site.observe(domain)
    outcome = ("refused", "RESOURCE_EXHAUSTED", "no room")
    small_site.run(records.finish_operation, operation, *outcome, small_site.tick())
    (row,) = operations(small_site)
    assert (row.state, row.code, row.message, row.finished) == (*outcome, small_site.now)


def test_a_refused_create_is_forgotten_once_the_fabric_is_seen_without_it(
    small_site: Any, begun: Any
) -> None:
    domain, *_, operation = begun
    small_site.finish(operation, "refused", "RESOURCE_EXHAUSTED")
    assert owned(small_site, domain) == {"ours": None}
    small_site.observe(domain)
    assert owned(small_site, domain) == {}


def test_a_create_refused_because_the_name_exists_is_recognised(small_site: Any, begun: Any) -> None:
    domain, *_, guids, operation = begun
    small_site.finish(operation, "refused", "PARTITION_NAME_IN_USE")
    small_site.partitions[domain] = {"ours": guids}
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": 1}


@pytest.fixture
def seen(small_site: Any, begun: Any) -> Any:
    """The same, answered, and seen to stand."""
    domain, *_, guids, operation = begun
    small_site.finish(operation)
    small_site.partitions[domain] = {"ours": guids}
    small_site.observe(domain)
    return begun


def delete_ours(site: Any, domain: str, answer: str) -> None:
    wanted = DeletePartition(partition_id=1, name="ours")
    operation = site.run(records.begin_operation, site.lease(domain), wanted, site.now, site.tick())
    site.finish(operation, answer)


def test_a_partition_whose_deletion_was_accepted_and_that_is_gone_is_forgotten(
    small_site: Any, seen: Any
) -> None:
    delete_ours(small_site, seen[0], "done")
    small_site.observe(seen[0])
    assert owned(small_site, seen[0]) == {"ours": 1}, "it is still there"
    small_site.partitions[seen[0]] = {}
    small_site.observe(seen[0])
    assert owned(small_site, seen[0]) == {"ours": None}, "it was seen after that deletion"
    delete_ours(small_site, seen[0], "done")
    small_site.observe(seen[0])
    assert owned(small_site, seen[0]) == {}


def test_a_name_is_kept_while_another_create_of_it_is_without_an_answer(small_site: Any, begun: Any) -> None:
    domain, partition, _, guids, first = begun
    small_site.finish(first, "unknown")
    small_site.finish(small_site.begin_create(domain, partition, "ours", guids), "unknown")
    small_site.partitions[domain] = {"ours": guids}
    small_site.observe(domain)
    delete_ours(small_site, domain, "done")
    small_site.partitions[domain] = {}
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": None}, "the other create may be carried out yet"
    small_site.tick(FORGET_NAME_SECONDS)
    small_site.observe(domain)
    assert owned(small_site, domain) == {}


def test_a_partition_that_a_list_omits_stays_ours(small_site: Any, seen: Any) -> None:
    domain, *_, guids, _ = seen
    small_site.partitions[domain] = {}
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": None}
    small_site.partitions[domain] = {"ours": guids}
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": 1}


@pytest.mark.parametrize("answer", ["refused", "unknown"])
def test_a_deletion_that_was_not_accepted_proves_nothing(small_site: Any, seen: Any, answer: str) -> None:
    delete_ours(small_site, seen[0], answer)
    small_site.partitions[seen[0]] = {}
    small_site.observe(seen[0])
    assert owned(small_site, seen[0]) == {"ours": None}


def test_a_partition_that_nobody_lists_for_a_day_is_forgotten(small_site: Any, seen: Any) -> None:
    small_site.partitions[seen[0]] = {}
    small_site.observe(seen[0])
    small_site.tick(FORGET_NAME_SECONDS)
    small_site.observe(seen[0])
    assert owned(small_site, seen[0]) == {}


def test_a_standby_that_is_left_alone_for_a_day_takes_neither_partitions_nor_machines(
    small_site: Any, demo: Any, seen: Any
) -> None:
    domain, partition, instance_id, *_ = seen
    demo.release(instance_id)
    for _ in range(2):
        small_site.tick(FORGET_NAME_SECONDS)
        nothing = msgspec.structs.replace(small_site.observation(domain), gpus=(), partitions=())
        small_site.run(records.record_observation, small_site.endpoint[domain], nothing, small_site.tick())
        assert owned(small_site, domain) == {"ours": 1}
        assert demo.status(instance_id) == "Terminating"
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": 1}
    (ours,) = small_site.read(records.load_intent, domain).owned
    assert ours.logical_partition == partition
    assert demo.status(instance_id) == "Terminating"


def test_a_machine_is_not_given_away_on_a_reading_without_any_gpu(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    instance_id = demo.instance()
    domain, _ = demo.where(instance_id)
    demo.release(instance_id)
    small_site.tick()
    nothing = msgspec.structs.replace(small_site.observation(domain), gpus=(), partitions=())
    small_site.run(records.record_observation, small_site.endpoint[domain], nothing, small_site.tick())
    assert demo.status(instance_id) == "Terminating"
    small_site.observe(domain)
    assert demo.status(instance_id) is None


def test_a_machine_that_is_away_is_not_given_away_while_a_list_omits_our_partition(
    small_site: Any, demo: Any, seen: Any
) -> None:
    domain, _, instance_id, guids, _ = seen
    demo.release(instance_id)
    small_site.partitions[domain] = {}
    small_site.tick()
    listed = small_site.observation(domain)
    away = tuple(gpu for gpu in listed.gpus if gpu.guid not in guids)
    small_site.run(
        records.record_observation,
        small_site.endpoint[domain],
        msgspec.structs.replace(listed, gpus=away),
        small_site.tick(),
    )
    assert demo.status(instance_id) == "Terminating"
    small_site.observe(domain)
    assert demo.status(instance_id) is None


def test_a_name_is_forgotten_after_a_day_without_a_sign(small_site: Any, begun: Any) -> None:
    domain, *_ = begun
    small_site.observe(domain)
    small_site.tick(FORGET_NAME_SECONDS)
    small_site.observe(domain)
    assert owned(small_site, domain) == {}


def test_partitions_under_other_names_are_nobodys(small_site: Any, begun: Any) -> None:
    domain, *_, guids, _ = begun
    small_site.partitions[domain] = {"theirs": guids}
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": None}


def test_a_deleted_logical_partition_stays_until_its_partitions_are_gone(
    small_site: Any, demo: Any, begun: Any
) -> None:
    domain, partition, instance_id, guids, operation = begun
    small_site.finish(operation)
    small_site.partitions[domain] = {"ours": guids}
    small_site.observe(domain)
    demo.release(instance_id)
    assert demo.drop(partition).domains == {domain}
    small_site.observe(domain)
    assert small_site.row(schema.logical_partition, partition).status == "Deleting"
    intent = small_site.read(records.load_intent, domain)
    assert [partition.name for partition in intent.owned] == ["ours"]
    assert intent.assignments == ()
    small_site.partitions[domain] = {}
    small_site.observe(domain)
    assert small_site.row(schema.logical_partition, partition) is None


def test_a_create_that_lands_after_its_logical_partition_is_gone_is_still_ours(
    small_site: Any, demo: Any, begun: Any
) -> None:
    domain, partition, instance_id, guids, operation = begun
    small_site.finish(operation, "unknown")
    demo.release(instance_id)
    small_site.tick(LATE_SECONDS)
    small_site.observe(domain)
    demo.drop(partition)
    assert small_site.row(schema.logical_partition, partition) is None
    small_site.partitions[domain] = {"ours": guids}
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": 1}


def test_a_name_never_changes_its_meaning(small_site: Any, demo: Any, begun: Any) -> None:
    domain, *_, guids, _ = begun
    second = demo.partition("second")
    with pytest.raises(Refused, match="already stands for another"):
        small_site.begin_create(domain, second, "ours", guids)
    assert len(operations(small_site)) == 1


def test_a_repeated_create_of_the_same_name_is_one_partition(small_site: Any, begun: Any) -> None:
    domain, partition, _, guids, operation = begun
    small_site.finish(operation, "unknown")
    small_site.begin_create(domain, partition, "ours", guids)
    assert owned(small_site, domain) == {"ours": None}


def test_a_name_that_is_claimed_again_is_kept_for_a_day_from_then(small_site: Any, begun: Any) -> None:
    domain, partition, _, guids, operation = begun
    small_site.finish(operation, "unknown")
    small_site.tick(FORGET_NAME_SECONDS - 10.0)
    small_site.finish(small_site.begin_create(domain, partition, "ours", guids), "unknown")
    small_site.tick(20.0)
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": None}, "the first claim is a day old, the second is not"


def test_a_name_that_is_claimed_again_follows_the_newer_create(small_site: Any, begun: Any) -> None:
    domain, partition, _, guids, operation = begun
    small_site.finish(operation, "refused", "RESOURCE_EXHAUSTED")
    small_site.finish(small_site.begin_create(domain, partition, "ours", guids), "done")
    small_site.observe(domain)
    assert owned(small_site, domain) == {"ours": None}, "the first create was refused, the second was not"


def test_the_audit_says_for_whom_and_why(small_site: Any, demo: Any, begun: Any) -> None:
    domain, _, _, guids, _ = begun
    for wanted in (
        AddGpus(partition_id=1, name="ours", guids=tuple(guids)),
        DeletePartition(partition_id=32766, name="Default Partition"),
    ):
        small_site.run(
            records.begin_operation,
            small_site.lease(domain),
            wanted,
            small_site.now,
            small_site.tick(),
        )
    assert [(row.asked_by, row.kind) for row in operations(small_site)][1:] == [
        ("demo", "add-gpus"),
        ("site", "delete-partition"),
    ]


def test_a_plan_that_intent_has_overtaken_is_refused(small_site: Any, demo: Any, begun: Any) -> None:
    domain, _, instance_id, guids, operation = begun
    small_site.finish(operation, "unknown")
    demo.rewire(instance_id, [])
    for wanted in (
        AddGpus(partition_id=1, name="ours", guids=tuple(guids)),
        CreatePartition(name="ours", logical_partition=begun[1], guids=tuple(guids)),
    ):
        with pytest.raises(Refused, match="no longer wanted there; plan again"):
            small_site.run(
                records.begin_operation,
                small_site.lease(domain),
                wanted,
                small_site.now,
                small_site.now,
            )
    assert len(operations(small_site)) == 1


def test_a_machine_is_not_given_away_while_an_operation_may_still_join_its_gpu(
    small_site: Any, demo: Any
) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    domain, slot = demo.where(instance_id)
    operation = small_site.begin_create(
        domain, partition, "ours", frozenset({small_site.guid(domain, slot, 0)})
    )
    demo.release(instance_id)
    # Seen through another endpoint of the same domain, while the first one still waits for its answer.
    other = next(endpoint for name, endpoint in small_site.endpoint.items() if name != domain)
    seen = small_site.observation(domain, at=small_site.tick())
    small_site.run(records.record_observation, other, seen, small_site.tick())
    assert demo.status(instance_id) == "Terminating"
    small_site.finish(operation)
    for endpoint, status in ((other, "Terminating"), (small_site.endpoint[domain], None)):
        seen = small_site.observation(domain, at=small_site.tick())
        small_site.run(records.record_observation, endpoint, seen, small_site.tick())
        assert demo.status(instance_id) == status


def test_a_machine_is_not_given_away_while_an_unanswered_operation_may_be_carried_out_late(
    small_site: Any, demo: Any, begun: Any
) -> None:
    domain, _, instance_id, _, operation = begun
    small_site.finish(operation, "unknown")
    demo.release(instance_id)
    small_site.observe(domain)
    assert demo.status(instance_id) == "Terminating"
    small_site.tick(LATE_SECONDS)
    small_site.observe(domain)
    assert demo.status(instance_id) is None


def test_an_endpoint_never_observed_gets_no_operations(small_site: Any, demo: Any) -> None:
    with pytest.raises(Refused, match="never observed"):
        small_site.begin_create(next(iter(small_site.endpoint)), demo.partition(), "p", frozenset({1}))
