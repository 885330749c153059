"""The NIC plugin between a kubelet and a container runtime, over their real protocols, with real links."""

import asyncio

import pytest
from tests.claim.node.nic.metadata_server import failing, serving
from tests.claim.node.nic.nic_kit import needs_root
from tests.claim.node.nic.nic_node import POD, NicNode
from tests.claim.node.nri.nri_runtime import NriRuntime
from tests.claim.node.plugin_manager import NotPrepared
from tests.waiting import until, until_so

from rackloom.claim.node.nic import metadata

pytestmark = needs_root


def count(process, name, **labels):
    return process.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def node(kit, host):
    return NicNode(kit, host)


def test_a_nic_goes_to_its_pod_and_comes_back(node, host):
    host.veth("nic0", "tor0", mtu=1400)
    host.address("nic0", "10.9.0.2/24")

    async def story():
        async with node.all() as (process, kubelet, runtime):
            found = await node.published("nic0", "tor0")
            assert found["nic0"]["ipv4"] == {"string": "10.9.0.2/24"}
            assert found["nic0"]["type"] == {"string": "veth"}
            assert "lo" not in found
            config = {"interface": {"name": "net1", "mtu": 1300}}
            claim = await node.claim("c1", "nic0", config=config)
            await kubelet.prepare(claim)
            assert "nic0" in host.links()
            pod = host.pod()
            assert await runtime.run(POD, pod.path) == ""
            assert "nic0" not in host.links()
            assert pod.addresses("net1") == {"10.9.0.2/24"}
            (reported,) = await node.status("c1")
            assert reported["networkData"]["interfaceName"] == "net1"
            assert reported["networkData"]["ips"] == ["10.9.0.2/24"]
            assert {c["type"]: c["status"] for c in reported["conditions"]} == {
                "Ready": "True",
                "NetworkReady": "True",
            }
            process.publisher.wake()
            await asyncio.sleep(0.1)
            assert (await node.published("nic0"))["nic0"]["ipv4"] == {"string": "10.9.0.2/24"}
            assert await runtime.stop(POD) == ""
            assert count(process, "rackloom_nic_attachments_total", kind="network", outcome="attached") == 1
            assert count(process, "rackloom_nri_request_duration_seconds_count", event="stop") == 1
            assert host.addresses("nic0") == {"10.9.0.2/24"}
            await kubelet.unprepare(claim)
            assert process.checkpoint.claims == {}

    asyncio.run(story())


def test_two_nics_of_a_claim_are_told_of_together(node, host):
    host.veth("nic0", "tor0")
    host.veth("nic1", "tor1")

    async def story():
        async with node.all() as (_, kubelet, runtime):
            claim = await node.claim("c1", "nic0", "nic1")
            await kubelet.prepare(claim)
            assert await runtime.run(POD, host.pod().path) == ""
            reported = await node.status("c1", devices=2)
            assert {device["networkData"]["interfaceName"] for device in reported} == {"nic0", "nic1"}
            await kubelet.unprepare(claim)
            assert {"nic0", "nic1"} <= host.links().keys()

    asyncio.run(story())


def test_unprepare_takes_back_what_the_runtime_never_told_of(node, host):
    host.veth("nic0", "tor0")

    async def story():
        async with node.all() as (_, kubelet, runtime):
            claim = await node.claim("c1", "nic0")
            await kubelet.prepare(claim)
            await runtime.run(POD, host.pod().path)
            assert "nic0" not in host.links()
            await kubelet.unprepare(claim)
            assert "nic0" in host.links()

    asyncio.run(story())


def test_a_pod_that_ended_while_the_plugin_was_down_gives_its_nic_back(node, host):
    host.veth("nic0", "tor0")

    async def story():
        async with node.all() as (_, kubelet, runtime):
            await kubelet.prepare(await node.claim("c1", "nic0"))
            await runtime.run(POD, host.pod().path)
        async with NriRuntime(node.socket).serving() as runtime, node.plugin():
            await runtime.ready.wait()
            assert "nic0" in host.links()

    asyncio.run(story())


