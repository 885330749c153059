"""No status claims more than the newest observation supports, and each heals by the next good one."""

from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation.latest import UNREADABLE_REASON, rfc3339
from rackloom.carve.reconcile import records
from rackloom.carve.store import journal, schema
from rackloom.carve.tenancy import status as tenancy_status
from rackloom.core.partitions.domain import BlockedGpus, DefaultPartitionPolicy


def members(site: Any, demo: Any, instance: str, devices: range) -> frozenset[int]:
    domain, slot = demo.where(instance)
    return frozenset(site.guid(domain, slot, device) for device in devices)


def test_nothing_is_ready_before_the_fabric_is_seen(small_site: Any, demo: Any) -> None:
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    assert demo.status(instance_id) == "Pending"
    assert demo.interfaces(instance_id) == {
        0: ("Pending", "no switch controller has reported this machine yet")
    }


def test_an_observation_older_than_the_wish_proves_nothing(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    before = small_site.now
    instance_id = demo.instance([(partition, 0)])
    domain, _ = demo.where(instance_id)
    small_site.partitions[domain] = {"p": members(small_site, demo, instance_id, range(1))}
    small_site.begin_create(domain, partition, "p", small_site.partitions[domain]["p"])
    stale = small_site.observation(domain, at=before)
    small_site.run(records.record_observation, small_site.endpoint[domain], stale, small_site.tick())
    status, reason = demo.interfaces(instance_id)[0]
    assert status == "Pending"
    assert "after this was asked for" in str(reason)
    small_site.observe(domain)
    assert demo.interfaces(instance_id)[0] == ("Ready", None)
    assert demo.status(instance_id) == "Ready"


def test_a_partial_instance_is_not_ready_and_says_which_gpu(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0), (partition, 1)])
    domain, _ = demo.where(instance_id)
    small_site.partitions[domain] = {"p": members(small_site, demo, instance_id, range(1))}
    small_site.begin_create(domain, partition, "p", small_site.partitions[domain]["p"])
    small_site.observe(domain)
    assert demo.interfaces(instance_id) == {
        0: ("Ready", None),
        1: ("Pending", "the GPU is in no partition yet"),
    }
    assert demo.status(instance_id) == "Provisioning"
    newest = small_site.read(journal.status_histories, [instance_id])[instance_id][0]
    assert newest.message == "gpu-1: the GPU is in no partition yet"


def test_a_gpu_in_a_partition_of_the_same_name_that_is_not_ours_is_not_ready(
    small_site: Any, demo: Any
) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    domain, _ = demo.where(instance_id)
    small_site.partitions[domain] = {"somebody's": members(small_site, demo, instance_id, range(1))}
    small_site.observe(domain)
    assert demo.interfaces(instance_id)[0] == ("Pending", "the GPU is still in partition 1")


def test_another_tenants_gpu_in_the_partition_takes_readiness_away(
    small_site: Any, demo: Any, rival: Any
) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id, other = demo.instance([(partition, 0)]), rival.instance()
    while rival.where(other)[0] != demo.where(instance_id)[0]:
        other = rival.instance()
    domain, _ = demo.where(instance_id)
    mine = members(small_site, demo, instance_id, range(1))
    small_site.partitions[domain] = {"p": mine | members(small_site, rival, other, range(1))}
    small_site.begin_create(domain, partition, "p", mine)
    small_site.observe(domain)
    assert demo.interfaces(instance_id)[0] == ("Pending", "partition p also holds a GPU of another tenant")
    assert rival.status(other) == "Provisioning"


def test_a_gpu_of_no_machine_takes_readiness_away_while_the_controller_lists_it(
    small_site: Any, demo: Any
) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    domain, _ = demo.where(instance_id)
    strange = small_site.guid(domain, 99, 0)
    mine = members(small_site, demo, instance_id, range(1))
    small_site.partitions[domain] = {"p": mine | {strange}}
    small_site.begin_create(domain, partition, "p", mine)
    seen = small_site.observation(domain, at=small_site.tick())
    listed = msgspec.structs.replace(seen.gpus[0], guid=strange, slot=99)
    seen = msgspec.structs.replace(seen, gpus=(*seen.gpus, listed))
    small_site.run(records.record_observation, small_site.endpoint[domain], seen, small_site.tick())
    assert demo.interfaces(instance_id)[0] == (
        "Pending",
        "partition p also holds a GPU of no machine of this site",
    )
    small_site.observe(domain)
    assert demo.interfaces(instance_id)[0] == ("Ready", None)


