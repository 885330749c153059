"""Leases of NICs in pods: a real exchange over real links, renewed, lost, found again, and given back."""

import asyncio
import errno
import threading
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from tests.claim.node.nic.dhcp_server import ACK, DISCOVER, MAC, NAK, RELEASE, REQUEST, DhcpServer, seconds
from tests.claim.node.nic.nic_kit import needs_root
from tests.claim.node.nic.nic_node import DRIVER, POD, NicNode
from tests.claim.node.nri.nri_runtime import NriRuntime
from tests.claim.node.plugin_manager import NotPrepared
from tests.waiting import until, until_seen, until_so

from rackloom.claim.node.nic import attach as lending
from rackloom.claim.node.nic.attach import AttachmentManager, AttachmentStore
from rackloom.claim.node.nic.leases import LeaseRecord, LeaseStore
from rackloom.claim.node.nic.renewal import REQUEST_THREADS, LeaseKeeper
from rackloom.claim.node.tasks import run_background
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.objects import RESOURCE_CLAIM
from rackloom.core.nics import lease
from rackloom.core.nics.attachment import AttachedLink, Attachment, PreparedNic

pytestmark = needs_root
ADDRESS = "10.9.0.77"
SOON = {"option58": seconds(1), "option59": seconds(3000)}
SHORT = {"option51": seconds(8), "option58": seconds(1), "option59": seconds(3)}
ROUTE = bytes([16, 10, 8, 10, 9, 0, 1])


@pytest.fixture
def node(kit, host):
    host.veth("nic0", "tor0")
    return NicNode(kit, host)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Let leases be renewed at once."""
    monkeypatch.setattr(lease, "LEAST_RENEWAL_SECONDS", 0.0)


@contextmanager
def server(host, **options):
    dhcp_server = DhcpServer(host, "tor0", **options)
    try:
        yield dhcp_server
    finally:
        dhcp_server.close()


@asynccontextmanager
async def pod_with_a_lease(node, kubelet, runtime):
    """A pod that has nic0 with an address by DHCP. Afterwards it has ended."""
    claim = await node.claim("c1", "nic0", config={"interface": {"dhcp": True}})
    await kubelet.prepare(claim)
    pod = node.host.pod()
    assert await runtime.run(POD, pod.path) == ""
    assert pod.addresses("nic0") == {f"{ADDRESS}/24"}
    yield pod
    assert await runtime.stop(POD) == ""
    await kubelet.unprepare(claim)
    assert not list((node.kit.places.home(DRIVER) / "leases").iterdir())


def kinds(dhcp):
    return [message.kind for message in dhcp.received]


def requests(dhcp, *, client):
    """Requests that answer no offer, with or without an address of the `client` in them."""
    return [
        message
        for message in dhcp.received
        if message.kind == REQUEST and 54 not in message.options and (message.client == ADDRESS) is client
    ]


async def condition(node, kind, status):
    """Wait until the claim's NIC has this condition. Returns all its conditions by kind, and its IPs."""

    async def look():
        claim = await node.kit.api.get(RESOURCE_CLAIM, "c1", "default")
        for device in claim["status"].get("devices", []):
            output = {entry["type"]: entry for entry in device["conditions"]}
            if kind in output and output[kind]["status"] == status:
                return output, device["networkData"]["ips"]
        return None

    return await until(look, f"{kind} is {status}")


def of_claim(uid):
    """A lease of eight seconds from 0 on, of nic0."""
    grant = lease.DhcpGrant(
        address=f"{ADDRESS}/24",
        server="10.9.0.1",
        server_mac="02:00:00:00:00:01",
        seconds=8.0,
        renew_after=4.0,
        rebind_after=7.0,
    )
    return LeaseRecord(
        ref=ClaimRef(namespace="default", name="c1", uid=uid),
        pod=POD,
        pod_name="p",
        nic=PreparedNic(device="nic0", published=Device(name="nic0")),
        lease=lease.new_lease(grant, "02:00:00:00:00:09", 0.0),
        boot_id="b",
    )


def count(process, name, **labels):
    return process.metrics.registry.get_sample_value(name, labels)


