"""Attacks on children of NICs."""

from rackloom.core.nics.attachment import NetworkLink, SegmentationSizes, child_identity, find_link


def link(name: str, **more) -> NetworkLink:
    facts = {"index": 7, "kind": "", "mac": None, "permanent_mac": None, "mtu": 1500, "up": True,
             "state": "up", "encapsulation": "ether", "alias": None, "master": None, "parent": None,
             "loopback": False, "sizes": SegmentationSizes()}
    return NetworkLink(name=name, **{**facts, **more})


def test_an_interface_that_a_cni_plugin_made_over_the_same_nic_is_not_the_claims_child():
    foreign = link("net1", index=2, kind="macvlan", over=7)
    assert find_link((foreign,), child_identity(link("eth1"), "macvlan", "nic-1", "net1")) is None
