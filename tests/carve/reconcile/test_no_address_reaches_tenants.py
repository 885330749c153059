"""No tenant reads an address or an errno from a controller, its connection or the database.

Each case plants a text in the site's input, over real gRPC. As the tenant that it concerns, it then reads
every GET route of the served OpenAPI document, the event stream, and refusals of requests.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import grpc
import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from tests.carve.reconcile.served_rack import SITE, ServedRack, Tenant, make_fabric, served_rack

from rackloom.carve.reconcile import loop
from rackloom.carve.store import postgres
from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID, PartitionHealth
from rackloom.errors import Retry
from rackloom.lab.faults import another_writer, put_partition
from rackloom.lab.switches.fabric import FabricGpu, FabricPartition
from rackloom.lab.switches.faults import NmxcFault
from rackloom.lab.switches.servers import NmxcServer

PLANTED = "[Errno 111] Connect call failed ('10.255.7.9', 9370); last error: ipv4:10.255.7.9:9370"
LEAK = re.compile(
    r"10\.255\.7\.9|(?<![\w.-])9370(?![\w-])|errno|127\.0\.0\.1|ipv4|\(111\)|refused \(|connect call",
    re.IGNORECASE,
)
"""The port alone, not where its digits are a part of an id or of a time."""
DOMAIN = SITE.domains[0].uuid
FOR_EVER = 1000
READING = ("Hello", "GetDomainProperties", "GetGpuInfoList", "GetPartitionInfoList")
STATUSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.PERMISSION_DENIED)


class Case:
    """A site with one tenant. The tenant's first instance is Ready."""

    def __init__(self, switch: NmxcServer, site: ServedRack, tenant: Tenant, instance: str) -> None:
        self.switch, self.site, self.tenant, self.instance = switch, site, tenant, instance

    def fail(self, rpc: str, status: grpc.StatusCode) -> None:
        for _ in range(FOR_EVER):
            self.switch.faults.next(rpc, NmxcFault(status=(status, PLANTED)))

    def wake(self) -> None:
        self.site.reconciler.wake(frozenset({DOMAIN}))

    async def until_domain(self, status: str) -> None:
        async with asyncio.timeout(60):
            while (await self.tenant.get(f"nvlink-domain/{DOMAIN}"))["status"] != status:
                self.wake()
                await asyncio.sleep(0.05)

    async def until_asked(self, rpc: str) -> None:
        """Wait until the next call of `rpc` has been answered, and its effects are recorded."""
        before, reads = self.switch.faults.calls[rpc], self.switch.faults.calls["GetPartitionInfoList"]
        async with asyncio.timeout(60):
            while self.switch.faults.calls[rpc] == before:
                await asyncio.sleep(0.01)
            while self.switch.faults.calls["GetPartitionInfoList"] < reads + 2:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    async def leaks(self) -> dict[str, list[str]]:
        """Path -> what a tenant must not read in the answer."""
        texts = await everything_readable(self.tenant, self.instance)
        texts["events"] = repr(self.tenant.events)
        body = {"name": "more", "vpcId": (await self.tenant.get(f"instance/{self.instance}"))["vpcId"]}
        body["instanceTypeId"] = (await self.tenant.get("instance/type"))[0]["id"]
        answer = await self.tenant.http.post("instance", params={"dryRun": "true"}, json=body)
        texts["dry run"] = answer.text
        return {path: LEAK.findall(text) for path, text in texts.items() if LEAK.search(text)}


async def everything_readable(tenant: Tenant, instance: str) -> dict[str, str]:
    """The text of every GET route of the served OpenAPI document, with any status."""
    shown = await tenant.get(f"instance/{instance}")
    ids = {
        "siteId": shown["siteId"],
        "tenantId": shown["tenantId"],
        "instanceTypeId": shown["instanceTypeId"],
        "machineId": shown["machineId"],
        "nvLinkDomainId": DOMAIN,
        "chassisSerial": SITE.domains[0].trays[0].chassis_serial,
        "allocationId": ((await tenant.get("allocation")) or [{"id": shown["siteId"]}])[0]["id"],
        "nvLinkLogicalPartitionId": (await tenant.get("nvlink-logical-partition"))[0]["id"],
        "vpcId": shown["vpcId"],
        "instanceId": instance,
        "auditEntryId": (await tenant.get("audit"))[0]["id"],
        **dict.fromkeys(("trayReservationId", "serviceAccountId"), str(UUID(int=0))),
    }
    document = (await tenant.http.get(str(tenant.http.base_url.copy_with(path="/openapi.json")))).json()
    texts = {}
    for path, methods in document["paths"].items():
        if "get" in methods and not path.endswith("/event"):
            asked = path.partition("/nico/")[2].format(**ids)
            answer = await tenant.http.get(asked)
            assert answer.status_code < 500, (asked, answer.text)
            # Entries of the audit log hold the tenant's own address, and no other.
            texts[asked] = f"{answer.headers} {answer.text}".replace('"clientIP":"127.0.0.1"', "")
    assert len(texts) >= 40
    return texts


