"""The demo's tenants: two organisations carve racks over REST, verified at the switch controllers.

Nothing here reads the service from inside. Requests go over its socket with a bearer token, and
observations come through a separate NMX-C connection to each switch controller. A step passes only if the
fabric shows exactly one partition for each tenant, with exactly the GPUs of its instances.
"""

import time
from collections import Counter
from functools import partial
from typing import Any, Self

import httpx2

from rackloom.app.demo.story import Evidence, NotObserved, wait_until
from rackloom.app.twin.site import EmbeddedSite
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.core.partitions.domain import DomainObservation

REQUEST_SECONDS = 10.0
"""Seconds to wait for something to become true before saying that it did not."""
_POLL_SECONDS = 0.02
OccupiedPartition = tuple[str, str, frozenset[int]]
"""Domain, partition name, fabric GUIDs of the members."""
TOKEN_SECONDS = 600.0


class DemoTenants:
    """All tenants of the story together, and their state in the fabric."""

    def __init__(self, *tenants: "DemoTenant") -> None:
        self._tenants = tenants

    async def create_partitions(self) -> Evidence:
        """Logical partitions are records only. No GPU has joined one."""
        return {tenant.org: await tenant.create_partition() for tenant in self._tenants}

    async def create_instances(self) -> Evidence:
        """A batch for each tenant."""
        return {tenant.org: await tenant.create_instances() for tenant in self._tenants}

    async def keep_partitions(self) -> Evidence:
        """The partitions that an earlier run left, or new ones if there are none."""
        return {tenant.org: await tenant.find_or_create_partition() for tenant in self._tenants}

    async def keep_instances(self) -> Evidence:
        """Those that an earlier run left, and a batch for a tenant that has none."""
        return {tenant.org: await tenant.find_or_create_instances() for tenant in self._tenants}

    async def see_partitions(self) -> Evidence:
        """The partitions that hold GPUs are exactly the tenants', each with the GPUs of its instances."""
        occupied = {members: (domain, name) for domain, name, members in await self._occupied()}
        _require(
            len(occupied) == len(self._tenants),
            "the fabric does not show one partition for each tenant",
            seen=[f"{name} in {domain}: {len(members)}" for members, (domain, name) in occupied.items()],
        )
        seen = {}
        for tenant in self._tenants:
            guids = frozenset({int(interface["gpuGuid"]) for interface in await tenant.interfaces()})
            _require(guids in occupied, f"no partition has just the GPUs of {tenant.org}'s instances")
            domain, name = occupied[guids]
            seen[tenant.org] = {"domain": domain, "partition": name, "gpus": len(guids)}
        return {"seenThrough": "NMX-C (simulated)", **seen}

    async def see_domains(self) -> Evidence:
        """Every GPU of a tenant reports its NVLink domain, and it is the same for all."""
        return {tenant.org: await tenant.see_domain() for tenant in self._tenants}

    async def release(self) -> Evidence:
        """Delete the created objects, and see the fabric empty again."""
        for tenant in self._tenants:
            await tenant.release()
        left = await self._occupied()
        _require(not left, "the fabric still holds partitions", seen=[name for _, name, _ in left])
        return {"instances": 0, "partitionsInFabric": 0, "logicalPartitions": 0}

    async def _occupied(self) -> list[OccupiedPartition]:
        """Every partition that holds a GPU, in any domain."""
        endpoints = self._tenants[0].site.twin.endpoints
        readings = [await _observe_domain(url) for url in endpoints.values()]
        return [
            (reading.domain, partition.name, frozenset(partition.members))
            for reading in readings
            for partition in reading.partitions
            if partition.members
        ]


