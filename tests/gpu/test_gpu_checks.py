"""The checks of a machine with a GPU, run without one: their results, and that each of them can fail.

The driver below is made up: a library with CUDA's first calls, which answers if the device file is correct.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.claim.node.nic.nic_kit import needs_root
from tests.gpu import checks
from tests.gpu.checks import CHECKS, Differs, Given, Machine, Skipped, no_gpu_reason
from tests.gpu.container import in_container
from tests.gpu.run import outcome_of, report_of, verdict

from rackloom.claim.node.gpu.inventory import DeclaredInventory
from rackloom.lab.nodes.host_files import declared_inventory, host_files, write_sysroot
from rackloom.topology.profiles import load_machine

ROOT = Path(__file__).parents[2]
UUID = "00112233445566778899aabbccddeeff"
LOG = """<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version><attached_gpus>1</attached_gpus>
  <gpu id="00000001:0A:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-1</uuid><minor_number>0</minor_number>
    <persistence_mode>Enabled</persistence_mode><compute_mode>Default</compute_mode>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <fb_memory_usage><total>81559 MiB</total></fb_memory_usage>
    <gpu_power_readings><requested_power_limit>700.00 W</requested_power_limit></gpu_power_readings>
  </gpu>
</nvidia_smi_log>"""
needs_no_gpu = pytest.mark.skipif(no_gpu_reason() is None, reason="THERE IS A GPU: run `make test-gpu`")


@needs_no_gpu
def test_without_a_gpu_every_check_is_skipped_with_the_reason_and_nothing_is_shown(tmp_path):
    file = tmp_path / "deep" / "report.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/run.py"), "--report", str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == f"NOTHING WAS SHOWN: all {len(CHECKS)} checks were skipped; report: {file}"
    assert [re.split(r"\s+", line)[:2] for line in lines] == [["SKIPPED", check.__name__] for check in CHECKS]
    report = json.loads(file.read_text())
    assert report["format"] == "rackloom-gpu-report/1"
    assert report["outcomes"] == {"skipped": len(CHECKS)}
    assert all("there is no CUDA driver here" in check["reason"] for check in report["checks"])
    assert all(check["compares"] for check in report["checks"])


class Present(Machine):
    """A machine that claims to have a GPU."""

    lacks_gpu = None


def check_with(outcome):
    def check(_):
        """It compares one thing with another."""
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return check


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ({"rate": 1}, ("passed", None)),
        (Skipped("no MIG"), ("skipped", "no MIG")),
        (Differs("one has two"), ("failed", "one has two")),
        (ZeroDivisionError("oh"), ("failed", "ZeroDivisionError: oh")),
        (ModuleNotFoundError("no", name="pynvml"), ("skipped", "Python has no pynvml here")),
    ],
)
def test_a_check_passes_fails_or_is_skipped_and_says_why(outcome, expected):
    record = outcome_of(check_with(outcome), Present())
    assert record["outcome"] == expected[0]
    assert (record.get("reason") or "").startswith(expected[1] or "")
    assert ("figures" in record) is (expected[0] == "passed")
    assert json.dumps(record)


@pytest.mark.parametrize(
    ("outcomes", "code", "words"),
    [
        ({"passed": 2, "skipped": 1}, 0, "2 of 3 checks passed, 1 skipped"),
        ({"passed": 2, "failed": 1}, 1, "1 of 3 checks FAILED"),
        ({"failed": 1, "skipped": 2}, 1, "1 of 3 checks FAILED"),
        ({"skipped": 3}, 0, "NOTHING WAS SHOWN"),
    ],
)
def test_only_failures_fail_and_skips_alone_show_nothing(outcomes, code, words):
    found = verdict({"outcomes": outcomes})
    assert found[0] == code
    assert found[1].startswith(words)


def printing(monkeypatch, *logs):
    """Make nvidia-smi print these logs in order, and then repeat the last one."""
    left = list(logs)

    def printed(_):
        return ET.fromstring(left.pop(0) if len(left) > 1 else left[0])  # noqa: S314

    monkeypatch.setattr(Machine, "printed", printed)


def test_a_setting_that_has_changed_meanwhile_is_found(monkeypatch):
    printing(monkeypatch, LOG, LOG.replace("<compute_mode>Default", "<compute_mode>Exclusive_Process"))
    lines: list[str] = []
    report = report_of(Present(), [check_with({}), checks.settings_stay], lines.append)
    assert [check["outcome"] for check in report["checks"]] == ["passed", "failed"]
    assert "compute_mode: Default -> Exclusive_Process" in report["checks"][1]["reason"]
    printing(monkeypatch, LOG)
    assert checks.settings_stay(Present())["00000001:0A:00.0 compute_mode"] == "Default"


def read_gpu(**changes):
    from rackloom.claim.node.gpu.inventory import GpuInventory, NodeGpu

    known = {
        "minor": 0,
        "uuid": "GPU-1",
        "pci_address": "0001:0a:00.0",
        "product": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 81559 << 20,
    }
    return GpuInventory(
        gpus=(NodeGpu(**{**known, **changes}),), driver_version="580.95.05", cuda_version="13.0"
    )


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, None),
        ({"uuid": "GPU-2"}, "uuid of 0001:0a:00.0: the plugin has GPU-2, nvidia-smi has GPU-1"),
        ({"minor": 1}, "minor of 0001:0a:00.0"),
        ({"memory_bytes": 1 << 30}, "memory MiB of 0001:0a:00.0: the plugin has 1024, nvidia-smi has 81559"),
        ({"mig_mode": True}, "MIG of 0001:0a:00.0: the plugin has Enabled"),
        ({"pci_address": "0001:0b:00.0"}, "only the plugin has 0001:0b:00.0; only nvidia-smi has"),
    ],
)
def test_the_inventory_is_held_against_nvidia_smi(monkeypatch, changes, difference):
    printing(monkeypatch, LOG)
    monkeypatch.setattr("rackloom.claim.node.gpu.nvml.read_gpus", lambda _: read_gpu(**changes))
    machine = Present(driver_root=Path("/"))
    if difference is None:
        assert set(checks.inventory(machine)["gpus"]) == {"0001:0a:00.0"}
    else:
        with pytest.raises(Differs, match=re.escape(difference)):
            checks.inventory(machine)


@pytest.mark.parametrize(
    ("library", "root"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580", "/"),
        ("/usr/lib64/libcuda.so.1", "/"),
        ("/lib/aarch64-linux-gnu/libcuda.so.1", "/"),
        ("/usr/local/nvidia/lib64/libcuda.so.1", "/usr/local/nvidia"),
        ("/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/run/nvidia/driver"),
    ],
)
def test_the_drivers_root_is_where_its_libraries_are(library, root):
    assert checks.root_of(Path(library)) == Path(root)


def given(**edits: Any) -> Given:
    return Given("gpu-0", {"uuid": {"string": f"GPU-{UUID}"}}, {}, edits, ("gpu-0",))


NULL = {"path": "/dev/null", "type": "c", "major": 1, "minor": 3}


@pytest.mark.parametrize(
    ("node", "difference"),
    [
        (NULL, None),
        ({**NULL, "minor": 5}, r"the spec says \('c', 1, 5\), the host has \('c', 1, 3\)"),
        ({name: NULL[name] for name in ("path", "major", "minor")}, "the spec says \\(None, 1, 3\\)"),
        ({**NULL, "path": "/dev/nvidia77"}, "/dev/nvidia77: No such file or directory on the host"),
    ],
)
def test_device_nodes_are_held_against_dev(node, difference):
    if difference is None:
        assert checks._nodes_of(given(deviceNodes=[node])) == {"/dev/null": "1:3"}
    else:
        with pytest.raises(Differs, match=difference):
            checks._nodes_of(given(deviceNodes=[node]))


def test_a_spec_without_a_device_node_is_no_spec():
    with pytest.raises(Differs, match="no device node at all"):
        checks._nodes_of(given())


CUDA_C = """
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
int cuInit(unsigned flags) {
  struct stat s;
  if (stat("/dev/nvidia0", &s) || !S_ISCHR(s.st_mode)) return 100;
  return s.st_rdev == makedev(195, 0) ? 0 : 101;
}
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid_v2(char *to, int device) {
  for (int i = 0; i < 16; i++) to[i] = (char)(i * 17);
  return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A driver's root, with a CUDA that can be called and libraries that only lie there."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("NO COMPILER: a stand-in for the CUDA driver cannot be made")
    root = tmp_path_factory.mktemp("driver")
    folder = root / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (root / "cuda.c").write_text(CUDA_C)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"):
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / name, root / "cuda.c"], check=True)
    return root


