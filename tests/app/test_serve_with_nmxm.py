"""`rackloom serve` on racks behind NMX-M, alone and beside racks behind NMX-C."""

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest
from tests.lab.switches.nmxm_server import NmxmServer
from tests.waiting import PATIENCE, until, until_so

from rackloom.app.config import load_config
from rackloom.app.site.parts import secret_provider
from rackloom.app.site.service import site_service
from rackloom.app.site.switches import Switches
from rackloom.carve.fabric.controller import FabricUnavailable
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.errors import Refused
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.faults import NmxmFault
from rackloom.lab.switches.servers import NmxcServer, NmxcServerTls
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

PASSWORD = "simulated"


def fabrics(count):
    return fabrics_of(build_site(profiles.load_rack("gb200-nvl72"), count, SeededNames("lab")), "lab")


def serials(fabric):
    return sorted({gpu.chassis_serial for gpu in fabric.gpus.values()})


def keep_login(ground, path="nmxm/default/auth", password=PASSWORD):
    place = ground.directory / "secrets" / path
    place.mkdir(parents=True, exist_ok=True)
    for name, text in (("username", "rw-user"), ("password", password)):
        (place / name).write_text(text)
        (place / name).chmod(0o600)


@asynccontextmanager
async def nmxm(ground, *fabrics, **options):
    crt, key = ground.authority.issue("nmx-m").save(ground.directory, "nmx-m")
    async with NmxmServer(fabrics, cert=crt, key=key, seconds=0.02, **options) as server:
        yield server


@asynccontextmanager
async def nmxc(ground, fabric):
    pem = ground.authority.issue("switch")
    tls = NmxcServerTls(certificate=pem.certificate, key=pem.key, client_ca=ground.authority.certificate)
    async with NmxcServer(fabric, tls=tls) as server:
        yield server


async def ok(answer):
    answer = await answer
    assert answer.is_success, answer.text
    return answer.json()


async def machines(http, count):
    """The machines, once there are `count`."""

    async def enough():
        found = await ok(http.get("machine", params={"pageSize": 100, "includeMetadata": "true"}))
        return found if len(found) == count else None

    return await until(enough, f"{count} machines")


def domain(machine):
    return machine["metadata"]["nvLinkInfo"]["domainUuid"]


async def metrics(port):
    async with httpx2.AsyncClient(timeout=PATIENCE) as http:
        return (await http.get(f"http://127.0.0.1:{port}/metrics")).text


class Stage:
    """A site with its provider and one tenant."""

    def __init__(self, ground, site, stack):
        self.ground, self.site, self.stack = ground, site, stack

    async def open(self):
        rest = self.site.rest_port
        self.provider = await self.stack.enter_async_context(self.ground.rest(rest, role="PROVIDER_ADMIN"))
        self.tenant = await self.stack.enter_async_context(self.ground.rest(rest, org="tenant"))
        self.place = (await ok(self.provider.get("site")))[0]["id"]
        return self

    async def register(self, fabric, url):
        for serial in serials(fabric):
            body = {"chassisSerial": serial, "endpoint": url}
            await ok(self.provider.post("nvlink-nmxc-endpoint", json=body))

    async def kind(self, name, machines):
        gpus = {"type": "GPU", "name": "NVIDIA GB200", "count": 4, "deviceType": "NVLink"}
        body = {"name": name, "siteId": self.place, "machineCapabilities": [gpus]}
        made = (await ok(self.provider.post("instance/type", json=body)))["id"]
        ids = {"machineIds": [machine["id"] for machine in machines]}
        await ok(self.provider.post(f"instance/type/{made}/machine", json=ids))
        return made

    async def net(self):
        await ok(self.tenant.get("site"))
        body = {"name": "job", "siteId": self.place}
        partition = (await ok(self.tenant.post("nvlink-logical-partition", json=body)))["id"]
        body = {"name": "net", "siteId": self.place, "nvLinkLogicalPartitionId": partition}
        return (await ok(self.tenant.post("vpc", json=body)))["id"]

    async def instance(self, name, vpc, kind):
        body = {"name": name, "vpcId": vpc, "instanceTypeId": kind}
        return (await ok(self.tenant.post("instance", json=body)))["id"]

    async def ready(self, count):
        async def all_ready():
            found = await ok(self.tenant.get("instance"))
            return found if [instance["status"] for instance in found] == ["Ready"] * count else None

        return await until(all_ready, "all are ready")