@pytest.mark.slow
def test_a_lease_is_renewed_from_the_pod_and_given_back_at_its_end(node, host):
    async def story():
        async with node.all() as (process, kubelet, runtime):
            async with pod_with_a_lease(node, kubelet, runtime) as pod:
                await until_so(lambda: len(requests(dhcp, client=True)) >= 2, "it is renewed")
                renewal = requests(dhcp, client=True)[0]
                assert (renewal.sender, renewal.to, renewal.to_mac) == (ADDRESS, "10.9.0.1", MAC)
                assert 50 not in renewal.options
                assert renewal.options[61] == b"\1" + renewal.hardware
                assert pod.addresses("nic0") == {f"{ADDRESS}/24"}
                output, ips = await condition(node, "DHCPLeaseReady", "True")
                assert output["DHCPLeaseReady"]["reason"] == "DHCPLeaseHeld"
                assert ips == [f"{ADDRESS}/24"]
                assert count(process, "rackloom_nic_dhcp_renewals_total", outcome="renewed") >= 1
                assert count(process, "rackloom_nic_dhcp_leases", state="held") == 1
            last = dhcp.received[-1]
            assert (last.kind, last.client, last.to) == (RELEASE, ADDRESS, "10.9.0.1")
            assert last.hardware == renewal.hardware
            assert count(process, "rackloom_nic_dhcp_leases", state="held") == 0

    with server(host, **SOON) as dhcp:
        asyncio.run(story())


@pytest.mark.slow
def test_another_servers_no_does_not_count_while_the_own_is_asked(node, host):
    no = bytes([53, 1, NAK, 54, 4, 10, 9, 0, 9, 255])

    async def story():
        async with (
            node.all() as (process, kubelet, runtime),
            pod_with_a_lease(node, kubelet, runtime) as pod,
        ):
            dhcp.before = [no]
            received = len(requests(dhcp, client=True))
            await until_so(lambda: len(requests(dhcp, client=True)) > received + 1, "it is renewed again")
            assert pod.addresses("nic0") == {f"{ADDRESS}/24"}
            assert count(process, "rackloom_nic_dhcp_renewals_total", outcome="refused") == 0

    with server(host, **SOON) as dhcp:
        asyncio.run(story())


@pytest.mark.slow
def test_a_sandbox_that_is_made_anew_has_the_same_lease(node, host):
    async def story():
        async with (
            node.all() as (_, kubelet, runtime),
            pod_with_a_lease(node, kubelet, runtime),
        ):
            assert await runtime.stop(POD) == ""
            received = len(requests(dhcp, client=False))
            await until_so(
                lambda: len(requests(dhcp, client=False)) > received, "the host keeps it meanwhile"
            )
            pod = host.pod("again")
            assert await runtime.run(POD, pod.path) == ""
            assert pod.addresses("nic0") == {f"{ADDRESS}/24"}
            kinds = [message.kind for message in dhcp.received]
            assert kinds.count(DISCOVER) == 1
            assert RELEASE not in kinds

    with server(host, **SOON) as dhcp:
        asyncio.run(story())


def test_an_address_goes_also_while_the_disk_is_full():
    gone = []

    def full(_record):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def set_address(record, *, held):
        gone.append((record.key, held))

    async def report(*_, **__):
        pass

    record = of_claim("u")
    nic = record.nic
    attached = AttachedLink(name="nic0", mac=None, addresses=(f"{ADDRESS}/24",))
    attachment = Attachment(
        claim="u", pod=POD, nic=nic, netns="/n", netns_id=1, boot_id="b", attached=attached
    )
    looks = []

    def every():
        looks.append(1)
        return (record,)

    manager = SimpleNamespace(
        leases=SimpleNamespace(all=every, get=lambda *_: record, put=full),
        attachments=SimpleNamespace(get=lambda *_: attachment),
        set_address=set_address,
    )

    async def story():
        async with run_background(
            LeaseKeeper(manager, lambda *_: lease.RequestFailure.NOTHING, report, lambda: 8.0).run()
        ):
            await until_so(lambda: gone, "the address goes")
            await asyncio.sleep(0.2)

    asyncio.run(story())
    assert gone[0] == (record.key, False)
    # Two a round: what is still due afterwards is not looked at again without a pause.
    assert len(looks) <= 4


def test_a_request_that_waits_for_its_turn_is_not_sent_after_its_address_was_given_back(tmp_path):
    asked, may_go_on = [], threading.Event()
    manager = AttachmentManager(
        AttachmentStore(tmp_path / "loans", "b"), LeaseStore(tmp_path / "leases", "b"), lambda _: None
    )
    for number in range(REQUEST_THREADS + 3):
        manager.leases.put(of_claim(f"u{number}"))

    def ask(record, *_):
        asked.append(record.ref.uid)
        may_go_on.wait(60)
        return lease.RequestFailure.NOTHING

    async def report(*_, **__):
        pass

    async def story():
        keeper = LeaseKeeper(manager, ask, report, lambda: 4.0)
        async with run_background(keeper.run()):
            await until_so(lambda: len(asked) == REQUEST_THREADS, "as many are asked as may be")
            kept, *gone = [record for record in manager.leases.all() if record.ref.uid not in asked]
            for record in gone:
                await manager.release_leases(record.ref.uid)
            may_go_on.set()
            name, labels = "rackloom_nic_dhcp_renewals_total", {"outcome": "unanswered"}
            registry = CollectorRegistry()
            registry.register(keeper.requests)
            await until_so(
                lambda: registry.get_sample_value(name, labels) == REQUEST_THREADS + 1,
                "those that stand are asked",
            )
            await asyncio.sleep(0.2)
            assert registry.get_sample_value(name, labels) == REQUEST_THREADS + 1
            assert asked[REQUEST_THREADS:] == [kept.ref.uid]

    asyncio.run(story())


