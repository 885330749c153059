import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz import tries

from rackloom.topology.discovery.discover import build_machine
from rackloom.topology.discovery.sysfs import MAX_FILE_BYTES, Sysroot, read_host

PARTS = st.sampled_from(
    ["sys", "proc", "..", ".", "class", "net", "infiniband", "eth0", "device", "ports", "1"]
)
PLACES = st.sampled_from(
    [
        "sys/bus/pci/devices/0000:01:00.0/class",
        "sys/bus/pci/devices/0000:01:00.0/vendor",
        "sys/bus/pci/devices/0000:01:00.0/device",
        "sys/bus/pci/devices/0000:01:00.0/numa_node",
        "sys/bus/pci/devices/zz/class",
        "sys/class/net/eth0/speed",
        "sys/class/infiniband/mlx5_0/ports/1/rate",
        "sys/class/infiniband/mlx5_0/ports/x/state",
        "proc/driver/nvidia/gpus/0000:01:00.0/information",
        "proc/net/route",
        "proc/net/ipv6_route",
        "proc/sys/kernel/hostname",
    ]
)
CONTENT = st.binary(max_size=300) | st.sampled_from(
    [b"0x030200", b"0x10de", b"-1", b"9" * 5000, b"4: ACTIVE", b"1e400 Gb/sec", b"Device Minor: 99999999999"]
)
LINKS = st.lists(PARTS, min_size=1, max_size=6).map("/".join)


def test_links_never_lead_out_of_the_root(tmp_path):
    (tmp_path / "secret").write_text("outside")
    root = tmp_path / "root"
    (root / "sys").mkdir(parents=True)
    (root / "sys" / "up").symlink_to("../../../secret")
    (root / "sys" / "away").symlink_to(tmp_path / "secret")
    assert Sysroot(root).text("/sys/up") is None
    assert Sysroot(root).text("/sys/away") is None


def test_an_absolute_link_starts_at_the_root(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "real").write_text("inside\n")
    (tmp_path / "link").symlink_to("/proc/real")
    assert Sysroot(tmp_path).text("/link") == "inside"
    assert str(Sysroot(tmp_path).real("/link")) == "/proc/real"


def test_a_link_with_two_slashes_starts_at_the_root_too(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (root / "to-there").symlink_to(f"/{outside}")
    (root / "inside").mkdir()
    (root / "to-here").symlink_to("//inside")
    assert Sysroot(root).real("/to-there") is None
    assert str(Sysroot(root).real("/to-here")) == "/inside"


def test_links_in_a_circle_lead_nowhere(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert Sysroot(tmp_path).real("/a") is None


def test_a_huge_file_is_read_up_to_a_bound(tmp_path):
    (tmp_path / "huge").write_bytes(b"x" * (MAX_FILE_BYTES + 10))
    assert len(Sysroot(tmp_path).text("/huge") or "") == MAX_FILE_BYTES


def test_numbers(tmp_path):
    for name, content in {"hex": "0x10de\n", "minus": "-1\n", "none": "N/A\n", "long": "9" * 9999}.items():
        (tmp_path / name).write_text(content)
    root = Sysroot(tmp_path)
    assert [root.number(f"/{name}") for name in ("hex", "minus", "none", "long", "absent")] == [
        0x10DE,
        -1,
        None,
        None,
        None,
    ]


@pytest.mark.slow
@settings(max_examples=tries(300), deadline=None)
@given(files=st.dictionaries(PLACES, CONTENT, max_size=8), links=st.dictionaries(PLACES, LINKS, max_size=4))
def test_no_tree_is_a_surprise(tmp_path_factory, files, links):
    root = tmp_path_factory.mktemp("root")
    for place, content in files.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(content)
    for place, target in links.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (root / place).symlink_to(target)
    machine = build_machine(read_host(Sysroot(root)))
    assert all(gpu.numa_node is None or gpu.numa_node.value >= 0 for gpu in machine.gpus)
