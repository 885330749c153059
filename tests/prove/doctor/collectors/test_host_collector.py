"""A host's files read into evidence."""

import pytest

from rackloom.prove.doctor.collectors.host import collect_host

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
        ("version = 3\n", None),
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
