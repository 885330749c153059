"""Invented files of a machine: with any content, the published devices fit the API."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz import tries

from rackloom.claim.node.gpu.inventory import gpu_locations
from rackloom.claim.node.gpu.passthrough import read_vfio
from rackloom.claim.node.nic import plugin
from rackloom.claim.node.nic.inventory import _subsystems
from rackloom.core.nics.devices import NicSnapshot, host_nics
from rackloom.lab.nodes.host_files import host_files, write_sysroot
from rackloom.topology.discovery.discover import build_machine
from rackloom.topology.discovery.sysfs import Sysroot, read_host
from rackloom.topology.profiles import load_machine

FILES = host_files(load_machine("azure-nd96isr-h100-v5"))
PLACES = st.sampled_from(
    [path.lstrip("/") for path, content in FILES.tree.items() if isinstance(content, str)]
)
CONTENT = st.binary(max_size=100) | st.sampled_from(
    [
        b"",
        b"-1",
        b"0x020000",
        b"0x10de",
        b"9" * 5000,
        b"4: ACTIVE",
        b"1: DOWN",
        b"1e400 Gb/sec",
        b"mlx5_0\n",
        b"\0",
    ]
)
LIMITS = {"name": 63, "attributes": 32, "string": 64}


def checked(device):
    assert 0 < len(device.name) <= LIMITS["name"]
    assert len(device.attributes) + len(device.capacity) <= LIMITS["attributes"]
    for value in device.attributes.values():
        assert value.string is None or len(value.string.encode()) <= LIMITS["string"]
        assert value.int_ is None or -(2**63) <= value.int_ < 2**63


@pytest.mark.slow
@settings(max_examples=tries(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(wrong=st.dictionaries(PLACES, CONTENT, min_size=1, max_size=8))
def test_any_files_of_a_real_machine_are_published_within_the_limits(tmp_path_factory, wrong):
    """The H100 machine, with some of its files replaced."""
    root = tmp_path_factory.getbasetemp() / "hostile-sysroot"
    if not root.exists():
        write_sysroot(FILES, root)
    try:
        for place, content in wrong.items():
            (root / place).write_bytes(content)
        published(Sysroot(root))
    finally:
        for place in wrong:
            (root / place).write_text(FILES.tree[f"/{place}"])


def published(sysroot):
    host = read_host(sysroot)
    machine = build_machine(host)
    seen = NicSnapshot(host=host, machine=machine, subsystems=_subsystems(sysroot, host))
    for device in plugin._published_devices(plugin.NicSettings(node="n"), seen, host_nics(seen)).values():
        checked(device)
    assert all(place.numa_node is None or place.numa_node >= 0 for place in gpu_locations(machine).values())
    assert all(gpu.index >= 0 for gpu in read_vfio(sysroot))
