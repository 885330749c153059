"""The doctor on a GPU host: every published machine laid out as its kernel shows it, healthy and broken."""

import json
import os

import msgspec
import pytest

from rackloom.app.doctor import Sources, diagnose
from rackloom.app.doctor_host import examine_host
from rackloom.cli.doctor import doctor
from rackloom.errors import Refused
from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks import hosts
from rackloom.prove.doctor.findings import Severity, State
from rackloom.prove.picture.values import NodeSeen, Picture
from rackloom.topology.affinity import numa_of
from rackloom.topology.facts import Fact, Source
from rackloom.topology.profiles import load_machine, machine_names
from rackloom.twin.sysroot import host_files, write_sysroot

TRAY = "oci-bm.gpu.gb200-v3.4"
SOCKETS = "  sl  local_address rem_address   st\n   0: 00000000:0016 00000000:0000 0A\n"
LISTENS = "   1: 00000000:C350 00000000:0000 0A\n"
WELL = {
    "sys/module/nvidia/version": "580.95.05\n",
    "proc/1/comm": "systemd\n",
    "proc/1/cgroup": "0::/init.scope\n",
    "proc/1/net/tcp": SOCKETS,
    "etc/systemd/system/multi-user.target.wants/kubelet.service": "",
    "etc/containerd/config.toml": "[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n",
}


def laid_out(root, machine, **changes):
    """A healthy host below `root`, with some files changed (None: not there)."""
    write_sysroot(host_files(machine), root)
    for path, text in (WELL | changes).items():
        if text is not None:
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return root


@pytest.mark.parametrize("name", machine_names())
def test_nothing_is_wrong_with_any_published_machine(name, tmp_path):
    assert examine_host(laid_out(tmp_path, load_machine(name))) == ()


@pytest.mark.parametrize(
    ("path", "text", "check", "state"),
    [
        ("sys/module/nvidia/version", "550.54.15\n", hosts.DRIVER, State.FAILS),
        ("sys/module/nvidia/version", None, hosts.DRIVER, State.UNKNOWN),
        ("proc/1/net/tcp", SOCKETS + LISTENS, hosts.PORTS, State.FAILS),
        ("proc/1/net/tcp", None, hosts.PORTS, State.UNKNOWN),
        ("proc/71/comm", "nvidia-imex\n", hosts.HOST_IMEX, State.FAILS),
        (
            "etc/systemd/system/multi-user.target.wants/nvidia-imex.service",
            "",
            hosts.HOST_IMEX,
            State.FAILS,
        ),
        ("proc/1/comm", None, hosts.HOST_IMEX, State.UNKNOWN),
        ("etc/containerd/config.toml", None, hosts.CDI, State.UNKNOWN),
    ],
)
def test_each_fault_of_a_host_is_one_finding(path, text, check, state, tmp_path):
    changes = {path: text}
    if path == "proc/1/comm":
        changes |= {name: None for name in WELL if name.startswith("proc/1/")}
    root = laid_out(tmp_path, load_machine(TRAY), **changes)
    found = {one.check: one for one in examine_host(root)}
    assert found[check].state is state
    assert found.keys() == ({check, hosts.PORTS} if path == "proc/1/comm" else {check})
    assert found[check].subject == f"node {load_machine(TRAY).name}"
    assert found[check].fix


@pytest.mark.parametrize(
    ("runtime", "states"),
    [
        ("containerd://2.0.0", []),
        ("cri-o://1.31.0", []),
        ("containerd://1.7.0", [State.FAILS]),
        (None, [State.UNKNOWN]),
    ],
)
def test_a_runtime_left_as_it_comes_is_judged_by_what_its_node_says(runtime, states, tmp_path, monkeypatch):
    machine = load_machine(TRAY)
    nodes = (NodeSeen(name=machine.name, ready=True, runtime=runtime), NodeSeen(name="another", ready=True))

    async def seen(sources, now):
        return Picture(at=now, layers=(), nodes=nodes)

    monkeypatch.setattr("rackloom.app.doctor.look", seen)
    root = laid_out(tmp_path, machine, **{"etc/containerd/config.toml": None})
    found = diagnose(Sources(sysroot=root)).findings
    assert [(one.check, one.state) for one in found] == [(hosts.CDI, one) for one in states]


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
    assert (found.check, found.severity) == (names.NIC_ALIGNED, Severity.WARNING)
    assert found.subject == f"GPU {', '.join(map(str, far))} of node {machine.name}"
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
    assert doctor(sysroot=root, json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in told["findings"]] == [hosts.DRIVER]


def test_a_directory_that_is_no_hosts_is_refused(tmp_path):
    with pytest.raises(Refused, match="holds no sys and proc") as told:
        doctor(sysroot=tmp_path)
    assert "/host" in told.value.nearest_fix
