"""A tenant with a logical partition and a network on the small site."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import conflicts, latest
from rackloom.carve.observation.conflicts import ControllerConflict
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.values import InterfaceSpec
from rackloom.carve.tenancy import instance_creation, instances, logical_partitions
from rackloom.carve.tenancy.instance_creation import InstanceRequest
from rackloom.carve.tenancy.logical_partitions import NewLogicalPartition, NewVpc
from rackloom.core.partitions.domain import DomainObservation


class Tenancy:
    """Record functions, called for one tenant."""

    def __init__(self, site: Any, tenant: Any) -> None:
        self.site = site
        self.tenant = tenant
        self._count = 0
        self.vpc_id = self.vpc()

    def vpc(self, default: str | None = None) -> str:
        self._count += 1
        made: str = self.site.run(
            logical_partitions.create_vpc,
            self.tenant.id,
            NewVpc(site_id=self.site.site_id, name=f"vpc {self._count}", logical_partition_id=default),
            now=self.site.tick(),
            ids=self.site.ids,
        )
        return made

    def partition(self, name: str = "lp") -> str:
        made: str = self.site.run(
            logical_partitions.create_logical_partition,
            self.tenant.id,
            NewLogicalPartition(self.site.site_id, name),
            now=self.site.tick(),
            ids=self.site.ids,
        )
        return made

    def instance(self, specs: Sequence[tuple[str, int]] = ()) -> str:
        self._count += 1
        request = InstanceRequest(
            names=(f"instance {self._count}",),
            vpc_id=self.vpc_id,
            instance_type_id=self.site.type_id,
            interfaces=tuple(InterfaceSpec(*spec) for spec in specs),
        )
        made = self.site.run(
            instance_creation.create_instances, self.tenant, request, self.site.tick(), self.site.ids
        )
        new: str = made.value[0]
        return new

    def rewire(self, instance: str, specs: Sequence[tuple[str, int]]) -> Any:
        return self.site.run(
            instances.update_instance,
            self.tenant.id,
            instance,
            name=None,
            description=None,
            wanted=[InterfaceSpec(*spec) for spec in specs],
            extra={},
            now=self.site.tick(),
            ids=self.site.ids,
        )

    def release(self, instance: str) -> Any:
        return self.site.run(instances.delete_instance, self.tenant.id, instance, self.site.tick())

    def drop(self, partition: str) -> Any:
        return self.site.run(
            logical_partitions.delete_logical_partition, self.tenant.id, partition, self.site.tick()
        )

    def status(self, instance: str) -> str | None:
        row = self.site.row(schema.instance, instance)
        return None if row is None else str(row.status)

    def interfaces(self, instance: str) -> dict[int, tuple[str, str | None]]:
        rows = self.site.read(instance_creation.interfaces_of, instance)
        return {row.device_instance: (row.status, row.reason) for row in rows}

    def where(self, instance: str) -> tuple[str, int]:
        """Domain and slot of the machine."""
        found = sa.select(schema.machine.c.domain, schema.machine.c.slot).join(
            schema.instance, schema.instance.c.machine_id == schema.machine.c.id
        )
        row = self.site.read(lambda conn: conn.execute(found.where(schema.instance.c.id == instance)).one())
        return row.domain, row.slot


class Pair:
    """Two controllers of the domain where an instance has its GPU in a partition."""

    second_url = "http://second"

    def __init__(self, site: Any, demo: Any) -> None:
        self.site = site
        self.demo = demo
        partition = demo.partition()
        self.instance = demo.instance([(partition, 0)])
        site.converge()
        self.domain, self.slot = demo.where(self.instance)
        self.first = site.endpoint[self.domain]
        site.run(endpoints.register_endpoint, self.second_url, ["CHASSIS9"], site.tick(), site.ids)
        found = {endpoint.url: endpoint.id for endpoint in site.read(endpoints.all_endpoints)}
        self.second = found[self.second_url]
        self.url = next(url for url, key in found.items() if key == self.first)

    def seen(self, **changed: Any) -> DomainObservation:
        self.site.tick()
        return msgspec.structs.replace(self.site.observation(self.domain), **changed)

    def without_partitions(self) -> DomainObservation:
        return self.seen(partitions=())

    def record(self, endpoint: str, seen: DomainObservation) -> ControllerConflict | None:
        found: ControllerConflict | None = self.site.run(
            records.record_observation, endpoint, seen, self.site.tick(0.5)
        )
        return found

    def lose(self, endpoint: str) -> None:
        self.site.run(records.record_unreadable, endpoint, "connection refused", self.site.tick())

    def dispute(self) -> ControllerConflict | None:
        found: ControllerConflict | None = self.site.read(conflicts.conflict_of_domain, self.domain)
        return found

    def known(self) -> latest.LatestObservation:
        found: latest.LatestObservation = self.site.read(latest.latest_of_domain, self.domain)
        return found

    def status(self) -> str | None:
        return str(self.demo.status(self.instance))

    def home(self) -> str:
        """Domain of the instance's machine in the records."""
        return str(self.demo.where(self.instance)[0])

    def order(self) -> OperatorOrder:
        return OperatorOrder("an operator", "test", self.site.tick())


@pytest.fixture
def demo(small_site: Any) -> Tenancy:
    return Tenancy(small_site, small_site.tenant)


@pytest.fixture
def rival(small_site: Any) -> Tenancy:
    return Tenancy(small_site, small_site.other_tenant())


@pytest.fixture
def pair(small_site: Any, demo: Any) -> Pair:
    return Pair(small_site, demo)
