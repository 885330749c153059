import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz import tries

from rackloom.core.domains.network_config import NetworkConfig, VrfConfig, decode_network_config
from rackloom.errors import Refused

FULL = {
    "profile": "rail",
    "interface": {
        "name": "rdma0",
        "addresses": ["10.0.0.5/24", "fd00::5/64"],
        "mtu": 9000,
        "hardwareAddr": "02:00:00:00:00:05",
        "gsoIPv4MaxSize": 65536,
        "arpIgnore": 8,
        "arpAnnounce": 2,
    },
    "routes": [
        {"destination": "10.1.0.0/16", "gateway": "10.0.0.1"},
        {"destination": "10.0.0.0/24", "scope": 253, "table": 101},
    ],
    "rules": [{"priority": 100, "source": "10.0.0.5/32", "table": 101}],
    "neighbors": [{"destination": "10.0.0.1", "hardwareAddr": "02:00:00:00:00:01"}],
    "ethtool": {"features": {"tx-checksumming": False}, "privateFlags": {"rx_cqe_moder": True}},
}
KEYS = st.sampled_from([*FULL, *FULL["interface"], "vrf", "destination", "gateway", "table", "x"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.text(max_size=20)
    | st.sampled_from(["10.0.0.1", "::1/64", "0.0.0.0/0", "02:00:00:00:00:01", "eth0"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


def test_a_full_config_is_read():
    config = decode_network_config(FULL)
    assert config.interface.gso_ipv4_max_size == 65536
    assert config.routes[1].table == 101
    assert config.asks_for_a_netdev


def test_a_profile_alone_is_fit_for_a_device_without_a_netdev():
    assert not decode_network_config({"profile": "rail"}).asks_for_a_netdev
    assert decode_network_config({}) == NetworkConfig()


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ({"name": "a-name-too-long-x"}, "1 to 15 bytes"),
        ({"name": "a/b"}, "'/'"),
        ({"name": ""}, "1 to 15 bytes"),
        ({"addresses": ["10.0.0.5"]}, "not a CIDR"),
        ({"addresses": ["10.0.0.5/40"]}, "not a CIDR"),
        ({"addresses": ["10.0.0.5/24"], "dhcp": True}, "exclude each other"),
        ({"mtu": 67}, "below 68"),
        ({"hardwareAddr": "02:00"}, "6 (or, for InfiniBand, 20) bytes"),
        ({"groMaxSize": 0}, "positive"),
        ({"arpIgnore": 4}, "0, 1, 2, 3, 8"),
        ({"arpAnnounce": 3}, "0, 1 or 2"),
        ({"vrf": {"name": "blue", "table": 254}}, "the kernel uses itself"),
        ({"vrf": {}}, "name"),
        ({"mtuu": 1500}, "mtuu"),
        ({"acceptRA": 3}, "acceptRA is 3, not 0 to 2"),
        ({"addrGenMode": 4}, "addrGenMode is 4, not 0 to 3"),
        ({"dadTransmits": -1}, "dadTransmits is -1"),
        ({"routerSolicitationInterval": 0}, "routerSolicitationInterval is 0, not 1 to"),
        ({"disableIPv6": False, "mtu": 1279}, "below 1280"),
        ({"disableIPv6": True, "addresses": ["fd00::5/64"]}, "exclude each other"),
        ({"type": "MACVTAP"}, "MACVTAP"),
        ({"type": "MACVLAN"}, "MACVLAN has no address: give interface.addresses"),
        ({"type": "IPVLAN"}, "IPVLAN has no address"),
        ({"type": "IPVLAN", "addressing": "Unnumbered", "addresses": ["10.0.0.5/24"]}, "exclude each other"),
        ({"type": "MACVLAN", "addressing": "DHCP"}, "does not go with type MACVLAN"),
        ({"addressing": "DHCP", "addresses": ["10.0.0.5/24"]}, "exclude each other"),
        ({"addressing": "DHCP", "dhcp": False}, "interface.dhcp is false, but interface.addressing is DHCP"),
        ({"addressing": "SLAAC", "dhcp": True}, "interface.dhcp is true, but interface.addressing is SLAAC"),
        ({"addressing": "Unnumbered"}, "goes with types IPVLAN and MACVLAN only"),
        ({"type": "IPVLAN", "hardwareAddr": "02:00:00:00:00:05"}, "does not go with type IPVLAN"),
        ({"type": "IPVLAN", "addressing": "DHCP"}, "does not go with type IPVLAN"),
        ({"addressing": "SLAAC", "addresses": ["fd00::5/64"]}, "SLAAC does not go with an IPv6 address"),
        ({"addressing": "SLAAC", "acceptRA": 0}, "SLAAC does not go with interface.acceptRA 0"),
        ({"addressing": "SLAAC", "addrGenMode": 2}, "SLAAC does not go with interface.addrGenMode"),
    ],
)
def test_what_is_wrong_with_an_interface_is_named(interface, message):
    with pytest.raises(Refused) as refused:
        decode_network_config({"interface": interface})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"routes": [{"destination": "10.0.0.0/8"}]}, "universe scope needs one"),
        ({"routes": [{"destination": "10.0.0.0/8", "gateway": "fd00::1"}]}, "different families"),
        ({"routes": [{"destination": "10.0.0.0/8", "scope": 254}]}, "scope is 254"),
        ({"rules": [{"table": -1}]}, "not a routing table"),
        ({"rules": [{"table": 5, "priority": 40000}]}, "0 to 32767"),
        ({"rules": [{"table": 5}], "interface": {"vrf": {"name": "blue"}}}, "rules do not go with"),
        ({"neighbors": [{"destination": "10.0.0.0/8", "hardwareAddr": "x"}]}, "not an address"),
    ],
)
def test_what_is_wrong_elsewhere_is_named(config, message):
    with pytest.raises(Refused) as refused:
        decode_network_config(config)
    assert message in str(refused.value)


def test_settings_of_ipv6_are_read_by_the_kernels_names():
    config = decode_network_config(
        {"interface": {"addressing": "SLAAC", "acceptRA": 1, "disableIPv6": False, "dadTransmits": 0}}
    )
    assert config.interface.ipv6 == {"accept_ra": 1, "disable_ipv6": 0, "dad_transmits": 0}


def test_a_rule_without_a_table_is_for_the_main_one():
    assert decode_network_config({"rules": [{"source": "10.0.0.5/32"}]}).rules[0].table == 0


def test_all_problems_are_told_at_once():
    with pytest.raises(Refused) as refused:
        decode_network_config({"interface": {"mtu": 1, "arpIgnore": 9}})
    assert "mtu" in str(refused.value)
    assert "arpIgnore" in str(refused.value)


@pytest.mark.slow
@settings(max_examples=tries(500))
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_no_input_is_a_surprise(parameters):
    with contextlib.suppress(Refused):
        decode_network_config(parameters)


def test_a_vrf_without_a_table_gets_one_from_its_name():
    assert VrfConfig(name="blue").routing_table == VrfConfig(name="blue").routing_table
    assert 1000 <= VrfConfig(name="blue").routing_table < 2000
    assert VrfConfig(name="blue", table=7).routing_table == 7
