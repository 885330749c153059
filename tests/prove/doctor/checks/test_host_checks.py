"""One node's evidence in, findings out."""

import msgspec
import pytest

from rackloom.prove.doctor.checks.hosts import CDI, DRIVER, HOST_IMEX, PORTS, check_host
from rackloom.prove.doctor.evidence import HostSeen
from rackloom.prove.doctor.findings import State, verdict

WELL = HostSeen(
    node="tray-1",
    driver_version="580.95.05",
    runtime="containerd://2.1.4",
    cdi_setting=None,
    imex_processes=(),
    imex_enabled=False,
    busy_ports=frozenset({22, 10250}),
)


def found(check, **fields):
    (one,) = [one for one in check_host(msgspec.structs.replace(WELL, **fields)) if one.check == check]
    return one


def test_a_healthy_node_holds_in_all_four():
    findings = check_host(WELL)
    assert [one.check for one in findings] == [DRIVER, CDI, HOST_IMEX, PORTS]
    assert verdict(findings) is State.HOLDS


@pytest.mark.parametrize(
    ("check", "fields", "state"),
    [
        (DRIVER, {"driver_version": "570.158.00"}, State.FAILS),
        (DRIVER, {"driver_version": "570.158.01"}, State.HOLDS),
        (DRIVER, {"driver_version": "1000.0"}, State.HOLDS),
        (DRIVER, {"driver_version": None}, State.UNKNOWN),
        (CDI, {"runtime": "containerd://1.7.27"}, State.FAILS),
        (CDI, {"runtime": "containerd://1.7.27", "cdi_setting": True}, State.HOLDS),
        (CDI, {"cdi_setting": False}, State.FAILS),
        (CDI, {"runtime": "containerd://v2.0.0-rc.1"}, State.HOLDS),
        (CDI, {"runtime": "cri-o://1.34.0"}, State.HOLDS),
        (CDI, {"runtime": "docker://27.0.1"}, State.UNKNOWN),
        (CDI, {"runtime": None}, State.UNKNOWN),
        (HOST_IMEX, {"imex_processes": (4711,)}, State.FAILS),
        (HOST_IMEX, {"imex_enabled": True}, State.FAILS),
        (HOST_IMEX, {"imex_processes": None}, State.UNKNOWN),
        (HOST_IMEX, {"imex_processes": None, "imex_enabled": True}, State.FAILS),
        (PORTS, {"busy_ports": frozenset({50005})}, State.FAILS),
        (PORTS, {"busy_ports": None}, State.UNKNOWN),
    ],
)
def test_findings(check, fields, state):
    one = found(check, **fields)
    assert one.state is state
    assert one.subject == "node tray-1"
    assert bool(one.fix) is (state is not State.HOLDS)
