"""The files that an operator gives the plugin: profiles, attributes, a filter."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz import tries

from rackloom.claim.node.nic.config import (
    compile_filter,
    read_profiles,
    read_stated_attributes,
    with_stated_attributes,
)
from rackloom.claim.node.nic.inventory import HostScanner
from rackloom.core.allocate.objects import Device, DeviceAttribute
from rackloom.core.domains.network_config import decode_network_config
from rackloom.errors import Refused

PROFILES = """
rail:
  interface: {mtu: 9000, arpIgnore: 1}
  routes: [{destination: 10.0.0.0/8, gateway: 10.1.0.1}]
  rules: [{source: 10.1.0.0/16, table: 101}]
  ethtool: {features: {gro: true, tso: true}}
dhcp: {interface: {addressing: DHCP}}
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "file.yaml"


def test_a_configs_own_settings_win_and_lists_are_joined(file):
    file.write_text(PROFILES)
    route = {"destination": "10.0.0.0/8", "gateway": "10.1.0.1"}
    config = decode_network_config(
        {
            "profile": "rail",
            "interface": {"mtu": 1500, "name": "net1"},
            "routes": [route, {"destination": "10.2.0.0/16", "scope": 253}],
            "ethtool": {"features": {"tso": False}},
        }
    )
    both = read_profiles(file).applied_to(config)
    assert (both.interface.mtu, both.interface.arp_ignore, both.interface.name) == (1500, 1, "net1")
    assert [route.destination for route in both.routes] == ["10.0.0.0/8", "10.2.0.0/16"]
    assert both.rules[0].table == 101
    assert both.ethtool.features == {"gro": True, "tso": False}
    assert both.profile is None


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"profile": "gold"}, "profile 'gold' is not known: this node has dhcp, rail"),
        (
            {"profile": "dhcp", "interface": {"addresses": ["10.0.0.2/24"]}},
            "exclude each other; the profile and",
        ),
    ],
)
def test_a_profile_that_cannot_be_is_refused(file, config, reported):
    file.write_text(PROFILES)
    with pytest.raises(Refused, match=reported):
        read_profiles(file).applied_to(decode_network_config(config))


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[1]", "not a mapping"),
        ("a: 1", "not a mapping"),
        ("a: {interface: {mtu: 1}}", "profile a: NetworkConfig: interface.mtu is 1"),
        ("a: {profile: b}", "profile a refers to another one"),
        ("a: {", "is not YAML"),
    ],
)
def test_a_wrong_file_of_profiles_is_refused(file, text, reported):
    file.write_text(text)
    with pytest.raises(Refused, match=reported):
        read_profiles(file)


def test_what_is_said_of_one_device_wins_over_what_is_said_of_all(file):
    file.write_text("'*': {gce.dra.net/block: b1, example.com/up: true}\nnic0: {gce.dra.net/block: b2}\n")
    extras = read_stated_attributes(file)
    found = with_stated_attributes(
        Device(name="nic0", attributes={"mtu": DeviceAttribute(int_=1500)}), extras
    )
    assert found.attributes == {
        "mtu": DeviceAttribute(int_=1500),
        "gce.dra.net/block": DeviceAttribute(string="b2"),
        "example.com/up": DeviceAttribute(bool_=True),
    }
    assert with_stated_attributes(Device(name="nic1"), extras).attributes["gce.dra.net/block"].string == "b1"


@pytest.mark.parametrize(
    "text",
    [
        "nic0: {ifName: eth0}",
        "nic0: {dra.net/ifName: eth0}",
        "nic0: {resource.kubernetes.io/numaNode: 0}",
        "nic0: {example.com/x: 1.5}",
        f"nic0: {{example.com/x: {'a' * 65}}}",
        f"nic0: {{example.com/x: {2**63}}}",
        "nic0: 3",
        "nic0: {",
    ],
)
def test_an_attribute_that_may_not_be_stated_is_refused(file, text):
    file.write_text(text)
    with pytest.raises(Refused):
        read_stated_attributes(file)


@settings(max_examples=tries(100), suppress_health_check=list(HealthCheck))
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_file_is_read_or_refused(file, content):
    file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    for read in (read_profiles, read_stated_attributes):
        with contextlib.suppress(Refused):
            read(file)


@pytest.mark.parametrize(
    "read", [read_profiles, read_stated_attributes, lambda path: HostScanner(path, declared=path)]
)
def test_a_file_that_is_not_there_is_refused_by_its_name(read, tmp_path):
    with pytest.raises(Refused, match="missing cannot be read: No such file"):
        read(tmp_path / "missing")


NIC = Device(
    name="nic0",
    attributes={
        "type": DeviceAttribute(string="veth"),
        "mtu": DeviceAttribute(int_=1500),
        "rdma": DeviceAttribute(bool_=False),
        "resource.kubernetes.io/numaNode": DeviceAttribute(int_=1),
    },
)


@pytest.mark.parametrize(
    ("expression", "is_published"),
    [
        ("attributes['dra.net/type'].StringValue != 'veth'", False),
        ('attributes["dra.net/mtu"].IntValue >= 1500', True),
        ("'dra.net/ifName' in attributes", False),
        ("!attributes['dra.net/rdma'].BoolValue", True),
        ("attributes['resource.kubernetes.io/numaNode'].IntValue == 1", True),
        ("attributes['dra.net/ifName'].StringValue == 'eth0'", True),
        ("attributes['dra.net/mtu'].IntValue", False),
        ("", True),
    ],
)
def test_a_filter_is_dranets(expression, is_published):
    """The one for eth0 cannot be evaluated, the next is no truth value, and an empty one filters nothing."""
    assert compile_filter(expression)(NIC) is is_published


@pytest.mark.parametrize("expression", ["1 +", "3", "device.driver == 'dra.net'"])
def test_a_filter_that_can_never_be_evaluated_is_refused(expression):
    with pytest.raises(Refused, match="--filter"):
        compile_filter(expression)
