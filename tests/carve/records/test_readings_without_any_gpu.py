"""A controller that lists no GPU of a domain in which GPUs are recorded has not been read."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import latest
from rackloom.carve.partitions.ownership import FORGET_NAME_SECONDS
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema

NEW = "00000000-0000-4000-8000-0000000000ee"


def tell_nothing(site: Any, speaks_for: str, **changed: Any) -> float:
    """The domain's only controller lists neither GPUs nor partitions. Returns the time of the record."""
    seen = msgspec.structs.replace(
        site.observation(speaks_for, at=site.tick()), gpus=(), partitions=(), **changed
    )
    now: float = site.tick()
    assert site.run(records.record_observation, site.endpoint[speaks_for], seen, now) is None
    return now


@pytest.fixture
def held(small_site: Any, demo: Any) -> Any:
    """An instance with its GPU in its partition, and its domain."""
    instance_id = demo.instance([(demo.partition(), 0)])
    small_site.converge()
    assert demo.status(instance_id) == "Ready"
    return instance_id, demo.where(instance_id)[0]


def test_a_lone_controller_that_lists_none_makes_its_domain_unknown_since_then(
    small_site: Any, demo: Any, held: Any
) -> None:
    instance_id, domain = held
    since = tell_nothing(small_site, domain)
    tell_nothing(small_site, domain)
    known = small_site.read(latest.latest_of_domain, domain)
    assert (known.observation, known.unknown_since) == (None, since)
    assert known.operators_doubt.endswith(": the switch controller lists no GPU where 12 are recorded")
    assert known.doubt.endswith(latest.UNREADABLE_REASON)
    assert demo.status(instance_id) == "Unknown"
    small_site.observe(domain)
    assert demo.status(instance_id) == "Ready"


def test_nothing_is_released_forgotten_or_missed_by_it(small_site: Any, demo: Any, held: Any) -> None:
    instance_id, domain = held
    before = small_site.read(records.load_intent, domain)
    demo.release(instance_id)
    tell_nothing(small_site, domain)
    small_site.tick(2 * FORGET_NAME_SECONDS)
    tell_nothing(small_site, domain)
    after = small_site.read(records.load_intent, domain)
    assert (after.owned, after.managed) == (before.owned, before.managed)
    assert demo.status(instance_id) == "Terminating"
    away = sa.select(schema.machine.c.id).where(schema.machine.c.missing_since.is_not(None))
    assert small_site.read(lambda conn: conn.execute(away).all()) == []


def test_a_domain_without_records_may_be_empty(small_site: Any) -> None:
    """As of a rack that is being put up: nothing is expected of it yet."""
    domain = next(iter(small_site.endpoint))
    for wanted in (domain, NEW):
        tell_nothing(small_site, domain, domain=wanted)
        known = small_site.read(latest.latest_of_domain, wanted)
        assert known.observation is not None
        assert (known.observation.gpus, known.doubt) == ((), "")


def test_an_empty_domain_whose_machines_come_is_known_all_along(small_site: Any) -> None:
    domain = next(iter(small_site.endpoint))
    tell_nothing(small_site, domain)
    small_site.observe(domain)
    known = small_site.read(latest.latest_of_domain, domain)
    assert known.observation is not None
    assert len(known.observation.gpus) == 12


def test_one_that_takes_the_place_of_another_is_of_its_domain_before_it_lists_any(pair: Any) -> None:
    chassis = f"CHASSIS{list(pair.site.endpoint).index(pair.domain)}"
    pair.site.run(endpoints.delete_chassis_endpoint, chassis, pair.order())
    assert pair.record(pair.second, pair.seen(gpus=(), partitions=())) is None
    assert pair.site.row(schema.endpoint, pair.second).domain == pair.domain
    assert pair.known().operators_doubt.endswith("lists no GPU where 12 are recorded")
    assert pair.status() == "Unknown"
    pair.record(pair.second, pair.seen())
    assert pair.status() == "Ready"


def give_up_the_first(pair: Any, how: str) -> None:
    if how == "deleted":
        chassis = f"CHASSIS{list(pair.site.endpoint).index(pair.domain)}"
        pair.site.run(endpoints.delete_chassis_endpoint, chassis, pair.order())
    else:
        pair.record(pair.first, pair.seen(gpus=(), partitions=(), domain=NEW))


@pytest.mark.parametrize("how", ["deleted", "of another domain"])
def test_what_a_standby_showed_before_it_was_alone_is_no_reading_either(pair: Any, how: str) -> None:
    pair.record(pair.second, pair.seen(gpus=(), partitions=()))
    owned = pair.site.read(records.load_intent, pair.domain).owned
    give_up_the_first(pair, how)
    known = pair.known()
    assert known.observation is None
    assert known.unknown_since is not None
    assert known.operators_doubt.endswith("lists no GPU where 12 are recorded")
    assert pair.status() == "Unknown"
    assert pair.site.read(records.load_intent, pair.domain).owned == owned
    pair.record(pair.second, pair.seen(gpus=(), partitions=()))
    assert pair.status() == "Unknown"
    pair.record(pair.second, pair.seen())
    assert pair.status() == "Ready"


def test_a_standby_is_not_lost_while_another_one_has_listed_gpus(pair: Any) -> None:
    pair.record(pair.second, pair.seen(gpus=(), partitions=()))
    pair.lose(pair.first)
    since = pair.known().unknown_since
    pair.record(pair.second, pair.seen(gpus=(), partitions=()))
    assert pair.known().unknown_since == since
    lost = sa.select(schema.observation.c.endpoint_id).where(schema.observation.c.unknown_since.is_not(None))
    assert pair.site.read(lambda conn: conn.execute(lost).scalars().all()) == [pair.first]


def test_what_is_outdated_is_found_without_decoding_what_was_read(pair: Any) -> None:
    """In a domain with two controllers, one of which lists no GPU."""
    outdated_from = pair.site.now + 1000.0
    known = pair.site.read(latest.latest_of_domain, pair.domain, outdated_from)
    assert known.observation is None
    undecodable = sa.update(schema.observation).values(facts=sa.literal("x") + schema.observation.c.facts)
    pair.site.run(lambda conn: conn.execute(undecodable) and None)
    assert pair.site.read(latest.outdated_domains, outdated_from)[pair.domain] == known


def test_a_reading_without_gpus_is_recognised_in_its_encoded_form(pair: Any) -> None:
    """Also beside texts that look like it."""
    listed = sa.select(latest.LISTS_GPUS).where(schema.observation.c.endpoint_id == pair.second)
    for gpus, lists in ((), False), (pair.site.observation(pair.domain).gpus, True):
        seen = msgspec.structs.replace(
            pair.site.observation(pair.domain), domain='x "gpus":[] y', gpus=gpus, partitions=()
        )
        pair.site.run(latest.save_reading, pair.second, seen)
        assert bool(pair.site.read(lambda conn: conn.execute(listed).scalar_one())) is lists