@asynccontextmanager
async def stage(ground, **changes):
    async with site_service(load_config(ground.config(**changes))) as site, AsyncExitStack() as stack:
        yield await Stage(ground, site, stack).open()


def held(fabric):
    return {partition.name: len(partition.guids) for partition in fabric.partitions.values()}


@pytest.mark.slow
def test_one_site_with_a_rack_behind_each_protocol(ground):
    first, second = fabrics(2)
    keep_login(ground)

    async def scenario():
        async with nmxc(ground, first) as switch, nmxm(ground, second) as manager, stage(ground) as site:
            await site.register(first, switch.url)
            await site.register(second, manager.url)
            found = await machines(site.provider, 36)
            here = [machine for machine in found if domain(machine) == first.domain]
            there = [machine for machine in found if domain(machine) == second.domain]
            kinds = [await site.kind("rack-c", here), await site.kind("rack-m", there)]
            vpc = await site.net()
            for name, kind in zip(("on-c", "on-m"), kinds, strict=True):
                await site.instance(name, vpc, kind)
            await site.ready(2)
            (name,) = held(first)
            assert held(first) == held(second) == {name: 4}
            page = await metrics(site.site.metrics_port)
            for family in ("nmxc", "nmxm"):
                counted = f"nico_nvlink_partition_monitor_{family}_changes_applied_total"
                assert f'{counted}{{operation="create",status="completed"}} 1.0' in page
            assert f'nmxm_gpu_count{{health="healthy",nvlink_domain_uuid="{second.domain}"}} 72.0' in page
            assert f'nmxc_gpu_count{{health="healthy",nvlink_domain_uuid="{second.domain}"}}' not in page
            for instance in await ok(site.tenant.get("instance")):
                assert (await site.tenant.delete(f"instance/{instance['id']}")).status_code == 202

            async def empty():
                return held(first) == held(second) == {}

            await until(empty, "no partition is left")

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "at_rest", "in_use"),
    [
        ("keep", {72: 1}, {68: 1, 4: 1}),
        ("tray", {4: 18}, {4: 18}),
        ("none", {}, {4: 1}),
    ],
)
def test_free_gpus_are_where_the_policy_wants_them(ground, policy, at_rest, in_use):
    (fabric,) = fabrics(1)
    keep_login(ground)
    shared = set()

    def judge(snapshot):
        """Called at every change: no partition but the kept default reaches over a tray."""
        for partition in snapshot.partitions:
            trays = {fabric.gpus[guid].host_id for guid in partition.guids}
            if len(trays) > 1 and partition.name != "Default Partition":
                shared.add(partition.name)

    def sizes():
        return Counter(held(fabric).values())

    async def scenario():
        async with (
            nmxm(ground, fabric) as manager,
            stage(ground, site=f'default_partition = "{policy}"') as site,
        ):
            await site.register(fabric, manager.url)
            kind = await site.kind("rack", await machines(site.provider, 18))
            await until_so(lambda: sizes() == at_rest, "partitions as at rest")
            vpc = await site.net()
            await site.instance("job", vpc, kind)
            (made,) = await site.ready(1)
            await until_so(lambda: sizes() == in_use, "partitions as in use")
            (name,) = [name for name in held(fabric) if name != "Default Partition" and "tray" not in name]
            assert held(fabric)[name] == 4
            assert (await site.tenant.delete(f"instance/{made['id']}")).status_code == 202
            await until_so(lambda: sizes() == at_rest, "partitions as at rest")

            async def given_back():
                listed = await ok(site.provider.get("nvlink-partition", params={"pageSize": 100}))
                owners = Counter(partition["owner"] for partition in listed)
                owner = "tray" if policy == "tray" else "default"
                return owners == Counter({owner: sum(at_rest.values())}) and not await ok(
                    site.tenant.get("instance")
                )

            await until(given_back, "all is given back")

    fabric.on_change(judge)
    asyncio.run(scenario())
    assert not shared