@pytest.mark.slow
def test_a_pod_that_started_while_the_plugin_was_down_gets_its_nic(node, host):
    host.veth("nic0", "tor0")
    pod = host.pod()

    async def story():
        async with node.all() as (_, kubelet, runtime):
            await kubelet.prepare(await node.claim("c1", "nic0"))
        other = NriRuntime(node.socket)
        other.add_sandbox(POD, pod.path)
        async with other.serving() as runtime, node.plugin():
            await runtime.ready.wait()
            assert "nic0" in pod.links()
            await runtime.hang_up()
            await until_so(lambda: len(runtime.registered) > 1, "it registers again")
            await runtime.ready.wait()
            assert "nic0" in pod.links()

    asyncio.run(story())


def test_a_pod_in_the_hosts_network_is_refused(node, host):
    host.veth("nic0", "tor0")

    async def story():
        async with node.all() as (_, kubelet, runtime):
            await kubelet.prepare(await node.claim("c1", "nic0"))
            assert "remove hostNetwork" in await runtime.run(POD, "")
            assert "remove hostNetwork" in (await node.event("NetworkDeviceAttachFailed"))["message"]
            assert "nic0" in host.links()

    asyncio.run(story())


def test_what_the_kernel_refuses_fails_the_pod_and_the_nic_stays(node, host):
    host.veth("nic0", "tor0", mtu=1400)
    host.address("nic0", "10.9.0.2/24")

    async def story():
        async with node.all() as (process, kubelet, runtime):
            route = {"destination": "10.50.0.0/16", "gateway": "192.0.2.1"}
            claim = await node.claim("c1", "nic0", config={"routes": [route]})
            await kubelet.prepare(claim)
            message = await runtime.run(POD, host.pod().path)
            assert "adding the route to 10.50.0.0/16" in message
            assert host.addresses("nic0") == {"10.9.0.2/24"}
            (reported,) = await node.status("c1")
            assert {c["status"] for c in reported["conditions"]} == {"False"}
            event = await node.event("NetworkDeviceAttachFailed")
            assert event["type"] == "Warning"
            assert event["involvedObject"]["kind"] == "Pod"
            assert event["involvedObject"]["uid"] == POD
            assert event["message"] == message
            assert "adding the route to 10.50.0.0/16" in event["message"]
            assert "name a gateway within interface.addresses" in event["message"]
            assert count(process, "rackloom_nic_attachments_total", kind="network", outcome="failed") == 1
            assert count(process, "rackloom_nri_requests_total", event="run", outcome="failed") == 1
            await kubelet.unprepare(claim)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"interface": {"mtu": 9}}, "interface.mtu is 9, below 68"),
        ({"interfaces": {}}, 'strict decoding error: unknown field "interfaces"'),
        ({"interface": {"type": "IPVLAN"}}, "interface.type IPVLAN has no address"),
        ({"interface": {"mtu": 1000, "acceptRA": 2}}, "with which there is no IPv6 to set"),
        ({"profile": "gold"}, "profile 'gold' is not known"),
    ],
)
def test_a_config_that_can_never_be_is_refused_at_once(node, host, config, why):
    host.veth("nic0", "tor0")

    async def story():
        async with node.all() as (_, kubelet, _runtime):
            claim = await node.claim("c1", "nic0", config=config)
            with pytest.raises(NotPrepared, match=f"Permanent error: .*{why}"):
                await kubelet.prepare(claim)

    asyncio.run(story())