def test_an_instance_without_interfaces_waits_until_its_gpus_are_nobody_elses(
    small_site: Any, demo: Any, rival: Any
) -> None:
    small_site.observe_all()
    theirs = rival.partition()
    old = rival.instance([(theirs, 0)])
    domain, _ = rival.where(old)
    small_site.converge()
    new = demo.instance()
    while demo.where(new)[0] != domain:
        new = demo.instance()
    left_behind = frozenset({small_site.guid(*demo.where(new), 2)})
    small_site.partitions[domain]["stale"] = left_behind
    small_site.observe(domain)
    assert demo.status(new) == "Provisioning"
    del small_site.partitions[domain]["stale"]
    small_site.observe(domain)
    assert demo.status(new) == "Ready"


def test_the_kept_default_partition_is_nobody_elses_but_a_condemned_one_is(
    small_site: Any, demo: Any
) -> None:
    small_site.observe_all()
    instance_id = demo.instance()
    domain, _ = demo.where(instance_id)
    small_site.partitions[domain] = {"Default Partition": members(small_site, demo, instance_id, range(4))}
    small_site.observe(domain)
    assert demo.status(instance_id) == "Provisioning"
    small_site.run(
        lambda conn: conn.execute(schema.site.update().values(default_partition=DefaultPartitionPolicy.KEEP))
    )
    small_site.observe(domain)
    assert demo.status(instance_id) == "Ready"