def edits_of(driver: Path) -> dict[str, Any]:
    """The edits as the plugin writes them."""
    folder = driver / "usr/lib/x86_64-linux-gnu"
    return {
        "env": ["LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu"],
        "mounts": [
            {"hostPath": str(file), "containerPath": f"/usr/lib/x86_64-linux-gnu/{file.name}"}
            for file in sorted(folder.iterdir())
        ],
        "deviceNodes": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 0o666}],
    }


@pytest.mark.slow
@needs_root
def test_cuda_runs_with_the_edits_and_not_without_them(driver):
    figures = checks._contained(Present(driver_root=driver), given(**edits_of(driver)))
    assert figures["with"] == [UUID]
    assert "libcuda.so.1: cannot open" in figures["without"]
    assert not Path("/dev/nvidia0").exists()


@needs_root
@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (lambda edits: edits.pop("deviceNodes"), "the CUDA driver says 100"),
        (lambda edits: edits["deviceNodes"][0].update(minor=1), "the CUDA driver says 101"),
        (lambda edits: edits["mounts"].pop(0), "libcuda.so.1: cannot open"),
    ],
)
def test_what_a_spec_lacks_is_found_by_running_it(driver, breaks, why):
    edits = edits_of(driver)
    breaks(edits)
    with pytest.raises(Differs, match=why):
        checks._contained(Present(driver_root=driver), given(**edits))


