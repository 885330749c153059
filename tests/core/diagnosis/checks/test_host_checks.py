"""One node's evidence in, findings out."""

import msgspec
import pytest

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.checks.host_imex import check_host
from rackloom.core.diagnosis.evidence import CdiSetting, HostEvidence, ImexEvidence
from rackloom.core.diagnosis.findings import CheckState, verdict

WELL = HostEvidence(
    here="node tray-1",
    driver_version="580.95.05",
    runtime="containerd://2.1.4",
    cdi_setting=CdiSetting.UNSAID,
    imex=ImexEvidence(running=(), outside=(), enabled=False, offered=True),
    busy_ports=frozenset({22, 10250}),
)


def imex(**changes):
    """`WELL` with another IMEX."""
    return {"imex": msgspec.structs.replace(WELL.imex, **changes)}


def found(check, **fields):
    (finding,) = [
        finding for finding in check_host(msgspec.structs.replace(WELL, **fields)) if finding.check == check
    ]
    return finding


def test_a_healthy_node_holds_in_all():
    findings = check_host(WELL)
    assert [finding.check for finding in findings] == [
        Check.DRIVER,
        Check.CDI,
        Check.PORTS,
        Check.HOST_IMEX,
        Check.CHANNELS,
    ]
    assert verdict(findings) is CheckState.HOLDS


@pytest.mark.parametrize(
    ("check", "fields", "state"),
    [
        (Check.DRIVER, {"driver_version": "570.158.00"}, CheckState.FAILS),
        (Check.DRIVER, {"driver_version": "570.158.01"}, CheckState.HOLDS),
        (Check.DRIVER, {"driver_version": "1000.0"}, CheckState.HOLDS),
        (Check.DRIVER, {"driver_version": None}, CheckState.UNKNOWN),
        (Check.CDI, {"runtime": "containerd://1.7.27"}, CheckState.FAILS),
        (Check.CDI, {"runtime": "containerd://1.7.27", "cdi_setting": CdiSetting.ON}, CheckState.HOLDS),
        (Check.CDI, {"cdi_setting": CdiSetting.OFF}, CheckState.FAILS),
        (Check.CDI, {"cdi_setting": CdiSetting.UNREADABLE}, CheckState.UNKNOWN),
        (
            Check.CDI,
            {"runtime": "containerd://1.7.27", "cdi_setting": CdiSetting.UNREADABLE},
            CheckState.UNKNOWN,
        ),
        (Check.CDI, {"runtime": "cri-o://1.34.0", "cdi_setting": CdiSetting.OFF}, CheckState.HOLDS),
        (Check.CDI, {"runtime": "containerd://"}, CheckState.UNKNOWN),
        (Check.CDI, {"runtime": "containerd://Unknown"}, CheckState.UNKNOWN),
        (Check.CDI, {"runtime": None, "cdi_setting": CdiSetting.ON}, CheckState.HOLDS),
        (Check.CDI, {"runtime": "containerd://v2.0.0-rc.1"}, CheckState.HOLDS),
        (Check.CDI, {"runtime": "cri-o://1.34.0"}, CheckState.HOLDS),
        (Check.CDI, {"runtime": "docker://27.0.1"}, CheckState.UNKNOWN),
        (Check.CDI, {"runtime": None}, CheckState.UNKNOWN),
        (Check.HOST_IMEX, imex(running=(4711,), outside=(4711,)), CheckState.FAILS),
        (Check.HOST_IMEX, imex(enabled=True), CheckState.FAILS),
        (Check.HOST_IMEX, imex(outside=None), CheckState.UNKNOWN),
        (Check.HOST_IMEX, imex(outside=None, enabled=True), CheckState.FAILS),
        (Check.HOST_IMEX, imex(running=(4711,)), CheckState.HOLDS),
        (Check.CHANNELS, imex(offered=False), CheckState.FAILS),
        (Check.CHANNELS, imex(offered=None), CheckState.UNKNOWN),
        (Check.MESH, imex(running=(4711,), in_pods=(4711,)), CheckState.UNKNOWN),
        (Check.MESH, imex(running=(4711, 4712), in_pods=(4711,), outside=(4712,)), CheckState.UNKNOWN),
        (Check.PORTS, {"busy_ports": frozenset({50005})}, CheckState.FAILS),
        (Check.PORTS, {"busy_ports": None}, CheckState.UNKNOWN),
    ],
)
def test_findings(check, fields, state):
    finding = found(check, **fields)
    assert finding.state is state
    assert finding.subject == "node tray-1"
    assert bool(finding.fix) is (state is not CheckState.HOLDS)


def test_a_mesh_that_the_daemon_has_told_of_is_not_asked_of_its_host():
    seen = msgspec.structs.replace(WELL, meshed=True, **imex(running=(4711,), in_pods=(4711,)))
    (mesh,) = (finding for finding in check_host(seen) if finding.check == Check.MESH)
    assert mesh.state is CheckState.HOLDS


def test_one_of_the_host_itself_has_no_mesh_of_its_own_to_judge():
    assert {
        finding.check
        for finding in check_host(msgspec.structs.replace(WELL, **imex(running=(9,), outside=(9,))))
    } == ({Check.DRIVER, Check.CDI, Check.PORTS, Check.HOST_IMEX, Check.CHANNELS})


def test_one_that_is_not_seen_to_be_in_a_pod_is_not_told_as_one_of_a_pod():
    seen = msgspec.structs.replace(WELL, **imex(running=(9,), outside=None))
    assert [finding.check for finding in check_host(seen) if finding.state is not CheckState.HOLDS] == [
        Check.HOST_IMEX
    ]


@pytest.mark.parametrize(
    ("runtime", "unit"),
    [
        ("containerd://1.7.27", "containerd"),
        ("containerd://1.7.27-k3s1", "k3s"),
        ("cri-o://1.22.0", "crio"),
    ],
)
def test_what_is_restarted_is_the_runtime_that_runs(runtime, unit):
    assert found(Check.CDI, runtime=runtime).fix.startswith(f"systemctl restart {unit}  # ")


def test_without_a_driver_nothing_is_said_of_what_it_offers():
    seen = msgspec.structs.replace(WELL, driver_version=None, **imex(offered=False))
    assert Check.CHANNELS not in {finding.check for finding in check_host(seen)}


def test_what_files_do_show_of_a_mesh_is_told_with_it():
    changes = imex(running=(9,), outside=(9,), named=("a", "b", "c"), connected=2, channels=(0, 7))
    assert found(Check.HOST_IMEX, **changes).evidence == (
        "host: it is connected with 2 other addresses at their port of IMEX",
        "host: /etc/nvidia-imex/config.cfg leads to 3 nodes",
        "host: /dev has the devices of 2 channels, the lowest 0",
    )
