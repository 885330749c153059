"""The state of IMEX in a host's files: its daemons, their units, channels and peers."""

import pytest
from tests.prove.collectors.host_files import put

from rackloom.prove.collectors.host import collect_host


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
    """cgroup_namespaces(7): paths are relative to the reader's cgroup, so the shared part is not named."""
    put(tmp_path, "proc/1/comm", "systemd\n")
    put(tmp_path, "proc/72/comm", "nvidia-imex\n")
    put(tmp_path, "proc/72/cgroup", f"{cgroup}\n")
    assert collect_host("n", tmp_path, None).imex.outside == processes


def test_a_process_is_a_decimal_number(tmp_path):
    put(tmp_path, "proc/1/comm", "systemd\n")
    put(tmp_path, "proc/\u00b2/comm", "nvidia-imex\n")
    assert collect_host("n", tmp_path, None).imex.outside == ()


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