def test_an_address_that_the_next_claim_of_a_nic_has_is_not_given_back(tmp_path, monkeypatch):
    released = []
    monkeypatch.setattr(lending, "_release_record", lambda record: released.append(record.ref.uid))
    manager = AttachmentManager(
        AttachmentStore(tmp_path / "loans", "b"), LeaseStore(tmp_path / "leases", "b"), lambda _: None
    )
    manager.leases.put(of_claim("before"))
    manager.leases.put(of_claim("after"))
    asyncio.run(manager.release_leases("before"))
    assert [record.ref.uid for record in manager.leases.all()] == ["after"]
    assert released == []
    asyncio.run(manager.release_leases("after"))
    assert released == ["after"]


@pytest.mark.slow
def test_a_claim_that_fails_at_its_second_nic_gives_the_lease_of_its_first_back(node, host):
    async def story():
        async with node.all() as (process, kubelet, _):
            claim = await node.claim("c1", "nic0", "nic9", config={"interface": {"dhcp": True}})
            with pytest.raises(NotPrepared, match="there is no NIC nic9"):
                await kubelet.prepare(claim)
            assert count(process, "rackloom_nic_dhcp_leases", state="held") == 1
            await kubelet.unprepare(claim)
            assert not list((node.kit.places.home(DRIVER) / "leases").iterdir())
            await until_so(lambda: dhcp.received[-1].kind == RELEASE, "it is given back")

    with server(host) as dhcp:
        asyncio.run(story())


