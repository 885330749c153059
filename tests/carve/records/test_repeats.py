"""A reading that only repeats the last one costs a query and a written time. Any doubt costs full work."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.carve.store.values import Status
from rackloom.core.partitions.domain import GpuHealth


@pytest.fixture
def domain(small_site: Any, demo: Any) -> str:
    """The domain of an instance that is Ready, seen so twice."""
    partition = demo.partition()
    instance_id = demo.instance([(partition, 0), (partition, 1)])
    small_site.converge()
    small_site.observe_all()
    assert demo.status(instance_id) == "Ready"
    return str(demo.where(instance_id)[0])


def _repeats(site: Any, domain: str) -> bool:
    seen = site.observation(domain, at=site.tick())
    answer: bool = site.read(records.is_unchanged_observation, site.endpoint[domain], seen, site.tick())
    return answer


def _change(site: Any, table: sa.Table, **values: object) -> None:
    site.run(lambda conn: conn.execute(sa.update(table).values(**values)))


def test_at_rest_only_the_time_of_the_observation_grows(small_site: Any, domain: str) -> None:
    assert _repeats(small_site, domain)
    before = small_site.read(latest.latest_of_domain, domain).observation
    small_site.observe(domain)
    after = small_site.read(latest.latest_of_domain, domain).observation
    assert after.observed_at > before.observed_at
    assert msgspec.structs.replace(after, observed_at=before.observed_at) == before


DOUBTS: dict[str, Callable[[Any, str], object]] = {
    "another health": lambda site, domain: site.health.update({site.guid(domain, 2, 0): GpuHealth.DEGRADED}),
    "another partition": lambda site, domain: site.partitions[domain].update({"stranger": frozenset()}),
    "a failed reading": lambda site, domain: site.lose(domain),
    "an unconfirmed operation": lambda site, _: _change(site, schema.operation, observed_after=None),
    "a host that is not ready": lambda site, _: _change(site, schema.machine, status=Status.ERROR),
    "an instance that is not ready": lambda site, _: _change(
        site, schema.instance, status=Status.PROVISIONING
    ),
    "an instance touched since": lambda site, _: _change(site, schema.instance, updated=site.tick()),
    "a site touched since": lambda site, _: _change(site, schema.site, updated=site.tick()),
    "a GUID that a person declared": lambda site, _: _change(site, schema.machine_gpu, source="declared"),
    "a machine of another domain": lambda site, _: _change(site, schema.machine, domain=None),
    "a deletion under way": lambda site, _: _change(site, schema.logical_partition, status=Status.DELETING),
    "a long time": lambda site, _: site.tick(records.FULL_UPDATE_SECONDS),
}


@pytest.mark.slow
@pytest.mark.parametrize("doubt", DOUBTS)
def test_every_doubt_asks_for_the_whole_work(small_site: Any, domain: str, doubt: str) -> None:
    DOUBTS[doubt](small_site, domain)
    assert not _repeats(small_site, domain)


def test_a_status_that_was_forgotten_heals_in_time(small_site: Any, domain: str, demo: Any) -> None:
    """Had some change of the records not been settled, it would not stay so."""
    _change(small_site, schema.owned_partition, logical_partition_id="nobody's")
    small_site.tick(records.FULL_UPDATE_SECONDS)
    small_site.observe(domain)
    assert _interface_statuses(small_site) == {Status.PENDING}


def test_with_a_second_way_to_the_domain_every_reading_is_the_whole_work(
    small_site: Any, domain: str
) -> None:
    _change(small_site, schema.owned_partition, logical_partition_id="nobody's")
    small_site.observe(domain)
    assert _interface_statuses(small_site) == {Status.READY}
    _change(small_site, schema.endpoint, domain=domain)
    small_site.observe(domain)
    assert _interface_statuses(small_site) == {Status.PENDING}


def _interface_statuses(site: Any) -> set[str]:
    return set(
        site.read(lambda conn: conn.execute(sa.select(schema.nvlink_interface.c.status)).scalars().all())
    )
