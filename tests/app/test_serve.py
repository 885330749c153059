"""`rackloom serve` whole: TLS to switches, tenants and operators, over real sockets on loopback."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import grpc
import grpc.aio
import httpx2
import msgspec
import pytest
from tests.waiting import PATIENCE, until

from rackloom.app.config import load_config
from rackloom.app.site.service import site_service
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import forge_pb2_grpc, operator_pb2_grpc
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.errors import Refused
from rackloom.lab import faults


class Operator:
    """An admin client."""

    def __init__(self, ground, port, name="admin"):
        crt, key = ground.files[name]
        credentials = grpc.ssl_channel_credentials(ground.ca.read_bytes(), key.read_bytes(), crt.read_bytes())
        self.channel = grpc.aio.secure_channel(f"localhost:{port}", credentials)
        self.forge = forge_pb2_grpc.ForgeStub(self.channel)
        self.ours = operator_pb2_grpc.OperatorStub(self.channel)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.channel.close()

    async def register(self, server):
        for serial in sorted({gpu.chassis_serial for gpu in server.fabric.gpus.values()}):
            endpoint = pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=server.url)
            await self.forge.CreateNvlinkNmxcEndpoint(endpoint)

    async def machines(self):
        ids = (await self.forge.FindMachineIds(pb.MachineSearchConfig())).machine_ids
        if not ids:
            return []
        return list((await self.forge.FindMachinesByIds(pb.MachinesByIdsRequest(machine_ids=ids))).machines)


async def furnish(http, machines):
    """Set up a provider so that tenants may use machines. Returns the instance type."""
    site = (await http.get("site")).json()[0]["id"]
    gpus = {"type": "GPU", "name": "NVIDIA GB200", "count": 4, "deviceType": "NVLink"}
    body = {"name": "rack", "siteId": site, "machineCapabilities": [gpus]}
    kind = (await http.post("instance/type", json=body)).json()["id"]
    ids = {"machineIds": [machine.id.id for machine in machines]}
    answer = await http.post(f"instance/type/{kind}/machine", json=ids)
    assert answer.is_success, answer.text
    return kind


@pytest.mark.slow
def test_an_operator_brings_up_a_rack_and_a_tenant_uses_it(ground):
    config = load_config(ground.config())

    async def scenario():
        async with (
            ground.racks() as (switch,),
            site_service(config) as site,
            Operator(ground, site.admin_port) as admin,
        ):
            assert await admin.machines() == []
            await admin.register(switch)
            found = await until(admin.machines, "the machines are found")
            assert len(found) == 18
            assert all(len(machine.nvlink_info.gpus) == 4 for machine in found)
            async with ground.rest(site.rest_port, role="PROVIDER_ADMIN") as http:
                kind = await furnish(http, found)
            async with ground.rest(site.rest_port, org="tenant") as http:
                await tenant_uses(http, kind)
            seen = await admin.machines()
            joined = [
                machine
                for machine in seen
                if machine.nvlink_status_observation.gpu_status[0].partition_id.value
            ]
            assert len(joined) == 2
            assert "nico_nvlink_instance_ready_seconds_count 2.0" in await metrics(site.metrics_port)

    async def tenant_uses(http, kind):
        place = (await http.get("site")).json()[0]["id"]
        made = await http.post("nvlink-logical-partition", json={"name": "job", "siteId": place})
        body = {"name": "net", "siteId": place, "nvLinkLogicalPartitionId": made.json()["id"]}
        vpc = (await http.post("vpc", json=body)).json()["id"]
        batch = {"namePrefix": "job", "count": 2, "vpcId": vpc, "instanceTypeId": kind}
        answer = await http.post("instance/batch", json=batch)
        assert answer.status_code == 201, answer.text

        async def all_ready():
            return {instance["status"] for instance in (await http.get("instance")).json()} == {"Ready"}

        await until(all_ready, "all are ready")

    asyncio.run(scenario())


def test_an_endpoint_is_used_without_a_restart_and_forgotten_without_one(ground):
    config = load_config(ground.config())

    async def scenario():
        async with (
            ground.racks(2) as (first, second),
            site_service(config) as site,
            Operator(ground, site.admin_port) as admin,
        ):
            await admin.register(first)
            await until(admin.machines, "the machines are found")
            await admin.register(second)

            async def both():
                return len(await admin.machines()) == 36

            await until(both, "both racks are there")
            (serial, *_) = sorted({gpu.chassis_serial for gpu in second.fabric.gpus.values()})
            await admin.forge.DeleteNvlinkNmxcEndpoint(
                pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial=serial)
            )

            async def unknown():
                lost = [
                    machine
                    for machine in await admin.machines()
                    if machine.nvlink_info.chassis_serial == serial
                ]
                return not any(machine.HasField("nvlink_status_observation") for machine in lost)

            await until(unknown, "what is lost is unknown")

    asyncio.run(scenario())


@pytest.mark.slow
def test_each_controller_may_have_material_of_its_own(ground, make_authority):
    stranger = make_authority("another site")
    config = load_config(ground.config())

    async def scenario():
        ground.authority, common = stranger, ground.authority
        async with ground.racks() as (switch,):
            ground.authority = common
            (serial,) = {gpu.chassis_serial for gpu in switch.fabric.gpus.values()}
            async with site_service(config) as site, Operator(ground, site.admin_port) as admin:
                await admin.register(switch)
                page = await until(lambda: failed(site.metrics_port), "the failure is counted")
                assert 'nico_nvlink_endpoints{state="never"} 1.0' in page
                assert await admin.machines() == []
                pem = stranger.issue("site")
                place = ground.directory / "secrets" / "nmxc" / serial / "tls"
                place.mkdir(parents=True)
                pieces = {"ca": stranger.certificate, "certificate": pem.certificate, "key": pem.key}
                for name, content in pieces.items():
                    (place / name).write_bytes(content)
                    (place / name).chmod(0o600)
                # A connection keeps its material: a changed address makes a new one.
                moved = switch.url.replace("127.0.0.1", "localhost")
                await admin.forge.UpdateNvlinkNmxcEndpoint(
                    pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=moved)
                )
                assert len(await until(admin.machines, "the machines are found")) == 18

    async def failed(port):
        page = await metrics(port)
        errors = [line for line in page.splitlines() if "nmxc_connect_error_count{" in line]
        return page if any(not line.endswith(" 0.0") for line in errors) else None

    asyncio.run(scenario())


def test_plaintext_switches_need_allow_insecure(ground):
    config = load_config(ground.config())

    async def scenario():
        async with (
            ground.racks(tls=False) as (switch,),
            site_service(config) as site,
            Operator(ground, site.admin_port) as admin,
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="plaintext") as refused:
                await admin.register(switch)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    asyncio.run(scenario())


def test_domains_that_are_read_too_rarely_to_be_compared_are_refused(ground):
    written = ground.config()
    written.write_text(written.read_text().replace("'30s'", "'6m'"))

    async def scenario():
        with pytest.raises(Refused, match=r"monitor_run_interval is 360 s.*at least every 300 s"):
            async with site_service(load_config(written)):
                pass

    asyncio.run(scenario())


def test_a_site_that_only_discovers_does_what_an_operator_applies(ground):
    path = ground.config()
    path.write_text(
        path.read_text().replace("enabled = true", "enabled = false\ndomain_discovery_enabled = true")
    )
    config = load_config(path)

    async def scenario():
        async with (
            ground.racks() as (switch,),
            site_service(config) as site,
            Operator(ground, site.admin_port) as admin,
        ):
            await admin.register(switch)
            await until(admin.machines, "the machines are found")
            domain = ours.PlanRequest(domain=switch.fabric.domain)
            plan = (await admin.ours.MakePlan(domain)).plan
            kinds = [operation["type"] for operation in msgspec.json.decode(plan)["operations"]]
            assert kinds == ["delete-partition"]
            assert len(switch.fabric.snapshot().partitions) == 1
            outcomes = (await admin.ours.ApplyPlan(ours.ApplyRequest(plan=plan))).outcomes
            assert [outcome.state for outcome in outcomes] == ["done"]
            assert switch.fabric.snapshot().partitions == ()
            with pytest.raises(grpc.aio.AioRpcError, match="no longer") as refused:
                await admin.ours.ApplyPlan(ours.ApplyRequest(plan=plan))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    asyncio.run(scenario())


def test_a_plan_is_not_applied_in_a_paused_domain_and_the_refusal_says_so(ground):
    config = load_config(ground.config())

    async def scenario():
        async with (
            ground.racks() as (switch,),
            site_service(config) as site,
            Operator(ground, site.admin_port) as admin,
        ):
            await admin.register(switch)
            await until(admin.machines, "the machines are found")
            domain = switch.fabric.domain
            made = (await admin.ours.MakePlan(ours.PlanRequest(domain=domain))).plan
            plan = msgspec.json.decode(made)
            plan["operations"] = [{"type": "delete-partition", "partition_id": 1, "name": "x"}]
            apply = ours.ApplyRequest(plan=msgspec.json.encode(plan).decode())
            await admin.ours.PauseDomain(ours.DomainRequest(domain=domain, reason="switch firmware"))
            with pytest.raises(grpc.aio.AioRpcError, match="the domain is paused: switch firmware"):
                await admin.ours.ApplyPlan(apply)

    asyncio.run(scenario())


def test_browse_asks_the_controller_itself(ground):
    config = load_config(ground.config())

    async def scenario():
        async with (
            ground.racks() as (switch,),
            site_service(config) as site,
            Operator(ground, site.admin_port, "viewer") as viewer,
        ):
            async with Operator(ground, site.admin_port) as admin:
                await admin.register(switch)
            (guid, gpu) = next(iter(switch.fabric.gpus.items()))
            serial = gpu.chassis_serial
            for operation, count in ((1, 18), (2, 1), (3, 72)):
                reply = await viewer.forge.NmxcBrowse(
                    pb.NmxcBrowseRequest(chassis_serial=serial, operation=operation, gpu_uid=guid)
                )
                body = msgspec.json.decode(reply.body)
                assert len(body.get("gpu_info_list") or body["node_info_list"]) == count
                assert body["server_header"]["domain_uuid"] == switch.fabric.domain

    asyncio.run(scenario())


async def metrics(port, path="metrics"):
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/{path}")
        assert answer.status_code == 200
        return answer.text


def test_tokens_of_other_issuers_are_not_believed(ground):
    config = load_config(ground.config())

    async def scenario():
        async with site_service(config) as site, ground.rest(site.rest_port) as http:
            assert (await http.get("site")).status_code == 200
            wrong = {"Authorization": f"Bearer {ground.token(issuer='https://issuer.evil')}"}
            assert (await http.get("site", headers=wrong)).status_code == 401
            assert (await http.get("site", headers={"Authorization": "Bearer x"})).status_code == 401
            assert await metrics(site.metrics_port, "healthz") == "ok\n"

            async def is_ready():
                return await metrics(site.metrics_port, "readyz") == "ok\n"

            await until(is_ready, "the site was examined, and nothing was found")
            assert "rackloom_doctor_ok 1.0" in await metrics(site.metrics_port)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_database_serves_one_site(ground):
    async def start(path):
        async with site_service(load_config(path)):
            return

    asyncio.run(start(ground.config()))
    other = ground.config()
    other.write_text(other.read_text().replace('name = "lab"', 'name = "another"'))
    with pytest.raises(Refused, match="'lab'"):
        asyncio.run(start(other))


@pytest.mark.slow
def test_the_process_says_where_it_listens_and_ends_when_told(ground):
    code = "import sys, pathlib; from rackloom.cli.site import serve; serve(config=pathlib.Path(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(ground.config())], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("rackloom: site lab: REST on port ")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_site_without_issuers_of_tokens_goes_on(ground):
    """The first day of docs/operating.md: read-only, and no tokens exist yet."""
    config = load_config(ground.config())
    config = config.model_copy(update={"auth": config.auth.model_copy(update={"issuers": ()})})

    async def start():
        async with site_service(config) as running:
            ended, _ = await asyncio.wait(running.background, timeout=0.3)
            return ended

    assert asyncio.run(start()) == set()


@pytest.mark.slow
def test_time_never_runs_backwards_over_a_restart(ground):
    """The clock of the service starts after everything that is recorded."""

    async def start():
        async with site_service(load_config(ground.config())) as site:
            return site.reconciler.clock()

    before = asyncio.run(start())
    assert asyncio.run(start()) >= before
    assert before <= time.time() + 60


@pytest.mark.slow
def test_what_was_carved_by_hand_while_the_service_was_down_is_known_before_it_places(ground):
    """As after the restore of an older backup: the records lack the state of the switch."""
    config = load_config(ground.config())

    async def tenant_sets_up(http):
        place = (await http.get("site")).json()[0]["id"]
        made = await http.post("nvlink-logical-partition", json={"name": "job", "siteId": place})
        body = {"name": "net", "siteId": place, "nvLinkLogicalPartitionId": made.json()["id"]}
        return (await http.post("vpc", json=body)).json()["id"]

    async def scenario():
        async with ground.racks() as (switch,):
            async with site_service(config) as site, Operator(ground, site.admin_port) as admin:
                await admin.register(switch)
                found = await until(admin.machines, "the machines are found")
                async with ground.rest(site.rest_port, role="PROVIDER_ADMIN") as http:
                    kind = await furnish(http, found)
                async with ground.rest(site.rest_port, org="tenant") as http:
                    vpc = await tenant_sets_up(http)
            clean = sorted(machine.id.id for machine in found)[-2:]
            taken = [gpu.guid for gpu in switch.fabric.gpus.values()]
            for machine in found:
                if machine.id.id in clean:
                    taken = [guid for guid in taken if guid not in guids_of(machine)]
            faults.put_partition(switch, taken, "by-hand")
            async with site_service(config) as site, ground.rest(site.rest_port, org="tenant") as http:
                batch = {"namePrefix": "job", "count": 2, "vpcId": vpc, "instanceTypeId": kind}
                answer = await http.post("instance/batch", json=batch)
                assert answer.status_code == 201, answer.text
                assert sorted(instance["machineId"] for instance in answer.json()) == clean

    def guids_of(machine):
        return {int(gpu.guid) for gpu in machine.nvlink_info.gpus}

    asyncio.run(scenario())
