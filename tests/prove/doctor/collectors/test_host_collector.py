"""A host's files read into evidence."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.prove.doctor.collectors.host import collect_host
from rackloom.prove.doctor.evidence import CdiSetting
from rackloom.topology.discovery.sysroot import LONGEST_TABLE

TCP = """  sl  local_address rem_address   st tx_queue rx_queue
   0: 00000000:C350 00000000:0000 0A 00000000:00000000
   1: 0100007F:C355 0100007F:0016 01 00000000:00000000
"""
TCP6 = """  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 0
"""


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_nothing_to_read_is_unknown_and_not_well(tmp_path):
    seen = collect_host("n", tmp_path, None)
    assert (seen.driver_version, seen.imex.outside) == (None, None)
    assert seen.cdi_setting is CdiSetting.UNSAID
    assert (seen.imex.enabled, seen.busy_ports) == (None, None)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/module/nvidia/version", "580.95.05\n"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (b@h)\n"
            "GCC version:  gcc version 13.3.0\n",
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n",
        ),
    ],
)
def test_the_driver_is_the_loaded_module(tmp_path, path, text):
    put(tmp_path, path, text)
    assert collect_host("n", tmp_path, None).driver_version == "580.95.05"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", CdiSetting.UNSAID),
        ("version = 2\n", CdiSetting.UNSAID),
        ("version = 3\n", CdiSetting.ON),
        ("[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = true\n", CdiSetting.ON),
        ("[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n", CdiSetting.OFF),
        ("no toml [", CdiSetting.UNREADABLE),
    ],
)
def test_cdi_is_what_containerd_is_configured_to(tmp_path, text, said):
    put(tmp_path, "etc/containerd/config.toml", text)
    assert collect_host("n", tmp_path, "containerd://1.7.0").cdi_setting is said


def test_only_a_daemon_outside_of_pods_is_the_hosts(tmp_path):
    processes = {
        "1": ("systemd", "0::/init.scope"),
        "71": ("nvidia-imex", "0::/system.slice/nvidia-imex.service"),
        "72": ("nvidia-imex", "0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-1.scope"),
        "73": ("sshd", "0::/system.slice/ssh.service"),
    }
    for pid, (name, cgroup) in processes.items():
        put(tmp_path, f"proc/{pid}/comm", f"{name}\n")
        put(tmp_path, f"proc/{pid}/cgroup", f"{cgroup}\n")
    assert collect_host("n", tmp_path, None).imex.outside == (71,)


def test_a_unit_that_is_wanted_at_boot(tmp_path):
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    assert collect_host("n", tmp_path, None).imex.enabled is False
    put(tmp_path, "etc/systemd/system/multi-user.target.wants/nvidia-imex.service", "")
    assert collect_host("n", tmp_path, None).imex.enabled is True


IMEX_DEVICES = "Character devices:\n  1 mem\n235 nvidia-caps-imex-channels\n\nBlock devices:\n  8 sd\n"


@pytest.mark.parametrize(
    ("text", "offered"),
    [(None, None), (IMEX_DEVICES, True), (IMEX_DEVICES.replace("235 ", "235 x"), False), ("", False)],
)
def test_channels_are_offered_by_the_driver_that_has_numbers_for_them(tmp_path, text, offered):
    if text is not None:
        put(tmp_path, "proc/devices", text)
    assert collect_host("n", tmp_path, None).imex.offered is offered


def test_channels_whose_devices_are_on_the_host(tmp_path):
    for name in ("channel7", "channel0", "channel", "nvidia-cap1", "channel99999"):
        put(tmp_path, f"dev/nvidia-caps-imex-channels/{name}", "")
    assert collect_host("n", tmp_path, None).imex.channels == (0, 7)


NODES = "# of the rack\n10.0.0.1\n\n10.0.0.2  # the second\nfd00::3\n"


@pytest.mark.parametrize(
    ("config", "file", "named"),
    [
        (None, "etc/nvidia-imex/nodes_config.cfg", None),
        ("SERVER_PORT=50000\n", "etc/nvidia-imex/nodes_config.cfg", ("10.0.0.1", "10.0.0.2", "fd00::3")),
        ("IMEX_NODE_CONFIG_FILE=/srv/nodes\n", "srv/nodes", ("10.0.0.1", "10.0.0.2", "fd00::3")),
        ("#IMEX_NODE_CONFIG_FILE=/srv/nodes\n", "srv/nodes", ()),
        ("IMEX_NODE_CONFIG_FILE=\n", "srv/nodes", ()),
    ],
)
def test_the_nodes_are_those_of_the_file_that_the_configuration_names(tmp_path, config, file, named):
    if config is not None:
        put(tmp_path, "etc/nvidia-imex/config.cfg", config)
    put(tmp_path, file, NODES)
    assert collect_host("n", tmp_path, None).imex.named == named


PEERS = """  sl  local_address rem_address   st
   0: 0100000A:C350 00000000:0000 0A
   1: 0100000A:9C40 0200000A:C350 01
   2: 0100000A:9C41 0200000A:C350 01
   3: 0100000A:9C42 0300000A:C350 01
   4: 0100000A:9C43 0400000A:C350 02
   5: 0100000A:C350 0500000A:9C40 01
