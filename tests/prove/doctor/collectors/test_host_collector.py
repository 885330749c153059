"""A host's files read into evidence."""

import os

import pytest

from rackloom.prove.doctor.collectors.host import collect_host
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
    assert (seen.driver_version, seen.cdi_setting, seen.imex_processes) == (None, None, None)
    assert (seen.imex_enabled, seen.busy_ports) == (None, None)


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
        ("", None),
        ("version = 2\n", None),
        ("version = 3\n", True),
        ("[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = true\n", True),
        ("[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n", False),
        ("no toml [", None),
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
    assert collect_host("n", tmp_path, None).imex_processes == (71,)


def test_a_unit_that_is_wanted_at_boot(tmp_path):
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    assert collect_host("n", tmp_path, None).imex_enabled is False
    put(tmp_path, "etc/systemd/system/multi-user.target.wants/nvidia-imex.service", "")
    assert collect_host("n", tmp_path, None).imex_enabled is True


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
        ("imports = ['/etc/containerd/conf.d/*.toml']\n", ON, True),
        ("imports = ['conf.d/9?-*.toml']\n", ON, True),
        ("version = 3\nimports = ['conf.d/*.toml']\n", "", True),
        ("version = 3\nimports = ['conf.d/*.toml']\n", OFF, False),
        ("imports = ['conf.d/*.toml']\n" + ON, OFF, False),
        ("imports = ['elsewhere/*.toml', 7]\n" + ON, OFF, True),
        ("imports = ['*.toml', 'conf.d/*.toml']\n", ON, True),
        ("imports = ['conf.d/*.toml']\n" + ON, "no toml [", None),
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
        "imports = 'x'\nversion = '3'\n",
        "a = " + "[" * 5000 + "]" * 5000,
        "a = " + "9" * 5000,
    ],
)
def test_a_foreign_configuration_says_nothing(tmp_path, text):
    put(tmp_path, CONFIG, text)
    assert collect_host("n", tmp_path, None).cdi_setting is None


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
    assert collect_host("n", tmp_path, None).imex_processes == ()


@pytest.mark.parametrize("path", [CONFIG, "proc/1/net/tcp", "sys/module/nvidia/version"])
def test_a_pipe_is_not_waited_for(tmp_path, path):
    (tmp_path / path).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / path)
    seen = collect_host("n", tmp_path, None)
    assert (seen.cdi_setting, seen.busy_ports, seen.driver_version) == (None, None, None)


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
    assert collect_host("n", tmp_path, None).imex_processes == processes