def test_an_address_that_cannot_be_written_down_is_given_back(node, host, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def story():
        async with node.all() as (process, _, _):
            claim = await node.claim("c1", "nic0", config={"interface": {"dhcp": True}})
            monkeypatch.setattr(LeaseStore, "put", full)
            (answer,) = (await process.requests.prepare([claim.ref], 2.0)).values()
            assert (
                answer.error == "the lease of NIC nic0 cannot be written: [Errno 28] No space left on device"
            )
            await until_so(lambda: kinds(dhcp)[-1] == RELEASE, "the address is given back")

    with server(host) as dhcp:
        asyncio.run(story())


def test_an_address_that_comes_after_kubelet_gave_the_claim_up_is_given_back(node, host):
    async def story():
        async with node.all() as (_, kubelet, _):
            claim = await node.claim("c1", "nic0", config={"interface": {"dhcp": True}})
            dhcp.answers = None
            preparing = asyncio.create_task(kubelet.prepare(claim))
            await until_so(lambda: REQUEST in kinds(dhcp), "the offer is taken")
            preparing.cancel()
            unpreparing = asyncio.create_task(kubelet.unprepare(claim))
            await asyncio.wait({preparing, unpreparing}, timeout=0.5)
            dhcp.answers = ACK
            await unpreparing
            await until_so(lambda: kinds(dhcp)[-1] == RELEASE, "the address is given back")
            assert kinds(dhcp).count(RELEASE) == 1
            assert not list((node.kit.places.home(DRIVER) / "leases").iterdir())

    with server(host) as dhcp:
        asyncio.run(story())
        assert kinds(dhcp)[-1] == RELEASE


@pytest.mark.slow
def test_an_address_that_nobody_prolongs_goes_and_comes_back_with_its_server(node, host, monkeypatch):
    monkeypatch.setattr(lease, "REPEAT_SECONDS", 1.0)

    async def story():
        async with (
            node.all() as (process, kubelet, runtime),
            pod_with_a_lease(node, kubelet, runtime) as pod,
        ):
            dhcp.answers = None
            reported = await node.event("DHCPRenewalFailed")
            assert reported["involvedObject"]["uid"] == POD
            assert "no DHCP server has answered since" in reported["message"]
            await until_so(lambda: pod.addresses("nic0") == set(), "the address goes")
            assert "ended at" in (await node.event("DHCPLeaseExpired"))["message"]
            output, _ = await condition(node, "DHCPLeaseReady", "False")
            assert {output["Ready"]["status"], output["NetworkReady"]["reason"]} == {
                "False",
                "DHCPLeaseExpired",
            }
            assert count(process, "rackloom_nic_dhcp_renewals_total", outcome="unanswered") >= 1
            assert "255.255.255.255" in {renewal.to for renewal in requests(dhcp, client=True)}
            dhcp.answers = ACK
            await until_so(lambda: pod.addresses("nic0") == {f"{ADDRESS}/24"}, "the address is back")
            assert {r.get_attr("RTA_DST") for r in pod.ip(lambda ipr: ipr.get_routes(family=2))} >= {
                "10.8.0.0"
            }
            output, _ = await condition(node, "DHCPLeaseReady", "True")
            assert output["Ready"]["status"] == "True"

    with server(host, **SHORT, option121=ROUTE) as dhcp:
        asyncio.run(story())


def test_after_a_restart_the_plugin_asks_whether_the_lease_still_stands(node, host):
    pods = []

    async def first():
        async with node.all() as (_, kubelet, runtime):
            await kubelet.prepare(await node.claim("c1", "nic0", config={"interface": {"dhcp": True}}))
            pods.append(node.host.pod())
            assert await runtime.run(POD, pods[0].path) == ""

    async def second():
        runtime = NriRuntime(node.socket)
        runtime.add_sandbox(POD, pods[0].path)
        async with runtime.serving(), node.plugin():
            await until_so(lambda: requests(dhcp, client=False), "it asks")
            asked = requests(dhcp, client=False)[0]
            assert asked.to == "255.255.255.255"
            assert asked.options[50] == bytes([10, 9, 0, 77])
            await until_so(lambda: pods[0].addresses("nic0") == set(), "the address goes")
            output, _ = await condition(node, "DHCPLeaseReady", "False")
            assert output["DHCPLeaseReady"]["reason"] == "DHCPLeaseRefused"
            assert "delete the pod" in (await node.event("DHCPLeaseRefused"))["message"]

    with server(host) as dhcp:
        asyncio.run(first())
        dhcp.answers = NAK
        asyncio.run(second())


@pytest.mark.slow
@pytest.mark.parametrize("has_answer", [True, False])
def test_after_a_restart_another_servers_no_takes_no_address(node, host, has_answer):
    no = bytes([53, 1, NAK, 54, 4, 10, 9, 0, 9, 255])
    outcome = "renewed" if has_answer else "unanswered"

    async def first():
        async with node.all() as (_, kubelet, runtime):
            await kubelet.prepare(await node.claim("c1", "nic0", config={"interface": {"dhcp": True}}))
            assert await runtime.run(POD, pod.path) == ""

    async def second():
        runtime = NriRuntime(node.socket)
        runtime.add_sandbox(POD, pod.path)
        async with runtime.serving(), node.plugin() as process:
            await until_so(
                lambda: count(process, "rackloom_nic_dhcp_renewals_total", outcome=outcome), outcome
            )
            assert count(process, "rackloom_nic_dhcp_renewals_total", outcome="refused") == 0
            assert pod.addresses("nic0") == {f"{ADDRESS}/24"}

    with server(host) as dhcp:
        pod = host.pod()
        asyncio.run(first())
        dhcp.before, dhcp.answers = [no], ACK if has_answer else None
        asyncio.run(second())


@pytest.mark.slow
def test_the_kernel_takes_the_address_while_the_plugin_is_away(node, host):
    pod = host.pod()

    def lifetime(ipr):
        (address,) = ipr.get_addr(family=2, index=ipr.link_lookup(ifname="nic0")[0])
        return address.get_attr("IFA_CACHEINFO")["ifa_valid"]

    async def story():
        async with node.all() as (_, kubelet, runtime):
            await kubelet.prepare(await node.claim("c1", "nic0", config={"interface": {"dhcp": True}}))
            assert await runtime.run(POD, pod.path) == ""
            await until_so(lambda: pod.ip(lifetime) <= 8, "the kernel knows when the lease ends")

    with server(host, **SHORT):
        asyncio.run(story())
        until_seen(lambda: pod.addresses("nic0") == set(), "the address goes")


@pytest.mark.slow
def test_a_pod_does_not_start_with_an_address_that_was_lost(node, host):
    async def story():
        async with node.all() as (process, kubelet, runtime):
            claim = await node.claim("c1", "nic0", config={"interface": {"dhcp": True}})
            await kubelet.prepare(claim)
            dhcp.answers = NAK
            await until_so(
                lambda: count(process, "rackloom_nic_dhcp_leases", state="refused") == 1, "it is refused"
            )
            refusal = await runtime.run(POD, host.pod().path)
            assert f"the DHCP lease of {ADDRESS}/24 is refused; delete the pod" in refusal
            assert "nic0" in host.links()
            await kubelet.unprepare(claim)
            assert dhcp.received[-1].kind == REQUEST, "what is not ours is not given back"

    with server(host, **SOON) as dhcp:
        asyncio.run(story())
