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
        ("[plugins.cri]\nenable_cdi = true\n", CdiSetting.ON),
        ("version = 1\n[plugins.cri]\nenable_cdi = true\n", CdiSetting.ON),
        ("version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = true\n", CdiSetting.ON),
        ("version = 2\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n", CdiSetting.UNSAID),
        ("version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n", CdiSetting.OFF),
        ("version = 4\n", CdiSetting.UNREADABLE),
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
        "74": ("nvidia-imex", "0::/../../4f2a"),
    }
    for pid, (name, cgroup) in processes.items():
        put(tmp_path, f"proc/{pid}/comm", f"{name}\n")
        put(tmp_path, f"proc/{pid}/cgroup", f"{cgroup}\n")
    imex = collect_host("n", tmp_path, None).imex
    assert (imex.running, imex.outside, imex.in_pods) == ((71, 72, 74), (71,), (72,))


@pytest.mark.parametrize("cgroup", [None, ""])
def test_a_control_group_that_is_not_readable_is_neither_a_pods_nor_the_hosts(tmp_path, cgroup):
    put(tmp_path, "proc/1/comm", "systemd\n")
    put(tmp_path, "proc/71/comm", "nvidia-imex\n")
    if cgroup is not None:
        put(tmp_path, "proc/71/cgroup", cgroup)
    imex = collect_host("n", tmp_path, None).imex
    assert (imex.outside, imex.in_pods) == (None, ())


def test_a_unit_that_is_wanted_at_boot(tmp_path):
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    assert collect_host("n", tmp_path, None).imex.enabled is False
    put(tmp_path, "etc/systemd/system/multi-user.target.wants/nvidia-imex.service", "")
    assert collect_host("n", tmp_path, None).imex.enabled is True
    (tmp_path / "etc/systemd/system/nvidia-imex.service").symlink_to("/dev/null")
    assert collect_host("n", tmp_path, None).imex.enabled is False


@pytest.mark.parametrize("folder", ["etc", "run", "usr/local/lib", "usr/lib", "lib"])
@pytest.mark.parametrize("how", ["wants", "requires"])
def test_a_unit_is_wanted_or_required_wherever_systemd_looks(tmp_path, folder, how):
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    put(tmp_path, f"{folder}/systemd/system/multi-user.target.{how}/nvidia-imex.service", "")
    assert collect_host("n", tmp_path, None).imex.enabled is True


def test_a_mask_below_a_unit_of_the_administrators_masks_nothing(tmp_path):
    put(tmp_path, "etc/systemd/system/nvidia-imex.service", "[Unit]\n")
    put(tmp_path, "etc/systemd/system/multi-user.target.wants/nvidia-imex.service", "")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / "run/systemd/system/nvidia-imex.service").symlink_to("/dev/null")
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
        ("#IMEX_NODE_CONFIG_FILE=/srv/nodes\n", "srv/nodes", None),
        ("IMEX_NODE_CONFIG_FILE=\n", "srv/nodes", None),
        ("IMEX_NODE_CONFIG_FILE=/srv/others\n", "srv/nodes", None),
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
   6: 0100000A:9C44 0100000A:C350 01
"""
MAPPED_PEER = """  sl  local_address                         remote_address                        st
   0: 0000000000000000FFFF00000100000A:9C45 0000000000000000FFFF00000200000A:C350 01