async def unreadable(case: Case) -> dict[str, list[str]]:
    """Each call of a reading fails in each way."""
    found: dict[str, list[str]] = {}
    for rpc in READING:
        for status in STATUSES:
            case.fail(rpc, status)
            await case.until_domain("Unknown")
            async with case.site.operator() as operator:
                endpoints = await operator.get("nvlink-nmxc-endpoint")
            assert PLANTED in endpoints[0]["statusMessage"], "operators read what was said"
            found |= {f"{rpc} {status.name} {path}": leak for path, leak in (await case.leaks()).items()}
            case.switch.faults.clear()
            await case.until_domain("Observed")
    return found


async def unchangeable(case: Case) -> dict[str, list[str]]:
    """Each change fails in each way."""
    found: dict[str, list[str]] = {}
    for status in STATUSES:
        case.fail("CreatePartition", status)
        made = await case.tenant.instance()
        await case.until_asked("CreatePartition")
        rows = await case.tenant.get(f"instance/{made}/nvlink-interface")
        assert all("create-partition on partition" in row["statusMessage"] for row in rows), rows
        found |= {f"Create {status.name} {path}": leak for path, leak in (await case.leaks()).items()}
        case.switch.faults.clear()
        case.wake()
        await case.tenant.until(made, "Ready")
        case.fail("DeletePartition", status)
        assert (await case.tenant.http.delete(f"instance/{made}")).is_success
        await case.until_asked("DeletePartition")
        found |= {f"Delete {status.name} {path}": leak for path, leak in (await case.leaks()).items()}
        case.switch.faults.clear()
        case.wake()
    return found


async def misnamed(case: Case) -> dict[str, list[str]]:
    """Partitions and chassis have the planted text as their names."""
    free = [
        gpu for gpu in case.switch.fabric.snapshot().gpus if not case.switch.fabric.partition_of(gpu.guid)
    ]
    put_partition(case.switch, [gpu.guid for gpu in free], name=PLANTED)
    with another_writer(case.switch) as fabric:
        stranger = FabricGpu(
            guid=(1 << 63) + 7,
            chassis_serial=PLANTED[:40],
            chassis_id=9,
            slot=1,
            host_id=99,
            tray_index=1,
            module_id=1,
        )
        fabric.insert_gpus([stranger])
        fabric.put(
            FabricPartition(
                id=DEFAULT_PARTITION_ID,
                name=PLANTED + " default",
                guids=(stranger.guid, free[-1].guid),
                health=PartitionHealth.DEGRADED,
            )
        )
    case.wake()
    answer = await case.tenant.http.post(
        "instance/batch",
        json={
            "namePrefix": "more",
            "count": 2,
            "vpcId": (await case.tenant.get(f"instance/{case.instance}"))["vpcId"],
            "instanceTypeId": (await case.tenant.get("instance/type"))[0]["id"],
        },
    )
    await case.until_domain("Observed")
    await asyncio.sleep(0.3)
    return (await case.leaks()) | ({"batch": LEAK.findall(answer.text)} if LEAK.search(answer.text) else {})


async def dead(case: Case) -> dict[str, list[str]]:
    """The controller is gone: gRPC's own words name its address and the errno."""
    await case.switch.go_away()
    await case.until_domain("Unknown")
    return await case.leaks()


@pytest.mark.slow
@pytest.mark.parametrize("happens", [unreadable, unchangeable, misnamed, dead], ids=lambda fn: fn.__name__)
def test_no_answer_to_a_tenant_holds_an_address(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Case], Awaitable[dict[str, list[str]]]],
) -> None:
    monkeypatch.setattr(loop, "FIRST_RETRY_SECONDS", 0.05)

    async def scenario() -> dict[str, list[str]]:
        async with (
            NmxcServer(make_fabric()) as switch,
            served_rack(switch.url, tmp_path, interval=1.0) as site,
            site.tenant("one") as tenant,
            tenant.listening(),
        ):
            instance = await tenant.instance()
            await tenant.until(instance, "Ready")
            return await happens(Case(switch, site, tenant, instance))

    assert asyncio.run(scenario()) == {}


def test_the_reason_of_a_database_that_is_gone_names_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "MAX_ATTEMPTS", 2)

    async def scenario() -> Any:
        engine = create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/none")
        with pytest.raises(Retry) as raised:
            await postgres.run_with_retries(engine, lambda _: None, postgres.READ_OPTIONS)
        await engine.dispose()
        return raised.value.reason

    assert not LEAK.search(asyncio.run(scenario()))
