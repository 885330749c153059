"""The cost of a reading in statements: a site has many domains, and each is read every minute."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.reconcile import records


@contextmanager
def counted() -> Iterator[list[str]]:
    statements: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        # Of PostgreSQL the transaction's own, such as the lock that a writer takes, are not counted.
        if statement.lstrip().startswith(("SELECT", "INSERT", "UPDATE", "DELETE")):
            statements.append(statement)

    sa.event.listen(sa.engine.Engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        sa.event.remove(sa.engine.Engine, "before_cursor_execute", note)


@pytest.fixture
def domain(small_site: Any) -> str:
    small_site.observe_all()
    return str(next(iter(small_site.endpoint)))


def test_a_reading_that_repeats_the_last_one_costs_three(small_site: Any, domain: str) -> None:
    with counted() as statements:
        small_site.observe(domain)
    assert len(statements) == 3, statements


def test_a_reading_that_repeats_the_last_one_goes_through_no_table_that_grows(
    small_site: Any, domain: str
) -> None:
    if small_site.read(lambda conn: conn.dialect.name) != "sqlite":
        pytest.skip("PostgreSQL chooses by what its tables hold, and these are small")
    with counted() as statements:
        small_site.observe(domain)

    def scans(conn: sa.Connection) -> list[str]:
        asked = [f"EXPLAIN QUERY PLAN {statement}" for statement in statements]
        plans = [conn.exec_driver_sql(each, ("",) * each.count("?")).all() for each in asked]
        return [row.detail for plan in plans for row in plan if row.detail.startswith("SCAN ")]

    # A store has one site, and the index has only the logical partitions that are being deleted.
    allowed = {"SCAN site", "SCAN logical_partition USING INDEX ix_logical_partition_deleting"}
    assert set(small_site.read(scans)) <= allowed


def test_one_controller_is_compared_with_nobody(small_site: Any, domain: str) -> None:
    small_site.partitions[domain] = {"by hand": frozenset({small_site.guid(domain, 0, 0)})}
    with counted() as statements:
        small_site.observe(domain)
    others = [statement for statement in statements if "domain_dispute" in statement]
    # It is part of the endpoint's query. Nothing in the domain is held, so no other query follows.
    assert len(others) == 1, others


def test_controllers_of_other_domains_cost_nothing(small_site: Any, domain: str) -> None:
    def cost() -> int:
        members = frozenset({small_site.guid(domain, 0, len(small_site.partitions[domain]))})
        small_site.partitions[domain] = {**small_site.partitions[domain], f"hand {members}": members}
        with counted() as statements:
            small_site.observe(domain)
        return len(statements)

    before = cost()
    for number in range(100):
        url, serial = f"http://another-{number}", f"ANOTHER{number}"
        small_site.run(endpoints.register_endpoint, url, [serial], small_site.tick(), small_site.ids)
        (endpoint_id,) = (known.id for known in small_site.read(endpoints.all_endpoints) if known.url == url)
        small_site.run(records.set_endpoint_domain, endpoint_id, f"domain {number}", small_site.tick())
    assert cost() == before