@pytest.mark.slow
def test_the_nmxm_of_the_configuration_needs_no_registration(ground):
    first, second = fabrics(2)
    keep_login(ground)

    async def scenario():
        async with nmxm(ground, first, second) as manager:
            line = f'nmx_m_endpoint = "{manager.origin}"\nnmx_m_operation_timeout = "20s"'
            async with stage(ground, nvlink_config=line) as site:
                found = await machines(site.provider, 36)
                assert {domain(machine) for machine in found} == {first.domain, second.domain}
                (serial,) = serials(first)
                shown = await ok(site.provider.get(f"nvlink-nmxc-endpoint/{serial}"))
                assert shown["endpoint"] == f"{manager.url}?domain={first.domain}"
                kind = await site.kind(
                    "rack", [machine for machine in found if domain(machine) == second.domain]
                )
                await site.instance("job", await site.net(), kind)
                await site.ready(1)
                await until_so(lambda: sorted(held(second).values()) == [4], "four GPUs are held")
                assert held(first) == {}

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_login_that_is_wrong_or_missing_is_told_and_used_once_it_is_right(ground):
    (fabric,) = fabrics(1)

    async def scenario():
        async with nmxm(ground, fabric) as manager, stage(ground) as site:
            await site.register(fabric, manager.url)
            (serial,) = serials(fabric)

            async def says(what):
                shown = await ok(site.provider.get(f"nvlink-nmxc-endpoint/{serial}"))
                return what in (shown["statusMessage"] or "")

            await until(lambda: says("no secret nmxm/default/auth"), "the missing login is told")
            keep_login(ground, password="wrong")
            await until(lambda: says("UNAUTHENTICATED"), "the wrong login is told")
            page = await metrics(site.site.metrics_port)
            assert 'nmxm_connect_error_count{error="UNAUTHENTICATED"} 0.0' not in page
            assert 'nmxc_connect_error_count{error="UNAUTHENTICATED"} 0.0' in page
            keep_login(ground, path=f"nmxm/{serial}/auth")
            await machines(site.provider, 18)

    asyncio.run(scenario())


def test_an_nmxm_in_plaintext_is_refused_at_the_start(ground):
    path = ground.config(nvlink_config='nmx_m_endpoint = "http://nmx-m"')

    async def start():
        async with site_service(load_config(path)):
            raise AssertionError("it started")

    with pytest.raises(Refused, match="plaintext"):
        asyncio.run(start())


def test_an_nmxm_can_be_browsed(ground):
    (fabric,) = fabrics(1)
    keep_login(ground)
    config = load_config(ground.config())
    (serial,) = serials(fabric)
    guid = max(fabric.gpus)

    async def scenario():
        async with nmxm(ground, fabric) as manager:
            switches = Switches(config.nvlink_config, secret_provider(config.secrets), clock=lambda: 0.0)
            endpoint = Endpoint(id="e", url=manager.url, chassis_serials=(serial,), domain=None)
            listed = json.loads(await switches.browse(endpoint, "GetGpuInfoList", guid))
            assert [gpu["DeviceUID"] for gpu in listed] == [guid]
            assert len(json.loads(await switches.browse(endpoint, "GetGpuInfoList", 0))) == 72
            assert len(json.loads(await switches.browse(endpoint, "GetComputeNodeInfoList", 0))) == 18
            manager.faults.next("GET gpus", NmxmFault(status=404))
            with pytest.raises(FabricUnavailable, match="NOT_FOUND"):
                await switches.browse(endpoint, "GetGpuInfoList", 0)

    asyncio.run(scenario())