class DemoTenant:
    """A tenant of the embedded site that takes `trays` compute trays, with the objects that it created."""

    def __init__(self, site: EmbeddedSite, org: str, trays: int) -> None:
        self.site, self.org, self._trays = site, org, trays
        token = site.issuer.mint(org, ["TENANT_ADMIN"], now=time.time(), ttl=TOKEN_SECONDS)
        self.http = httpx2.AsyncClient(
            base_url=f"{site.url}/v2/org/{org}/nico/",
            headers={"Authorization": f"Bearer {token}"},
            timeout=REQUEST_SECONDS,
            trust_env=False,  # The site is on loopback, which no proxy reaches.
        )
        self.partition = ""
        self.vpc = ""
        self.instances: list[str] = []

    async def create_partition(self) -> Evidence:
        """A logical partition is a record only. No GPU has joined it."""
        site_id = (await self._get("site"))[0]["id"]
        made = await self._post("nvlink-logical-partition", {"name": self.org, "siteId": site_id})
        self.partition = made["id"]
        vpc = await self._post(
            "vpc", {"name": self.org, "siteId": site_id, "nvLinkLogicalPartitionId": self.partition}
        )
        self.vpc = vpc["id"]
        seen = await self._get(f"nvlink-logical-partition/{self.partition}")
        _require({"status": "Ready"}.items() <= seen.items(), "the logical partition is not Ready", seen=seen)
        return {"logicalPartition": self.partition, "status": "Ready", "defaultOfVpc": self.vpc}

    async def find_or_create_partition(self) -> Evidence:
        """The partition and the VPC of an earlier run on the same home, else new ones."""
        partitions = [
            item for item in await self._get("nvlink-logical-partition") if item["name"] == self.org
        ]
        vpcs = [item for item in await self._get("vpc") if item["name"] == self.org]
        if not partitions or not vpcs:
            return await self.create_partition()
        self.partition, self.vpc = partitions[0]["id"], vpcs[0]["id"]
        return {"logicalPartition": self.partition, "defaultOfVpc": self.vpc, "from": "an earlier run"}

    async def find_or_create_instances(self) -> Evidence:
        """The instances of an earlier run on the same home, else a new batch."""
        found = await self._get(f"instance?vpcId={self.vpc}&pageSize=100")
        if not found:
            return await self.create_instances()
        self.instances = [instance["id"] for instance in found]
        ready = await _wait_until(self._all_ready, "not every instance became Ready")
        return {"instances": ready, "from": "an earlier run"}

    async def create_instances(self) -> Evidence:
        """One batch, all in one NVLink domain, waited for until the service reports Ready."""
        kind = (await self._get("instance/type"))[0]
        began = time.perf_counter()
        made = await self._post(
            "instance/batch",
            {
                "namePrefix": self.org,
                "count": self._trays,
                "vpcId": self.vpc,
                "instanceTypeId": kind["id"],
                "topologyOptimized": True,
            },
        )
        self.instances = [instance["id"] for instance in made]
        ready = await _wait_until(self._all_ready, "not every instance became Ready")
        return {
            "instances": ready,
            "instanceType": kind["name"],
            "secondsFromRequestToReady": round(time.perf_counter() - began, 3),
        }

    async def see_domain(self) -> Evidence:
        """Every GPU of every instance reports its NVLink domain, and it is the same for all."""
        interfaces = await self.interfaces()
        domains = Counter(interface["nvLinkDomainId"] for interface in interfaces)
        _require(len(domains) == 1 and None not in domains, "GPUs are not in one domain", seen=domains)
        first = interfaces[0]
        return {"gpusPerDomain": dict(domains), "example": {key: first[key] for key in _SHOWN_FIELDS}}

    async def release(self) -> None:
        """Delete the created objects, and see them gone."""
        for instance in self.instances:
            await self._delete(f"instance/{instance}")
        await _wait_until(self._gone, "the instances were not released")
        await self._delete(f"vpc/{self.vpc}")
        await self._delete(f"nvlink-logical-partition/{self.partition}")
        await _wait_until(self._partition_gone, "the logical partition did not go away")

    async def interfaces(self) -> list[dict[str, Any]]:
        """The NVLink interfaces of all instances: one for each GPU."""
        found: list[dict[str, Any]] = []
        for instance in self.instances:
            found += (await self._get(f"instance/{instance}"))["nvLinkInterfaces"]
        return found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def _all_ready(self) -> int | None:
        ready = len(await self._get(f"instance?vpcId={self.vpc}&status=Ready&pageSize=100"))
        return ready if ready == len(self.instances) else None

    async def _gone(self) -> bool:
        return not await self._get("instance")

    async def _partition_gone(self) -> bool:
        answer = await self.http.get(f"nvlink-logical-partition/{self.partition}")
        return answer.status_code == httpx2.codes.NOT_FOUND

    async def _get(self, path: str) -> Any:
        return _json_body(await self.http.get(path), httpx2.codes.OK)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _json_body(await self.http.post(path, json=body), httpx2.codes.CREATED)

    async def _delete(self, path: str) -> None:
        answer = await self.http.delete(path)
        _require(answer.status_code == httpx2.codes.ACCEPTED, f"DELETE {path}: {answer.text}")


_SHOWN_FIELDS = ("instanceId", "deviceInstance", "gpuGuid", "nvLinkDomainId", "status")


_wait_until = partial(wait_until, seconds=REQUEST_SECONDS, pause=_POLL_SECONDS)


async def _observe_domain(url: str) -> DomainObservation:
    driver = NmxcDriver(url, clock=time.time)
    try:
        return await driver.observe()
    finally:
        await driver.close()


def _json_body(answer: httpx2.Response, expected: int) -> Any:
    request = answer.request
    _require(answer.status_code == expected, f"{request.method} {request.url.path}: {answer.text}")
    return answer.json()


def _require(holds: bool, otherwise: str, **seen: Any) -> None:
    if not holds:
        raise NotObserved(otherwise, **seen)