def test_a_profile_of_the_node_is_below_the_claims_own_settings(node, host):
    host.veth("nic0", "tor0")
    file = host.root / "profiles.yaml"
    file.write_text("gold: {interface: {name: gold0, mtu: 1300, addresses: [10.9.0.9/24]}}\n")

    async def story():
        async with node.all(profiles=file) as (_, kubelet, runtime):
            config = {"profile": "gold", "interface": {"name": "net1"}}
            await kubelet.prepare(claim := await node.claim("c1", "nic0", config=config))
            pod = host.pod()
            assert await runtime.run(POD, pod.path) == ""
            assert pod.addresses("net1") == {"10.9.0.9/24"}
            assert pod.links()["net1"].get_attr("IFLA_MTU") == 1300
            await kubelet.unprepare(claim)

    asyncio.run(story())


def test_a_filter_takes_devices_out_and_the_operators_attributes_come_in(node, host):
    for number in range(2):
        host.veth(f"nic{number}", f"tor{number}")
    file = host.root / "attributes.yaml"
    file.write_text("'*': {oke.dra.net/rackId: r7}\nnic1: {example.com/port: 3}\n")
    wanted = "attributes['dra.net/ifName'].StringValue.startsWith('nic')"

    async def story():
        await node.kit.boot()
        async with node.plugin(filter=wanted, attributes=file):
            found = await node.published("nic0", "nic1")
            assert set(found) == {"nic0", "nic1"}
            assert found["nic0"]["oke.dra.net/rackId"] == {"string": "r7"}
            assert found["nic1"]["example.com/port"] == {"int": 3}
            assert "example.com/port" not in found["nic0"]

    asyncio.run(story())


def test_a_nic_is_published_before_its_cloud_answers_and_again_with_what_the_cloud_says(
    node, host, monkeypatch
):
    monkeypatch.setattr(metadata, "RETRY_SECONDS", 0.1)
    host.veth("nic0", "tor0", address="42:01:c0:a8:08:02")

    async def story(service):
        answers, service.answers = service.answers, {}
        service.answers["/computeMetadata/v1/instance/machine-type"] = failing(503)
        file = host.root / "attributes.yaml"
        file.write_text("'*': {gce.dra.net/host: stated}\n")
        await node.kit.boot()
        async with node.plugin(cloud="gke", metadata_service=service.url, attributes=file):
            found = await node.published("nic0")
            assert not {name for name in found["nic0"] if name.startswith("gce.")} - {"gce.dra.net/host"}
            service.answers = answers

            async def known():
                attributes = (await node.published("nic0", "tor0"))["nic0"]
                return attributes if "gce.dra.net/networkName" in attributes else None

            attributes = await until(known, "the cloud's attributes")
            assert attributes["gce.dra.net/networkName"] == {"string": "rails"}
            assert attributes["gce.dra.net/networkProjectNumber"] == {"int": 123456789012}
            assert attributes["gce.dra.net/block"] == {"string": "a" * 32}
            assert attributes["gce.dra.net/host"] == {"string": "stated"}
            other = (await node.published("tor0"))["tor0"]
            assert other["gce.dra.net/machineType"] == {"string": "a3-ultragpu-8g"}
            assert "gce.dra.net/networkName" not in other

    with serving("gke") as service:
        asyncio.run(story(service))


def test_a_nic_that_came_back_goes_to_the_next_pod(node, host):
    host.veth("nic0", "tor0")
    host.address("nic0", "169.254.169.14/32")

    async def story():
        async with node.all() as (_, kubelet, runtime):
            await node.published("nic0")
            for number in (1, 2):
                claim = await node.claim(f"c{number}", "nic0", pod=f"p{number}")
                await kubelet.prepare(claim)
                pod = host.pod(f"pod{number}")
                assert await runtime.run(f"p{number}", pod.path) == ""
                assert pod.addresses("nic0") == {"169.254.169.14/32"}
                (status,) = await node.status(f"c{number}")
                assert status["networkData"]["ips"] == ["169.254.169.14/32"]
                assert await runtime.stop(f"p{number}") == ""
                await kubelet.unprepare(claim)
                assert host.addresses("nic0") == {"169.254.169.14/32"}

    asyncio.run(story())
