"""Invented configs: each is refused, or understood down to the last byte, and none does harm."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.claim.node.nic.nic_kit import needs_root
from tests.fuzz import tries

from rackloom.claim.node.nic import links, netlink, rdma
from rackloom.claim.node.nic.links import read_links, read_settings
from rackloom.claim.node.nic.netlink import Rtnetlink
from rackloom.claim.node.nic.plugin import nic_config, prepare_nic
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster.claims import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimConsumer,
    ClaimRef,
    OpaqueConfig,
)
from rackloom.core.nics.attachment import LinkSettings, pod_settings
from rackloom.core.nics.devices import HostLink, HostNic, parse_pci_ids
from rackloom.errors import Refused
from rackloom.topology.discovery.sysfs import Sysroot

NUMBERS = st.integers(-(2**40), 2**40) | st.sampled_from([0, 1, 68, 253, 254, 255, 1500, 32767, 2**32 - 1])
ADDRESSES = st.one_of(
    st.ip_addresses().map(str),
    st.tuples(st.ip_addresses(), st.integers(0, 140)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    st.sampled_from(["10.0.0.1/24", "0.0.0.0/0", "::/0", "fe80::1/64", "127.0.0.1/8", "", "10.0.0.0/24/7"]),
)
MACS = st.sampled_from(["02:00:00:00:00:01", "02-00-00-00-00-01", "ff:ff:ff:ff:ff:ff", ":".join(["0a"] * 20)])
TEXTS = (
    st.text(max_size=20) | ADDRESSES | MACS | st.sampled_from(["eth0", "lo", "..", "a/b", "x" * 16, "é" * 8])
)
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def shape(**fields):
    """A mapping with some of `fields`, of which one may be junk."""
    return st.fixed_dictionaries(
        {}, optional={n: st.one_of(s, s, s, s, s, s, s, JUNK) for n, s in fields.items()}
    )


FLAGS = st.dictionaries(st.sampled_from(["gro", "tso", "warp", "a" * 40]) | TEXTS, st.booleans(), max_size=3)
CONFIGS = shape(
    interface=shape(
        name=TEXTS,
        addresses=st.lists(ADDRESSES, max_size=3),
        mtu=NUMBERS,
        hardwareAddr=MACS | TEXTS,
        gsoMaxSize=NUMBERS,
        groIPv4MaxSize=NUMBERS,
        arpIgnore=NUMBERS,
        acceptRA=NUMBERS,
        dadTransmits=NUMBERS,
        routerSolicitationInterval=NUMBERS,
        addrGenMode=NUMBERS,
        disableIPv6=st.booleans(),
        # Not DHCP: no server answers here, and the wait takes its time.
        addressing=st.sampled_from(["Static", "SLAAC", "Unnumbered", "dhcp"]),
        type=st.sampled_from(["Passthrough", "IPVLAN", "MACVLAN", "MACVTAP"]),
        forwarding=st.booleans(),
        disableEbpfPrograms=st.booleans(),
        vrf=shape(name=TEXTS, table=NUMBERS),
    ),
    routes=st.lists(
        shape(destination=ADDRESSES, gateway=ADDRESSES, source=ADDRESSES, scope=NUMBERS, table=NUMBERS),
        max_size=2,
    ),
    rules=st.lists(
        shape(priority=NUMBERS, source=ADDRESSES, destination=ADDRESSES, table=NUMBERS), max_size=2
    ),
    neighbors=st.lists(shape(destination=ADDRESSES, hardwareAddr=MACS), max_size=2),
    ethtool=shape(features=FLAGS, privateFlags=FLAGS),
)
V4 = st.ip_addresses(v=4).map(str)
V4_CIDRS = st.tuples(V4, st.integers(0, 32)).map(lambda pair: f"{pair[0]}/{pair[1]}")
V6_CIDRS = st.tuples(st.ip_addresses(v=6), st.integers(0, 128)).map(lambda pair: f"{pair[0]}/{pair[1]}")
TABLES = st.integers(1, 252) | st.integers(256, 2**32 - 1)
SIZES = st.integers(1, 2**32 - 1)
ACCEPTED = st.fixed_dictionaries(
    {},
    optional={
        "interface": st.fixed_dictionaries(
            {},
            optional={
                "name": st.text(alphabet="abz019._-@é", min_size=3, max_size=7),
                "addresses": st.lists(V4_CIDRS | V6_CIDRS, max_size=3),
                "mtu": st.integers(1280, 2**31 - 1),
                "hardwareAddr": MACS,
                "gsoMaxSize": SIZES,
                "groIPv4MaxSize": SIZES,
                "arpIgnore": st.sampled_from([0, 1, 2, 3, 8]),
                "dadTransmits": st.integers(0, 2**31 - 2),
                "routerSolicitationDelay": st.integers(0, 2**20),
                "addrGenMode": st.sampled_from([0, 3]),
                "forwarding": st.booleans(),
                "disableEbpfPrograms": st.booleans(),
            },
        ),
        "routes": st.lists(
            st.fixed_dictionaries({"destination": V4_CIDRS, "gateway": V4}, optional={"table": TABLES}),
            max_size=2,
        ),
        "rules": st.lists(
            st.fixed_dictionaries(
                {"table": TABLES}, optional={"priority": st.integers(0, 32767), "source": V6_CIDRS}
            ),
            max_size=2,
        ),
        "neighbors": st.lists(st.fixed_dictionaries({"destination": V4, "hardwareAddr": MACS}), max_size=2),
        "ethtool": st.fixed_dictionaries({}, optional={"features": FLAGS, "privateFlags": FLAGS}),
    },
)
HOST = LinkSettings(name="nic0", addresses=("10.9.0.2/24",))
RESULT = AllocatedDevice(driver="d", request="r", pool="n", device="nic0")


def asked(parameters):
    """The config that a claim with `parameters` requests, or None if it is refused."""
    claim = AllocatedClaim(
        ref=ClaimRef(namespace="default", name="c", uid="u"),
        results=(RESULT,),
        configs=(OpaqueConfig(source="FromClaim", requests=(), parameters=parameters),),
        fingerprint="",
        consumers=(ClaimConsumer(resource="pods", name="p", uid="p"),),
    )
    try:
        return nic_config(claim, RESULT)
    except Refused:
        return None


POOL = (
    *(
        None,
        True,
        -1,
        0,
        68,
        255,
        2**32,
        2**70,
        1.5,
        "",
        "lo",
        "..",
        "a/b",
        "x" * 16,
        "é" * 8,
        [],
        {},
        [{}],
        {"x": 1},
    ),
    *("10.0.0.1", "10.0.0.1/24", "::/0", "fe80::1/64", "10.0.0.0/24/7", "02:00:00:00:00:01", "zz:00"),
)


def mutant(value, random):
    """`value` with an item of the pool in a random place, or with a field too many."""
    if not value or not isinstance(value, dict | list) or random.random() < 0.15:
        return random.choice(POOL)
    place = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    changed[place] = mutant(value[place], random)
    if isinstance(value, dict) and random.random() < 0.05:
        changed["more"] = random.choice(POOL)
    return changed


@pytest.mark.slow
@settings(max_examples=tries(10_000) // 25, suppress_health_check=list(HealthCheck))
@given(ACCEPTED | CONFIGS, st.randoms(use_true_random=False))
def test_ten_thousand_configs_are_refused_or_understood_to_the_last_byte(parameters, random):
    """Configs, and 24 mutants of each. The API server takes only objects."""
    understood(parameters)
    seeded = Random(random.getrandbits(32))
    for _ in range(24):
        changed = mutant(parameters, seeded)
        understood(changed if isinstance(changed, dict) else {"interface": changed})


def understood(parameters):
    """The config is refused, or every request that follows from it can be written."""
    config = asked(parameters)
    if config is None:
        return
    wanted = pod_settings(config, HOST)
    for message in (*netlink.link_setting_requests(7, wanted), *links._when_up(7, wanted)):
        assert message.encode()
    for cidr in wanted.addresses:
        assert netlink.address_request(7, cidr).encode()
    if wanted.vrf is not None:
        assert netlink.make_vrf(wanted.vrf).encode()


@given(ACCEPTED)
def test_configs_that_should_be_accepted_are(parameters):
    assert asked(parameters) is not None


@pytest.mark.slow
@needs_root
def test_preparing_with_any_of_them_touches_no_device(host, monkeypatch):
    host.veth("nic0", "tor0")
    host.address("nic0", "10.9.0.2/24")

    def refuse(*_):
        raise AssertionError("a device was touched")

    monkeypatch.setattr(Rtnetlink, "execute", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)

    def look():
        with Rtnetlink() as rtnetlink:
            link = next(read_link for read_link in read_links(rtnetlink) if read_link.name == "nic0")
            return link, read_settings(rtnetlink, link, features=True)

    link, before = host.call(look)
    held = []

    @settings(max_examples=tries(300), suppress_health_check=list(HealthCheck), database=None)
    @given(CONFIGS | ACCEPTED)
    def attempt(parameters):
        config = asked(parameters)
        if config is not None:
            host_nic = HostNic(name="nic0", on=HostLink(link=link))
            held.append(
                prepare_nic(host_nic, Device(name="nic0"), config, Sysroot(), rdma.NetnsMode.SHARED)[0]
            )

    attempt()
    assert held
    assert host.call(look) == (link, before)


@settings(max_examples=tries(100))
@given(st.text(alphabet="\t 0123456789abcdefC#x\n"))
def test_any_list_of_pci_names_is_read(text):
    for vendor, device in parse_pci_ids(text).devices:
        assert 0 <= vendor < 2**16
        assert 0 <= device < 2**16


@pytest.mark.slow
@settings(max_examples=tries(100), deadline=None)
@given(st.dictionaries(st.sampled_from(["uverbs0", "umad0", "issm0", "uverbs-x"]), st.binary(max_size=20)))
def test_any_files_of_rdma_devices_are_read(tmp_path_factory, files):
    root = tmp_path_factory.mktemp("sysroot")
    for directory in ("infiniband_verbs", "infiniband_mad"):
        for name, content in files.items():
            at = root / "sys/class" / directory / name
            at.mkdir(parents=True)
            (at / "dev").write_bytes(content)
            (at / "ibdev").write_bytes(b"mlx5_0")
    for node in rdma.rdma_device_nodes(Sysroot(root), "mlx5_0"):
        assert node.major >= 0
