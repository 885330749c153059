"""The status of a claim, and the repairs after an event was missed."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.node.nic.attach import NicSandboxHooks, ReadyClaim, plan_attachments
from rackloom.claim.node.nic.status import claim_status, lease_status
from rackloom.claim.node.nri.client import PodSandbox
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.nics.attachment import AttachedLink, Attachment, LinkIdentity, PreparedNic
from rackloom.core.nics.lease import DhcpGrant, LeaseState, new_lease
from rackloom.errors import Retry

REF = ClaimRef(namespace="default", name="c", uid="u")


def nic(name, **changes):
    return PreparedNic(device=name, published=Device(name=name), **changes)


def conditions(reported):
    return {
        condition["type"]: (condition["status"], condition["reason"]) for condition in reported["conditions"]
    }


def test_an_rdma_device_without_interface_is_named_in_the_data():
    held = nic("pci-0000-10-00-0", rdma="rdmap16s27")
    attached = AttachedLink(name="", mac=None, addresses=())
    (reported,) = claim_status(REF, "n", {held.device: (held, attached)}, {}, 0.0)["status"]["devices"]
    assert reported["data"] == {"rdmaDevice": "rdmap16s27"}
    assert "networkData" not in reported
    assert conditions(reported) == {"Ready": ("True", "RDMAOnlyDeviceReady")}


def test_an_interface_with_rdma_of_its_own_namespace_has_three_conditions():
    held = nic("d", identity=LinkIdentity(name="eth1"), rdma="mlx5_0", moves_rdma=True)
    attached = AttachedLink(name="net1", mac="02:00:00:00:00:01", addresses=("10.0.0.2/24",))
    (reported,) = claim_status(REF, "n", {"d": (held, attached)}, {}, 0.0)["status"]["devices"]
    assert reported["networkData"] == {
        "interfaceName": "net1",
        "hardwareAddress": "02:00:00:00:00:01",
        "ips": ["10.0.0.2/24"],
    }
    assert set(conditions(reported)) == {"Ready", "NetworkReady", "RDMALinkReady"}
    (reported,) = claim_status(REF, "n", {"d": (held, "no such file")}, {}, 0.0)["status"]["devices"]
    assert set(conditions(reported).values()) == {("False", "AttachFailed")}
    assert reported["conditions"][0]["message"] == "no such file"


def status_of_lease(state):
    """The status of a lease that ended, or that no server has renewed since 2023-11-14T22:14:20Z."""
    grant = DhcpGrant(
        address="10.0.0.2/24",
        server="10.0.0.1",
        server_mac="02:00:00:00:00:09",
        seconds=100.0,
        renew_after=50.0,
        rebind_after=87.5,
    )
    dhcp_lease = msgspec.structs.replace(
        new_lease(grant, "02:00:00:00:00:01", 0.0), state=state, silent_since=60.0
    )
    return lease_status(dhcp_lease, lambda at: 1_700_000_000 + at)


@pytest.mark.parametrize(
    ("state", "ready", "leased"),
    [
        (LeaseState.HELD, ("True", "NetworkDeviceReady"), ("True", "DHCPLeaseHeld")),
        (LeaseState.SILENT, ("True", "NetworkDeviceReady"), ("Unknown", "DHCPRenewalFailed")),
        (LeaseState.EXPIRED, ("False", "DHCPLeaseExpired"), ("False", "DHCPLeaseExpired")),
        (LeaseState.REFUSED, ("False", "DHCPLeaseRefused"), ("False", "DHCPLeaseRefused")),
    ],
)
def test_a_lease_that_is_lost_takes_ready_away_and_a_silent_network_does_not(state, ready, leased):
    held = nic("d", identity=LinkIdentity(name="eth1"))
    attached = AttachedLink(name="net1", mac=None, addresses=())
    states = {"d": status_of_lease(state)}
    (reported,) = claim_status(REF, "n", {"d": (held, attached)}, states, 0.0)["status"]["devices"]
    assert conditions(reported) == {"Ready": ready, "NetworkReady": ready, "DHCPLeaseReady": leased}
    message = reported["conditions"][-1]["message"]
    assert ("since 2023-11-14T22:14:20Z" in message) == (state is LeaseState.SILENT)
    (reported,) = claim_status(REF, "n", {"d": (held, "no such file")}, states, 0.0)["status"]["devices"]
    assert conditions(reported)["Ready"] == ("False", "AttachFailed")


def test_a_nic_that_is_not_back_yet_is_told_and_keeps_no_other_from_its_pod():
    class Manager:
        attachments = SimpleNamespace(all=lambda: ())

        async def attach(self, _claim, _pod, prepared_nic, _netns):
            if prepared_nic.device == "late":
                raise Retry("NIC late is not back from its last pod yet", after=1.0)
            return AttachedLink(name="net1", mac=None, addresses=())

    reported = []
    prepared = {"u": ReadyClaim(ref=REF, pod="p", nics=(nic("late"), nic("here")))}
    sandboxes = NicSandboxHooks(Manager(), prepared, lambda *report: reported.append(report))
    sandbox = PodSandbox(id="s", pod="p", namespace="default", name="p", netns="/proc/self/ns/net")
    asyncio.run(sandboxes.synchronize((sandbox,)))
    assert [(prepared_nic.device, type(outcome)) for _, prepared_nic, _, outcome in reported] == [
        ("late", Retry),
        ("here", AttachedLink),
    ]
    with pytest.raises(Retry):
        asyncio.run(sandboxes.run(sandbox))


PODS = st.sampled_from(["a", "b", "c"])


@st.composite
def situations(draw):
    prepared = [
        ReadyClaim(
            ref=ClaimRef(namespace="n", name=f"c{number}", uid=f"u{number}"),
            pod=pod,
            nics=(nic(f"d{number}"),),
        )
        for number, pod in enumerate(draw(st.lists(PODS, max_size=4)))
    ]
    attachments = [
        Attachment(
            claim=f"u{number}",
            pod=draw(PODS),
            nic=nic(f"d{number}"),
            netns=draw(st.sampled_from(["/n/1", "/n/2"])),
            netns_id=1,
            boot_id="b",
            attached=draw(st.sampled_from([None, AttachedLink(name="x", mac=None, addresses=())])),
            returning=draw(st.booleans()),
        )
        for number in draw(st.sets(st.integers(0, 5)))
    ]
    living = [
        PodSandbox(
            id=pod, pod=pod, namespace="n", name=pod, netns=draw(st.sampled_from(["", "/n/1", "/n/2"]))
        )
        for pod in draw(st.sets(PODS))
    ]
    return prepared, attachments, living


@given(situations())
def test_every_nic_of_a_living_pod_ends_with_it_and_every_other_on_the_host(situation):
    prepared, attachments, living = situation
    todo = plan_attachments(prepared, attachments, living)
    alive = {(sandbox.pod, sandbox.netns) for sandbox in living if sandbox.netns}
    stay = [attachment for attachment in attachments if attachment not in todo.detach]
    assert all(
        (attachment.pod, attachment.netns) in alive and not attachment.returning for attachment in stay
    )
    lent = {(claim.ref.uid, held.device) for claim, held, _ in todo.attach}
    there = {
        (attachment.claim, attachment.nic.device) for attachment in stay if attachment.attached is not None
    }
    assert not lent & there
    for claim in prepared:
        if any(pod == claim.pod for pod, _ in alive):
            assert {(claim.ref.uid, held.device) for held in claim.nics} <= lent | there
    assert all(sandbox.pod == claim.pod and sandbox.netns for claim, _, sandbox in todo.attach)
