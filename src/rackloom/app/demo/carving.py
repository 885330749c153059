"""The demo's rack: a tenant carves it over REST, and the fabric itself is asked whether that is true.

Nothing here looks into the service: requests go over its socket, and observations over a connection of the
demo's own to the switch controllers.
"""

import asyncio
import time
from collections import Counter
from typing import Any, Self

import httpx2

from rackloom.app.demo.story import Evidence, NotSeen
from rackloom.app.embedded import Embedded
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.plan.values import Observation

ORG = "demo"
PATIENCE = 10.0
"""Seconds to wait for something to become true before saying that it did not."""
LOOK_AGAIN = 0.02
Occupied = tuple[str, str, set[int]]
"""Domain, partition name, fabric GUIDs of the members."""
TOKEN_SECONDS = 600.0


class Tenant:
    """A tenant of the embedded site, and what it made there."""

    def __init__(self, site: Embedded) -> None:
        self.site = site
        token = site.issuer.mint(ORG, ["TENANT_ADMIN"], now=time.time(), ttl=TOKEN_SECONDS)
        self.http = httpx2.AsyncClient(
            base_url=f"{site.url}/v2/org/{ORG}/nico/",
            headers={"Authorization": f"Bearer {token}"},
            timeout=PATIENCE,
        )
        self.partition = ""
        self.vpc = ""
        self.instances: list[str] = []

    async def create_partition(self) -> Evidence:
        """A logical partition is a record only; no GPU has joined it."""
        site_id = (await self._get("site"))[0]["id"]
        made = await self._post("nvlink-logical-partition", {"name": "demo", "siteId": site_id})
        self.partition = made["id"]
        vpc = await self._post(
            "vpc", {"name": "demo", "siteId": site_id, "nvLinkLogicalPartitionId": self.partition}
        )
        self.vpc = vpc["id"]
        seen = await self._get(f"nvlink-logical-partition/{self.partition}")
        _require(seen["status"] == "Ready", "the logical partition is not Ready", seen=seen)
        return {"logicalPartition": self.partition, "status": seen["status"], "defaultOfVpc": self.vpc}

    async def create_instances(self) -> Evidence:
        """One batch, all in one NVLink domain, waited for until the service says Ready."""
        kind = (await self._get("instance/type"))[0]
        count = self.site.twin.profile.trays_per_domain
        began = time.perf_counter()
        made = await self._post(
            "instance/batch",
            {
                "namePrefix": "demo",
                "count": count,
                "vpcId": self.vpc,
                "instanceTypeId": kind["id"],
                "topologyOptimized": True,
            },
        )
        self.instances = [instance["id"] for instance in made]
        ready = await self._until(self._all_ready, "not every instance became Ready")
        return {
            "instances": ready,
            "instanceType": kind["name"],
            "secondsFromRequestToReady": round(time.perf_counter() - began, 3),
        }

    async def see_partition(self) -> Evidence:
        """Exactly one partition holds GPUs, and they are those of our instances."""
        occupied = await self._occupied()
        _require(len(occupied) == 1, "the fabric does not show one partition", seen=_sizes(occupied))
        interfaces = await self._interfaces()
        guids = {int(interface["gpuGuid"]) for interface in interfaces}
        domain, name, members = occupied[0]
        _require(members == guids, "the fabric's members are not the instances' GPUs", partition=name)
        return {"domain": domain, "partition": name, "gpus": len(members), "seenThrough": "NMX-C (simulated)"}

    async def see_domains(self) -> Evidence:
        """Every GPU of every instance says which NVLink domain it is in, and it is one."""
        interfaces = await self._interfaces()
        domains = Counter(interface["nvLinkDomainId"] for interface in interfaces)
        _require(len(domains) == 1 and None not in domains, "GPUs are not in one domain", seen=domains)
        first = interfaces[0]
        return {"gpusPerDomain": dict(domains), "example": {key: first[key] for key in _SHOWN}}

    async def release(self) -> Evidence:
        """Delete what was made, and see the fabric empty again."""
        for instance in self.instances:
            await self._delete(f"instance/{instance}")
        await self._until(self._gone, "the instances were not released")
        await self._delete(f"vpc/{self.vpc}")
        await self._delete(f"nvlink-logical-partition/{self.partition}")
        await self._until(self._partition_gone, "the logical partition did not go away")
        left = await self._occupied()
        _require(not left, "the fabric still holds partitions", seen=_sizes(left))
        return {"instances": 0, "partitionsInFabric": 0, "logicalPartition": "404"}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def _all_ready(self) -> int | None:
        seen = await self._get(f"instance?vpcId={self.vpc}&pageSize=100")
        ready = sum(instance["status"] == "Ready" for instance in seen)
        return ready if ready == len(self.instances) else None

    async def _gone(self) -> bool:
        return not await self._get("instance")

    async def _partition_gone(self) -> bool:
        answer = await self.http.get(f"nvlink-logical-partition/{self.partition}")
        return answer.status_code == httpx2.codes.NOT_FOUND

    async def _interfaces(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for instance in self.instances:
            found += (await self._get(f"instance/{instance}"))["nvLinkInterfaces"]
        return found

    async def _occupied(self) -> list[Occupied]:
        """Every partition that holds a GPU, in any domain."""
        readings = [await _look(url) for url in self.site.twin.endpoints.values()]
        return [
            (reading.domain, partition.name, set(partition.members))
            for reading in readings
            for partition in reading.partitions
            if partition.members
        ]

    async def _until(self, look: Any, complaint: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (seen := await look()):
            if time.monotonic() > deadline:
                raise NotSeen(f"{complaint} within {PATIENCE:.0f} s")
            await asyncio.sleep(LOOK_AGAIN)
        return seen

    async def _get(self, path: str) -> Any:
        return _body(await self.http.get(path), httpx2.codes.OK)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _body(await self.http.post(path, json=body), httpx2.codes.CREATED)

    async def _delete(self, path: str) -> None:
        answer = await self.http.delete(path)
        _require(answer.status_code == httpx2.codes.ACCEPTED, f"DELETE {path}: {answer.text}")


def _sizes(partitions: list[Occupied]) -> dict[str, int]:
    return {f"{name} in {domain}": len(members) for domain, name, members in partitions}


_SHOWN = ("instanceId", "deviceInstance", "gpuGuid", "nvLinkDomainId", "status")


async def _look(url: str) -> Observation:
    driver = NmxcDriver(url, clock=time.time)
    try:
        return await driver.observe()
    finally:
        await driver.close()


def _body(answer: httpx2.Response, expected: int) -> Any:
    request = answer.request
    _require(answer.status_code == expected, f"{request.method} {request.url.path}: {answer.text}")
    return answer.json()


def _require(holds: bool, otherwise: str, **seen: Any) -> None:
    if not holds:
        raise NotSeen(otherwise, **seen)