"""


def test_peers_are_those_that_a_daemon_is_connected_with_in_its_own_namespace(tmp_path):
    for pid, name in (("1", "systemd"), ("71", "nvidia-imex"), ("72", "sshd")):
        put(tmp_path, f"proc/{pid}/comm", f"{name}\n")
        put(tmp_path, f"proc/{pid}/cgroup", "0::/kubepods.slice/pod1\n")
    assert collect_host("n", tmp_path, None).imex.connected is None
    put(tmp_path, "proc/71/net/tcp", PEERS)
    put(tmp_path, "proc/71/net/tcp6", MAPPED_PEER)
    put(tmp_path, "proc/72/net/tcp", PEERS.replace("0300000A", "0900000A"))
    seen = collect_host("n", tmp_path, None)
    assert (seen.imex.running, seen.imex.outside, seen.imex.connected) == ((71,), (), 2)
    assert seen.busy_ports is None


def test_listening_sockets_of_both_families(tmp_path):
    put(tmp_path, "proc/1/net/tcp", TCP)
    put(tmp_path, "proc/1/net/tcp6", TCP6)
    assert collect_host("n", tmp_path, None).busy_ports == {50000, 22}


CONFIG = "etc/containerd/config.toml"
ON = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n"
OFF = ON.replace("true", "false")
ON_IN_2 = "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = true\n"
RUNTIME_IN_2 = "[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'nvidia'\n"
CONTAINERD = "containerd://2.1.4"


@pytest.mark.parametrize(
    ("own", "imported", "said"),
    [
        ("imports = ['/etc/containerd/conf.d/*.toml']\n", ON, CdiSetting.ON),
        ("imports = ['/etc/*/conf.d/*.toml']\n" + ON, ON, CdiSetting.UNREADABLE),
        ("imports = ['conf.d/*.toml']\n" + ON_IN_2, "version = 2\n", CdiSetting.ON),
        ("imports = ['conf.d/*.toml']\n" + ON_IN_2, RUNTIME_IN_2, CdiSetting.UNSAID),
        ("imports = ['conf.d/*.toml']\n" + ON_IN_2, "version = 2\n" + RUNTIME_IN_2, CdiSetting.UNSAID),
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
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is said


@pytest.mark.parametrize(
    ("files", "said"), [(60, CdiSetting.ON), (70, CdiSetting.UNREADABLE)], ids=["all read", "too many"]
)
def test_no_file_that_is_imported_is_left_out(tmp_path, files, said):
    put(tmp_path, CONFIG, "imports = ['conf.d/*.toml']\n" + ON)
    for number in range(files):
        put(tmp_path, f"etc/containerd/conf.d/{number:02}.toml", "version = 3\n")
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is said


@pytest.mark.parametrize(
    ("text", "others", "said"),
    [
        (".".join("a" * 101) + " = 1\n", 0, CdiSetting.UNSAID),
        (".".join("a" * 102) + " = 1\n", 0, CdiSetting.UNREADABLE),
        (".".join(["a", "'\u2028'"] * 60) + " = 1\n", 0, CdiSetting.UNREADABLE),
        ("# " + "x" * 1024 * 1024 + "\n", 0, CdiSetting.UNREADABLE),
        ("imports = ['conf.d/*.toml']\n", 3, CdiSetting.UNSAID),
        ("imports = ['conf.d/*.toml']\n", 5, CdiSetting.UNREADABLE),
    ],
    ids=["many dots", "more dots", "dots between odd spaces", "long", "long together", "longer together"],
)
def test_what_takes_long_to_be_read_is_not_read(tmp_path, text, others, said):
    put(tmp_path, CONFIG, text)
    for number in range(others):
        put(tmp_path, f"etc/containerd/conf.d/{number}.toml", "# " + "x" * 256 * 1024 + "\n")
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is said


@pytest.mark.parametrize(
    ("runtime", "processes", "said"),
    [
        (None, [], CdiSetting.UNSAID),
        (None, ["crio"], CdiSetting.UNSAID),
        (None, ["crio", "containerd"], CdiSetting.UNSAID),
        (None, ["containerd"], CdiSetting.OFF),
        (CONTAINERD, [], CdiSetting.OFF),
    ],
)
def test_the_file_counts_where_containerd_is_known_to_run(tmp_path, runtime, processes, said):
    put(tmp_path, CONFIG, OFF)
    for pid, name in enumerate(processes, 70):
        put(tmp_path, f"proc/{pid}/comm", f"{name}\n")
    assert collect_host("n", tmp_path, runtime).cdi_setting is said


@pytest.mark.parametrize(
    "text",
    [
        "plugins = 'x'\n",
        "version = 3\n[plugins]\n'io.containerd.cri.v1.runtime' = 7\n",
        "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = 'false'\n",
        "imports = 'x'\n",
        "a = " + "[" * 5000 + "]" * 5000,
        "a = " + "9" * 5000,
        f"imports = {['conf.d/*.toml'] * 65}\n",
    ],
)
def test_a_configuration_that_is_none_of_containerds_is_not_understood(tmp_path, text):
    put(tmp_path, CONFIG, text)
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is CdiSetting.UNREADABLE


@pytest.mark.parametrize("version", ["'3'", "[3]", "0x10", "3.0"])
def test_a_version_that_is_not_known_is_not_understood(tmp_path, version):
    put(tmp_path, CONFIG, f"version = {version}\n")
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is CdiSetting.UNREADABLE


OWN = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("commands", "setting"),
    [
        ({"70": ["containerd", "-c", OWN]}, CdiSetting.OFF),
        ({"70": ["/usr/bin/containerd", f"--config={OWN}", "-l", "info"]}, CdiSetting.OFF),
        ({"70": ["containerd"]}, CdiSetting.ON),
        ({"70": ["containerd"], "90": ["containerd", "--config", OWN]}, CdiSetting.UNREADABLE),
        ({"70": ["containerd", "-c", OWN], "90": ["containerd", "--config", OWN]}, CdiSetting.OFF),
        ({}, CdiSetting.ON),
    ],
)
def test_the_configuration_is_the_one_that_containerd_was_started_with(tmp_path, commands, setting):
    """Of several nobody can tell which one kubelet asks."""
    put(tmp_path, CONFIG, ON)
    put(tmp_path, OWN.lstrip("/"), OFF)
    for pid, words in commands.items():
        put(tmp_path, f"proc/{pid}/comm", "containerd\n")
        put(tmp_path, f"proc/{pid}/cmdline", "\0".join(words) + "\0")
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is setting


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
    seen = collect_host("n", tmp_path, CONTAINERD)
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
        assert collect_host("n", Path(folder), CONTAINERD).node == "n"
