"""Links of every kind that this kernel can make, moved into a pod and back."""

import pytest
from tests.claim.node.nic.nic_kit import held, make_link, needs_root, now, require_kind

from rackloom.claim.node.nic.links import attach_link, detach_link

pytestmark = needs_root
KINDS = {
    "macvlan": {"macvlan_mode": "bridge", "below": "nic0"},
    "ipvlan": {"ipvlan_mode": 0, "below": "nic0"},
    "vlan": {"vlan_id": 100, "below": "nic0"},
    "dummy": {},
    "ifb": {},
    "vxlan": {"vxlan_id": 5, "vxlan_port": 4789},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_moves_into_a_pod_and_back_as_it_was(host, kind):
    host.veth("nic0", "tor0")
    make_link(host, "it", kind, **KINDS[kind])
    pod = host.pod()
    identity, before, wanted = held(host, "it", interface={"name": "net1", "addresses": ["10.9.0.3/24"]})
    attach_link(identity, wanted, pod.path)
    assert pod.addresses("net1") == {"10.9.0.3/24"}
    assert detach_link(identity, before, pod.path)
    assert now(host, identity) == before


def test_in_a_vrf_its_routes_are_in_the_vrfs_table(host):
    require_kind(host, "vrf", vrf_table=9)
    host.veth("nic0", "tor0")
    pod = host.pod()
    vrf = {"name": "red", "table": 1500}
    identity, before, wanted = held(
        host,
        "nic0",
        interface={"addresses": ["10.9.0.3/24"], "vrf": vrf},
        routes=[{"destination": "10.50.0.0/16", "gateway": "10.9.0.1"}],
    )
    attach_link(identity, wanted, pod.path)
    assert pod.ip(lambda ipr: len(list(ipr.get_routes(table=1500, dst_len=16)))) == 1
    assert detach_link(identity, before, pod.path)
    assert now(host, identity) == before
