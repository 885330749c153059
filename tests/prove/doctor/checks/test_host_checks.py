"""One node's evidence in, findings out."""

import msgspec
import pytest

from rackloom.prove.doctor.checks.hosts import check_host
from rackloom.prove.doctor.evidence import CdiSetting, HostSeen, ImexSeen
from rackloom.prove.doctor.findings import State, verdict
from rackloom.prove.doctor.names import CDI, CHANNELS, DRIVER, HOST_IMEX, MESH, PORTS

WELL = HostSeen(
    here="node tray-1",
    driver_version="580.95.05",
    runtime="containerd://2.1.4",
    cdi_setting=CdiSetting.UNSAID,
    imex=ImexSeen(running=(), outside=(), enabled=False, offered=True),
    busy_ports=frozenset({22, 10250}),
)


def imex(**changes):
    """`WELL` with another IMEX."""
    return {"imex": msgspec.structs.replace(WELL.imex, **changes)}


def found(check, **fields):
    (one,) = [one for one in check_host(msgspec.structs.replace(WELL, **fields)) if one.check == check]
    return one


def test_a_healthy_node_holds_in_all():
    findings = check_host(WELL)
    assert [one.check for one in findings] == [DRIVER, CDI, PORTS, HOST_IMEX, CHANNELS]
    assert verdict(findings) is State.HOLDS


@pytest.mark.parametrize(
    ("check", "fields", "state"),
    [
        (DRIVER, {"driver_version": "570.158.00"}, State.FAILS),
        (DRIVER, {"driver_version": "570.158.01"}, State.HOLDS),
        (DRIVER, {"driver_version": "1000.0"}, State.HOLDS),
        (DRIVER, {"driver_version": None}, State.UNKNOWN),
        (CDI, {"runtime": "containerd://1.7.27"}, State.FAILS),
        (CDI, {"runtime": "containerd://1.7.27", "cdi_setting": CdiSetting.ON}, State.HOLDS),
        (CDI, {"cdi_setting": CdiSetting.OFF}, State.FAILS),
        (CDI, {"cdi_setting": CdiSetting.UNREADABLE}, State.UNKNOWN),
        (CDI, {"runtime": "containerd://1.7.27", "cdi_setting": CdiSetting.UNREADABLE}, State.UNKNOWN),
        (CDI, {"runtime": "cri-o://1.34.0", "cdi_setting": CdiSetting.OFF}, State.HOLDS),
        (CDI, {"runtime": "containerd://"}, State.UNKNOWN),
        (CDI, {"runtime": "containerd://Unknown"}, State.UNKNOWN),
        (CDI, {"runtime": None, "cdi_setting": CdiSetting.ON}, State.HOLDS),
        (CDI, {"runtime": "containerd://v2.0.0-rc.1"}, State.HOLDS),
        (CDI, {"runtime": "cri-o://1.34.0"}, State.HOLDS),
        (CDI, {"runtime": "docker://27.0.1"}, State.UNKNOWN),
        (CDI, {"runtime": None}, State.UNKNOWN),
        (HOST_IMEX, imex(running=(4711,), outside=(4711,)), State.FAILS),
        (HOST_IMEX, imex(enabled=True), State.FAILS),
        (HOST_IMEX, imex(outside=None), State.UNKNOWN),
        (HOST_IMEX, imex(outside=None, enabled=True), State.FAILS),
        (HOST_IMEX, imex(running=(4711,)), State.HOLDS),
        (CHANNELS, imex(offered=False), State.FAILS),
        (CHANNELS, imex(offered=None), State.UNKNOWN),
        (MESH, imex(running=(4711,), in_pods=(4711,)), State.UNKNOWN),
        (MESH, imex(running=(4711, 4712), in_pods=(4711,), outside=(4712,)), State.UNKNOWN),
        (PORTS, {"busy_ports": frozenset({50005})}, State.FAILS),
        (PORTS, {"busy_ports": None}, State.UNKNOWN),
    ],
)
def test_findings(check, fields, state):
    one = found(check, **fields)
    assert one.state is state
    assert one.subject == "node tray-1"
    assert bool(one.fix) is (state is not State.HOLDS)


def test_a_mesh_that_the_daemon_has_told_of_is_not_asked_of_its_host():
    seen = msgspec.structs.replace(WELL, meshed=True, **imex(running=(4711,), in_pods=(4711,)))
    (mesh,) = (one for one in check_host(seen) if one.check == MESH)
    assert mesh.state is State.HOLDS


def test_one_of_the_host_itself_has_no_mesh_of_its_own_to_judge():
    assert {
        one.check for one in check_host(msgspec.structs.replace(WELL, **imex(running=(9,), outside=(9,))))
    } == ({DRIVER, CDI, PORTS, HOST_IMEX, CHANNELS})


def test_one_that_is_not_seen_to_be_in_a_pod_is_not_told_as_one_of_a_pod():
    seen = msgspec.structs.replace(WELL, **imex(running=(9,), outside=None))
    assert [one.check for one in check_host(seen) if one.state is not State.HOLDS] == [HOST_IMEX]


@pytest.mark.parametrize(
    ("runtime", "unit"),
    [
        ("containerd://1.7.27", "containerd"),
        ("containerd://1.7.27-k3s1", "k3s"),
        ("cri-o://1.22.0", "crio"),
    ],
)
def test_what_is_restarted_is_the_runtime_that_runs(runtime, unit):
    assert found(CDI, runtime=runtime).fix.startswith(f"systemctl restart {unit}  # ")


def test_without_a_driver_nothing_is_said_of_what_it_offers():
    seen = msgspec.structs.replace(WELL, driver_version=None, **imex(offered=False))
    assert CHANNELS not in {one.check for one in check_host(seen)}


def test_what_files_do_show_of_a_mesh_is_told_with_it():
    changes = imex(running=(9,), outside=(9,), named=("a", "b", "c"), connected=2, channels=(0, 7))
    assert found(HOST_IMEX, **changes).evidence == (
        "host: it is connected with 2 other addresses at their port of IMEX",
        "host: /etc/nvidia-imex/config.cfg leads to 3 nodes",
        "host: /dev has the devices of 2 channels, the lowest 0",
    )
