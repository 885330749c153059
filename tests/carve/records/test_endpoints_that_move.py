"""Switch controllers that get another address, or lose their chassis to another controller."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.partitions import intent
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.carve.store.journal import OperatorOrder
from rackloom.core.partitions.domain import DeletePartition


def register(site: Any, url: str, *serials: str) -> None:
    site.run(endpoints.register_endpoint, url, serials, site.tick(), site.ids)


def known(site: Any) -> dict[str, Any]:
    return {endpoint.url: endpoint for endpoint in site.read(endpoints.all_endpoints)}


def unanswered(site: Any) -> list[str]:
    pending = sa.select(schema.operation.c.endpoint_id).where(schema.operation.c.state == "pending")
    return list(site.read(lambda conn: conn.execute(pending).scalars().all()))


@pytest.fixture
def domain(small_site: Any) -> str:
    """The domain of CHASSIS0, observed like the other one."""
    small_site.observe_all()
    return str(next(iter(small_site.endpoint)))


def test_a_chassis_whose_controller_moved_keeps_its_endpoint(small_site: Any, domain: str) -> None:
    register(small_site, "http://moved", "CHASSIS0")
    found = known(small_site)
    assert len(found) == 2
    assert found["http://moved"].id == small_site.endpoint[domain]
    assert found["http://moved"].domain == domain


def test_a_chassis_that_is_added_joins_the_endpoint(small_site: Any) -> None:
    register(small_site, "http://moved", "CHASSIS0", "NEW")
    assert known(small_site)["http://moved"].chassis_serials == ("CHASSIS0", "NEW")
    assert len(known(small_site)) == 2


def test_an_endpoint_that_keeps_a_chassis_keeps_its_address(small_site: Any) -> None:
    register(small_site, "http://pair", "CHASSIS2", "CHASSIS3")
    register(small_site, "http://single", "CHASSIS3")
    found = known(small_site)
    assert found["http://pair"].chassis_serials == ("CHASSIS2",)
    assert found["http://single"].chassis_serials == ("CHASSIS3",)


def test_an_endpoint_without_a_chassis_is_not_spoken_to_any_more(
    small_site: Any, demo: Any, domain: str
) -> None:
    instance_id = demo.instance()
    mine = demo.where(instance_id)[0]
    small_site.observe(mine)
    assert demo.status(instance_id) == "Ready"
    serial, other = (f"CHASSIS{list(small_site.endpoint).index(mine)}", "CHASSIS9")
    register(small_site, "http://else", other)
    register(small_site, "http://else", other, serial)
    assert small_site.endpoint[mine] not in {found.id for found in known(small_site).values()}
    # The old one's readings no longer count, and the new one has not answered.
    assert demo.status(instance_id) == "Unknown"
    again = known(small_site)["http://else"].id
    seen = small_site.observation(mine, at=small_site.tick())
    small_site.run(records.record_observation, again, seen, small_site.tick())
    assert demo.status(instance_id) == "Ready"


def test_what_a_retired_endpoint_left_open_is_closed_by_its_successor(
    small_site: Any, demo: Any, domain: str
) -> None:
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0)])
    mine, slot = demo.where(instance_id)
    small_site.begin_create(mine, partition, "ours", frozenset({small_site.guid(mine, slot, 0)}))
    serial = f"CHASSIS{list(small_site.endpoint).index(mine)}"
    register(small_site, "http://else", "CHASSIS9")
    register(small_site, "http://else", "CHASSIS9", serial)
    successor = known(small_site)["http://else"].id
    assert unanswered(small_site) == [successor]
    seen = small_site.observation(mine, at=small_site.tick())
    small_site.run(records.record_observation, successor, seen, small_site.tick())
    assert unanswered(small_site) == []


def test_an_endpoint_that_gets_its_chassis_back_is_spoken_to_again(small_site: Any, domain: str) -> None:
    old = next(url for url, endpoint in known(small_site).items() if endpoint.domain == domain)
    register(small_site, "http://else", "CHASSIS9")
    register(small_site, "http://else", "CHASSIS9", "CHASSIS0")
    register(small_site, old, "CHASSIS0")
    assert known(small_site)[old].id == small_site.endpoint[domain]
    assert known(small_site)[old].domain is None


def test_a_look_that_ends_after_its_endpoint_was_given_up_teaches_nothing(
    small_site: Any, demo: Any, domain: str
) -> None:
    instance_id = demo.instance()
    mine = demo.where(instance_id)[0]
    small_site.observe(mine)
    late = small_site.observation(mine, at=small_site.tick())
    given_up = small_site.endpoint[mine]
    order = OperatorOrder("an operator", "test", small_site.tick())
    small_site.run(
        endpoints.delete_chassis_endpoint, f"CHASSIS{list(small_site.endpoint).index(mine)}", order
    )
    for record, seen in ((records.record_observation, late), (records.record_unreadable, "gone")):
        small_site.run(record, given_up, seen, small_site.tick())
        assert small_site.row(schema.endpoint, given_up).domain is None
        assert demo.status(instance_id) == "Unknown"


RENAMED = "00000000-0000-4000-8000-00000000beef"


def answers_as(site: Any, domain: str, other: str, *, without: frozenset[int] = frozenset()) -> None:
    """The controller of `domain` is read, and names itself `other`. GPUs `without` are away."""
    site.tick()
    seen = site.observation(domain)
    gpus = tuple(gpu for gpu in seen.gpus if gpu.guid not in without)
    renamed = msgspec.structs.replace(seen, domain=other, gpus=gpus)
    site.run(records.record_observation, site.endpoint[domain], renamed, site.tick())


@pytest.fixture
def joined(small_site: Any, demo: Any, domain: str) -> Any:
    """An instance with its first GPU in its partition, and its domain."""
    instance_id = demo.instance([(demo.partition(), 0)])
    small_site.converge()
    assert demo.status(instance_id) == "Ready"
    return instance_id, demo.where(instance_id)[0]


def test_a_domain_under_another_uuid_keeps_what_was_made_in_it(
    small_site: Any, demo: Any, joined: Any
) -> None:
    instance_id, mine = joined
    before = small_site.read(records.load_intent, mine)
    answers_as(small_site, mine, RENAMED)
    after = small_site.read(records.load_intent, RENAMED)
    assert (after.owned, after.assignments, after.managed) == (
        before.owned,
        before.assignments,
        before.managed,
    )
    assert demo.status(instance_id) == "Ready"
    assert small_site.read(records.load_intent, mine).owned == ()


def test_a_machine_that_is_away_while_its_domain_is_renamed_follows(
    small_site: Any, demo: Any, joined: Any
) -> None:
    instance_id, mine = joined
    slot = demo.where(instance_id)[1]
    away = frozenset(small_site.guid(mine, slot, device) for device in range(4))
    answers_as(small_site, mine, RENAMED, without=away)
    assert demo.where(instance_id)[0] == RENAMED
    assert [owned.name for owned in small_site.read(records.load_intent, RENAMED).owned]


def test_a_paused_domain_stays_paused_under_another_uuid(small_site: Any, joined: Any) -> None:
    mine = joined[1]
    small_site.run(intent.pause_domain, mine, OperatorOrder("operator", "firmware", small_site.tick()))
    answers_as(small_site, mine, RENAMED)
    assert small_site.read(records.load_intent, RENAMED).paused == "firmware"


def test_a_released_machine_waits_for_its_gpus_under_another_uuid(
    small_site: Any, demo: Any, joined: Any
) -> None:
    instance_id, mine = joined
    demo.release(instance_id)
    answers_as(small_site, mine, RENAMED)
    assert demo.status(instance_id) == "Terminating"
    small_site.partitions[mine] = {}
    answers_as(small_site, mine, RENAMED)
    assert demo.status(instance_id) is None


def test_a_create_without_an_answer_is_remembered_under_another_uuid(
    small_site: Any, demo: Any, joined: Any
) -> None:
    mine = joined[1]
    (owned,) = small_site.read(records.load_intent, mine).owned
    guids = small_site.partitions[mine][owned.name]
    again = small_site.begin_create(mine, owned.logical_partition, owned.name, guids)
    small_site.finish(again, "unknown")
    answers_as(small_site, mine, RENAMED)
    wanted = DeletePartition(partition_id=1, name=owned.name)
    begun = small_site.run(
        records.begin_operation, small_site.lease(mine), wanted, small_site.now, small_site.tick()
    )
    small_site.finish(begun)
    small_site.partitions[mine] = {}
    answers_as(small_site, mine, RENAMED)
    assert [partition.name for partition in small_site.read(records.load_intent, RENAMED).owned] == [
        owned.name
    ]