def test_losing_the_fabric_takes_claims_back_and_dates_the_doubt(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    small_site.converge()
    domain, _ = demo.where(instance_id)
    small_site.lose(domain, "connection refused")
    first = small_site.now
    small_site.lose(domain, "still nothing")
    assert demo.status(instance_id) == "Unknown"
    status, reason = demo.interfaces(instance_id)[0]
    assert status == "Pending"
    assert reason == f"unknown since {rfc3339(first)}: {UNREADABLE_REASON}"
    small_site.observe(domain)
    assert demo.status(instance_id) == "Ready"
    assert [row.status for row in small_site.read(journal.status_histories, [instance_id])[instance_id]][
        :3
    ] == [
        "Ready",
        "Unknown",
        "Ready",
    ]


def test_losing_one_domain_leaves_the_other_alone(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    ones = [demo.instance([(partition, 0)]) for _ in range(4)]
    small_site.converge()
    lost = demo.where(ones[0])[0]
    small_site.lose(lost)
    for instance in ones:
        assert demo.status(instance) == ("Unknown" if demo.where(instance)[0] == lost else "Ready")


def test_an_unready_instance_never_turns_unknown_for_having_been_unready(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    instance_id = demo.instance([(demo.partition(), 0)])
    small_site.lose(demo.where(instance_id)[0])
    assert demo.status(instance_id) == "Pending"


def test_a_moved_gpu_is_configuring_until_it_has_arrived(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    first, second = demo.partition("first"), demo.partition("second")
    instance_id = demo.instance([(first, 0), (first, 1)])
    small_site.converge()
    changed = demo.rewire(instance_id, [(first, 0), (second, 1)])
    assert changed.domains == {demo.where(instance_id)[0]}
    assert demo.status(instance_id) == "Configuring"
    rows = small_site.read(
        lambda conn: conn.execute(
            schema.nvlink_interface.select().order_by(schema.nvlink_interface.c.device_instance)
        ).all()
    )
    assert sorted((row.device_instance, row.status) for row in rows) == [
        (0, "Ready"),
        (1, "Deleting"),
        (1, "Pending"),
    ]
    small_site.converge()
    assert demo.status(instance_id) == "Ready"
    assert demo.interfaces(instance_id) == {0: ("Ready", None), 1: ("Ready", None)}


def test_moving_there_and_back_keeps_one_row(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    small_site.converge()
    demo.rewire(instance_id, [])
    demo.rewire(instance_id, [(partition, 0)])
    assert len(demo.interfaces(instance_id)) == 1
    small_site.observe(demo.where(instance_id)[0])
    assert demo.interfaces(instance_id) == {0: ("Ready", None)}


def test_a_released_machine_is_given_away_only_when_seen_empty(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    small_site.converge()
    domain, _ = demo.where(instance_id)
    demo.release(instance_id)
    small_site.observe(domain)
    assert demo.status(instance_id) == "Terminating"
    small_site.lose(domain)
    assert demo.status(instance_id) == "Terminating"
    small_site.partitions[domain] = {}
    small_site.observe(domain)
    assert demo.status(instance_id) is None


def test_an_instance_on_a_machine_never_observed_is_released_at_once(small_site: Any, demo: Any) -> None:
    instance_id = demo.instance([(demo.partition(), 0)])
    assert demo.release(instance_id).domains == frozenset()
    assert demo.status(instance_id) is None


def test_an_older_observation_than_the_recorded_one_is_dropped(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    domain, _ = demo.where(instance_id)
    empty = small_site.observation(domain)
    small_site.converge()
    small_site.run(records.record_observation, small_site.endpoint[domain], empty, small_site.tick())
    assert demo.status(instance_id) == "Ready"


def test_a_reason_that_changes_replaces_the_message_and_not_the_history(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    domain, _ = demo.where(instance_id)
    for before in range(3):
        others = {f"empty {number}": frozenset[int]() for number in range(before)}
        small_site.partitions[domain] = others | {"strange": members(small_site, demo, instance_id, range(1))}
        small_site.observe(domain)
    entries = small_site.read(journal.status_histories, [instance_id])[instance_id]
    assert [row.status for row in entries] == ["Provisioning", "Pending"]
    assert entries[0].message == "gpu-0: the GPU is still in partition 3"
    assert entries[0].updated > entries[0].created


def host_says(site: Any, demo: Any, instance: str, status: str) -> None:
    host, domain = site.row(schema.instance, instance).machine_id, demo.where(instance)[0]
    change = sa.update(schema.machine).where(schema.machine.c.id == host).values(status=status)
    site.run(lambda conn: conn.execute(change) and None)
    site.run(tenancy_status.update_statuses, domain, site.tick())


def test_an_instance_is_ready_only_while_its_host_is(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    instance_id = demo.instance([(demo.partition(), 0)])
    small_site.converge()
    assert demo.status(instance_id) == "Ready"
    host_says(small_site, demo, instance_id, "Error")
    assert demo.status(instance_id) == "Configuring"
    assert demo.interfaces(instance_id)[0] == ("Ready", None)
    assert (
        small_site.read(journal.status_histories, [instance_id])[instance_id][0].message
        == "the host is Error"
    )
    host_says(small_site, demo, instance_id, "Unknown")
    assert (
        small_site.read(journal.status_histories, [instance_id])[instance_id][0].message
        == "the host is Unknown"
    )
    host_says(small_site, demo, instance_id, "Ready")
    assert demo.status(instance_id) == "Ready"


def test_a_tenant_is_told_what_stands_in_the_way(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    instance_id = demo.instance([(demo.partition(), 0)])
    domain, slot = demo.where(instance_id)
    small_site.observe(domain)
    reason = BlockedGpus(
        guids=(small_site.guid(domain, slot, 0),), reason="the domain is full", fix="make room"
    )
    small_site.run(records.record_blocked, domain, [reason], small_site.tick())
    message = "the GPU is in no partition yet: the domain is full"
    assert demo.interfaces(instance_id)[0] == ("Pending", message)
    assert (
        small_site.read(journal.status_histories, [instance_id])[instance_id][0].message
        == f"gpu-0: {message}"
    )
    small_site.converge()
    assert demo.interfaces(instance_id)[0] == ("Ready", None)