"""


def test_peers_are_those_that_a_daemon_is_connected_with_in_its_own_namespace(tmp_path):
    for pid, name in (("1", "systemd"), ("71", "nvidia-imex"), ("72", "sshd")):
        put(tmp_path, f"proc/{pid}/comm", f"{name}\n")
        put(tmp_path, f"proc/{pid}/cgroup", "0::/kubepods.slice/pod1\n")
    assert collect_host("n", tmp_path, None).imex.connected is None
    put(tmp_path, "proc/71/net/tcp", PEERS)
    put(tmp_path, "proc/72/net/tcp", PEERS.replace("0300000A", "0900000A"))
    seen = collect_host("n", tmp_path, None)
    assert (seen.imex.running, seen.imex.outside, seen.imex.connected) == ((71,), (), 2)
    assert seen.busy_ports is None


def test_listening_sockets_of_both_families(tmp_path):
    put(tmp_path, "proc/1/net/tcp", TCP)
    put(tmp_path, "proc/1/net/tcp6", TCP6)
    assert collect_host("n", tmp_path, None).busy_ports == {50000, 22}


CONFIG = "etc/containerd/config.toml"
ON = "[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n"
OFF = ON.replace("true", "false")


@pytest.mark.parametrize(
    ("own", "imported", "said"),
    [
        ("imports = ['/etc/containerd/conf.d/*.toml']\n", ON, CdiSetting.ON),
        ("imports = ['conf.d/9?-*.toml']\n", ON, CdiSetting.ON),
        ("version = 3\nimports = ['conf.d/*.toml']\n", "", CdiSetting.ON),
        ("version = 3\nimports = ['conf.d/*.toml']\n", OFF, CdiSetting.OFF),
        ("imports = ['conf.d/*.toml']\n" + ON, OFF, CdiSetting.OFF),
        ("imports = ['elsewhere/*.toml']\n" + ON, OFF, CdiSetting.ON),
        ("imports = ['*.toml', 'conf.d/*.toml']\n", ON, CdiSetting.ON),
        ("imports = ['conf.d/*.toml']\n" + ON, "no toml [", CdiSetting.UNREADABLE),
    ],
)
def test_what_containerd_imports_counts_over_its_own_file(tmp_path, own, imported, said):
    put(tmp_path, CONFIG, own)
    put(tmp_path, "etc/containerd/conf.d/99-nvidia.toml", imported)
    assert collect_host("n", tmp_path, None).cdi_setting is said


@pytest.mark.parametrize(
    "text",
    [
        "plugins = 'x'\n",
        "[plugins]\n'io.containerd.cri.v1.runtime' = 7\n",
        "[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = 'false'\n",
        "imports = 'x'\n",
        "a = " + "[" * 5000 + "]" * 5000,
        "a = " + "9" * 5000,
    ],
)
def test_a_configuration_that_is_none_of_containerds_is_not_understood(tmp_path, text):
    put(tmp_path, CONFIG, text)
    assert collect_host("n", tmp_path, None).cdi_setting is CdiSetting.UNREADABLE


def test_a_version_that_is_no_number_switches_nothing_on(tmp_path):
    put(tmp_path, CONFIG, "version = '3'\n")
    assert collect_host("n", tmp_path, None).cdi_setting is CdiSetting.UNSAID


OWN = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("commands", "setting"),
    [
        ({"70": ["containerd", "-c", OWN]}, CdiSetting.OFF),
        ({"70": ["/usr/bin/containerd", f"--config={OWN}", "-l", "info"]}, CdiSetting.OFF),
        ({"70": ["containerd"]}, CdiSetting.ON),
        ({"70": ["containerd"], "90": ["containerd", "--config", OWN]}, CdiSetting.ON),
        ({}, CdiSetting.ON),
    ],
)
def test_the_configuration_is_the_one_that_containerd_was_started_with(tmp_path, commands, setting):
    """Of several nobody can tell which one kubelet asks, and the usual file counts."""
    put(tmp_path, CONFIG, ON)
    put(tmp_path, OWN.lstrip("/"), OFF)
    for pid, words in commands.items():
        put(tmp_path, f"proc/{pid}/comm", "containerd\n")
        put(tmp_path, f"proc/{pid}/cmdline", "\0".join(words) + "\0")
    assert collect_host("n", tmp_path, None).cdi_setting is setting


def test_sockets_that_are_no_table_are_unknown(tmp_path):
    put(tmp_path, "proc/1/net/tcp", "header\n 0: 00000000:ZZZZ 0:0 0A\n")
    assert collect_host("n", tmp_path, None).busy_ports is None


def test_a_table_that_is_too_long_to_be_read_in_full_is_unknown(tmp_path):
    put(tmp_path, "proc/1/net/tcp", TCP)
    with (tmp_path / "proc/1/net/tcp").open("ab") as file:
        file.truncate(LONGEST_TABLE + 1)
    assert collect_host("n", tmp_path, None).busy_ports is None


def test_a_process_is_a_decimal_number(tmp_path):
    put(tmp_path, "proc/1/comm", "systemd\n")
    put(tmp_path, "proc/\u00b2/comm", "nvidia-imex\n")
    assert collect_host("n", tmp_path, None).imex.outside == ()


@pytest.mark.parametrize("path", [CONFIG, "proc/1/net/tcp", "sys/module/nvidia/version"])
def test_a_pipe_is_not_waited_for(tmp_path, path):
    (tmp_path / path).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / path)
    seen = collect_host("n", tmp_path, None)
    assert (seen.busy_ports, seen.driver_version) == (None, None)
    assert seen.cdi_setting is (CdiSetting.UNREADABLE if path == CONFIG else CdiSetting.UNSAID)


@pytest.mark.parametrize(
    ("cgroup", "processes"),
    [
        ("0::/../../pod6a1c2f04-0f0b-4c0e-9d59-0b6a3f0e7c11/4f2a", ()),
        ("0::/../../kubelet-kubepods-pod6a1c2f04_0f0b_4c0e.slice/cri-containerd-4f2a.scope", ()),
        ("0::/../cri-containerd-4f2a.scope", ()),
        ("0::/../crio-4f2a.scope", ()),
        ("0::/../../4f2a", None),
        ("0::/../../podman.slice/4f2a", None),
        ("0::/../../../../system.slice/nvidia-imex.service", (72,)),
        ("0::/user.slice/user-0.slice", (72,)),
    ],
)
def test_from_within_a_pod_the_groups_of_others_are_seen_in_part(tmp_path, cgroup, processes):
    """cgroup_namespaces(7): relative to the reader's own, so what they share is not named."""
    put(tmp_path, "proc/1/comm", "systemd\n")
    put(tmp_path, "proc/72/comm", "nvidia-imex\n")
    put(tmp_path, "proc/72/cgroup", f"{cgroup}\n")
    assert collect_host("n", tmp_path, None).imex.outside == processes


FILES = (
    "proc/1/comm",
    "proc/1/cgroup",
    "proc/1/cmdline",
    "proc/1/net/tcp",
    "proc/devices",
    "etc/nvidia-imex/config.cfg",
    "etc/nvidia-imex/nodes_config.cfg",
    CONFIG,
)
BEGINNINGS = (
    "",
    "containerd",
    "nvidia-imex",
    "Character devices:\n",
    "IMEX_NODE_CONFIG_FILE=",
    "imports = ['",
    "-c\0",
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(FILES), st.tuples(st.sampled_from(BEGINNINGS), st.text())))
def test_whatever_files_hold_they_are_read(contents):
    """The files may be a copy from elsewhere, and anybody's."""
    with TemporaryDirectory() as folder:
        for path, (beginning, rest) in contents.items():
            file = Path(folder) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes((beginning + rest).encode(errors="surrogatepass"))
        assert collect_host("n", Path(folder), None).node == "n"
