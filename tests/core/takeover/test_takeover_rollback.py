"""The blockers of a rollback: records that were built on imported records since."""

import msgspec
import pytest
from tests.core.takeover.readings import (
    DOMAIN,
    PARTITION,
    VPC,
    all_guids,
    nico_reading,
    shown_partition,
    site_reading,
    uuid,
)
from tests.core.takeover.test_takeover_planner import here_after

from rackloom.core.takeover.planner import plan_takeover
from rackloom.core.takeover.records import (
    OwnedRecord,
    PauseDomain,
    SettleDomain,
    SiteInstance,
    subject_of_step,
)
from rackloom.core.takeover.rollback import imported_steps, rollback_obstacles

PLAN = plan_takeover(nico_reading(), site_reading())
RECORDED = [step for step in PLAN.steps if not isinstance(step, PauseDomain | SettleDomain)]


def imported_site(**changes):
    site = here_after(PLAN, site_reading())
    return msgspec.structs.replace(site, imported=frozenset(map(subject_of_step, RECORDED)), **changes)


def test_nothing_stands_in_the_way_of_undoing_what_only_the_import_made():
    assert imported_steps(PLAN, imported_site()) == RECORDED
    assert rollback_obstacles(PLAN, imported_site()) == []


def test_what_was_not_imported_is_not_undone():
    assert imported_steps(PLAN, here_after(PLAN, site_reading())) == []


ALL = all_guids(0, 1)


def own_partition(guids=ALL, **changes):
    name = shown_partition(ALL).name
    return shown_partition(
        guids, **({"name": name, "owner": "site", "logical_partition": PARTITION} | changes)
    )


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"partitions": (own_partition(all_guids(0)),)}, "has other GPUs than when it was adopted"),
        ({"partitions": ()}, "has other GPUs than when it was adopted"),
        ({"partitions": (own_partition(), own_partition((), name="rl-1"))}, "partition rl-1"),
        ({"partitions": (), "unreadable": (DOMAIN,)}, "cannot be read"),
    ],
)  # fmt: skip
def test_a_fabric_that_the_site_has_changed_stands_in_the_way(changes, obstacle):
    (found,) = rollback_obstacles(PLAN, imported_site(**changes))
    assert obstacle in found


def test_new_instances_on_imported_records_stand_in_the_way():
    site = imported_site()
    fields = {"id": uuid(900), "org": "acme", "name": "new", "machine": "tray-2"}
    new = SiteInstance(**fields, vpc=VPC, interfaces={0: PARTITION})
    found = rollback_obstacles(PLAN, msgspec.structs.replace(site, instances=(*site.instances, new)))
    assert found == [
        "instance new of acme is in the imported VPC net",
        "instance new of acme uses the imported logical partition train",
    ]


def test_an_imported_instance_that_has_joined_another_partition_since_stands_in_the_way():
    site = imported_site()
    first, *rest = site.instances
    own = OwnedRecord(id=uuid(901), org=first.org, name="own")
    moved = msgspec.structs.replace(first, interfaces={**first.interfaces, 0: own.id})
    changed = msgspec.structs.replace(
        site, instances=(moved, *rest), logical_partitions=(*site.logical_partitions, own)
    )
    assert rollback_obstacles(PLAN, changed) == [
        f"the imported instance {first.name} of {first.org} has joined logical partition own"
    ]
    left = msgspec.structs.replace(site, instances=(msgspec.structs.replace(first, interfaces={}), *rest))
    assert rollback_obstacles(PLAN, left) == []