@needs_root
def test_another_gpu_than_the_claims_is_found(driver):
    wrong = Given("gpu-0", {"uuid": {"string": "GPU-ffff"}}, {}, edits_of(driver), ())
    with pytest.raises(Differs, match=f"CUDA finds .'{UUID}'. with the edits of gpu-0"):
        checks._contained(Present(driver_root=driver), wrong)


@needs_root
def test_a_driver_that_cannot_be_hidden_shows_nothing(driver, tmp_path, monkeypatch):
    visible = {"before": {"error": "", "uuids": [UUID]}, "after": {"error": "", "uuids": [UUID]}}
    monkeypatch.setattr(checks, "in_container", lambda *_: visible)
    with pytest.raises(Differs, match="the driver was not hidden"):
        checks._contained(Present(driver_root=driver), given(**edits_of(driver)))


@needs_root
def test_the_machines_own_files_stay_when_the_driver_is_hidden(driver, tmp_path):
    before = {file: file.stat().st_mtime_ns for file in driver.rglob("*")}
    cache = Path("/etc/ld.so.cache").read_bytes()
    in_container(edits_of(driver), tmp_path, (str(driver),))
    assert {file: file.stat().st_mtime_ns for file in driver.rglob("*")} == before
    assert Path("/etc/ld.so.cache").read_bytes() == cache


def a_node(driver: Path, root: Path) -> Machine:
    """A published machine, read by the plugin's code, with a declared inventory in place of NVML."""
    known = load_machine("azure-nd96isr-h100-v5")
    write_sysroot(host_files(known), root)
    boot = root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("boot-1\n")
    (root / "devices").write_text("Character devices:\n195 nvidia\n507 nvidia-uvm\n")
    declared: DeclaredInventory = declared_inventory(known)
    (root / "gpus.json").write_bytes(msgspec.json.encode(declared))
    options = {"inventory_file": root / "gpus.json", "proc_devices": root / "devices"}
    return Present(driver_root=driver, sysroot=root, node_options=options)


@pytest.mark.slow
def test_what_the_plugin_prepares_is_read_from_its_specs(driver, tmp_path):
    machine = a_node(driver, tmp_path)
    found = machine.prepared("gpu")
    assert found.device == "gpu-0"
    assert len(found.published) == 8
    assert "/dev/nvidia0" in [node["path"] for node in found.edits["deviceNodes"]]
    with pytest.raises(Skipped, match="no device of type mig is published"):
        machine.prepared("mig")


@pytest.mark.slow
def test_every_mount_is_looked_at(driver, tmp_path):
    machine = a_node(driver, tmp_path / "node")
    assert checks.mounts(machine)["libraries"] == 3
    broken = tmp_path / "driver"
    shutil.copytree(driver, broken)
    folder = broken / "usr/lib/x86_64-linux-gnu"
    (folder / "libnvidia-ml.so.1").write_text("no library")
    (folder / "libnvidia-ptxjitcompiler.so.1").unlink()
    machine.driver_root = broken
    del machine.root
    with pytest.raises(Differs, match=r"libnvidia-ml\.so\.1 is no library .*no mount brings libnvidia-ptx"):
        checks.mounts(machine)


CONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/log"
if [ "$1" = -d ]; then exit 0; fi
read -r command
echo "$command" >> "$(dirname "$0")/log"
if [ "$command" = get_server_list ]; then cat "$(dirname "$0")/servers"; fi
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A control program of MPS beside nvidia-smi."""
    (tmp_path / "nvidia-cuda-mps-control").write_text(CONTROL)
    (tmp_path / "nvidia-cuda-mps-control").chmod(0o755)
    (tmp_path / "servers").write_text("4711\n")
    monkeypatch.setattr(Machine, "program", str(tmp_path / "nvidia-smi"))
    monkeypatch.setattr(checks, "_CLIENT", "")
    printing(monkeypatch, LOG)
    return tmp_path


def test_mps_is_shown_by_a_client_that_gets_a_server(control):
    assert checks.mps(Present()) == {"servers": 1, "compute_modes": ["Default"]}
    assert (control / "log").read_text().split() == ["-d", "get_server_list", "quit"]


def test_a_client_without_a_server_of_mps_shows_nothing(control):
    (control / "servers").write_text("")
    with pytest.raises(Differs, match="without a server of MPS"):
        checks.mps(Present())
    assert (control / "log").read_text().split()[-1] == "quit"


def test_the_daemon_is_ended_when_its_client_fails(control, monkeypatch):
    monkeypatch.setattr(checks, "_CLIENT", "raise SystemExit('no device')")
    with pytest.raises(Differs, match="a client of MPS fails: no device"):
        checks.mps(Present())
    assert (control / "log").read_text().split() == ["-d", "quit"]


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (LOG.replace("<compute_mode>Default", "<compute_mode>Prohibited"), "these checks change none"),
        (LOG.replace("<current_mig>Disabled", "<current_mig>Enabled"), "a GPU is in MIG mode"),
    ],
)
def test_mps_is_left_alone_where_a_setting_would_have_to_change(control, monkeypatch, log, why):
    printing(monkeypatch, log)
    with pytest.raises(Skipped, match=why):
        checks.mps(Present())
    assert not (control / "log").exists()
