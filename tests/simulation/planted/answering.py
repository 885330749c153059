"""Bugs in answers to tenants, and in the work for their requests."""

from itertools import count
from typing import Any

import pytest
import sqlalchemy as sa
from tests.simulation.carving.run import LoadPlan as SimPlan
from tests.simulation.planted.plans import CALM, Bug

from rackloom.carve.api import interfaces as rest_interfaces
from rackloom.carve.store.database import Store
from rackloom.carve.tenancy import instance_creation, instances, logical_partitions


def empty_list_ignored(patch: pytest.MonkeyPatch) -> None:
    update = instances.update_instance

    def lenient(*args: Any, wanted: Any, **fields: Any) -> Any:
        return update(*args, wanted=wanted or None, **fields)

    patch.setattr(instances, "update_instance", lenient)


def retried_write_is_made_twice(patch: pytest.MonkeyPatch) -> None:
    run, number = Store.run, count(1)

    async def impatient(self: Store, fn: Any, *args: Any, **kwargs: Any) -> Any:
        result = await run(self, fn, *args, **kwargs)
        creates = getattr(fn, "__name__", "") == "create" and fn.__module__.endswith(
            (".logical_partitions", ".vpcs")
        )
        if creates and next(number) % 3 == 0:
            again = {**kwargs}
            result = await run(self, fn, *args, **again)
        return result

    patch.setattr(Store, "run", impatient)
    patch.setattr(logical_partitions, "_check_name", lambda *_: None)


def anybodys_logical_partition_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(instance_creation, "_check_logical_partitions", lambda *_: None)


def everybodys_interfaces_listed(patch: pytest.MonkeyPatch) -> None:
    page = rest_interfaces._page

    def of_everybody(conn: sa.Connection, tenant: Any, visible: Any, *rest: Any) -> Any:
        return page(conn, tenant, instances.interface_listing(), *rest)

    patch.setattr(rest_interfaces, "_page", of_everybody)


BUGS: dict[Bug, SimPlan] = {
    empty_list_ignored: CALM,
    retried_write_is_made_twice: CALM,
    anybodys_logical_partition_accepted: CALM,
    everybodys_interfaces_listed: CALM,
}
