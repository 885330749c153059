"""`kubectl rackloom`: the same program, which defaults to the cluster of the kubeconfig."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.waiting import PATIENCE

from rackloom.cli.hardware import profile_slices
from rackloom.core.allocate.driver_slices import device_classes

CLAIMS = Path(__file__).parents[2] / "examples" / "nixl-kv-transfer"
ALIGNED = str(CLAIMS / "resource-claim-template-aligned.yaml")
PROFILE = "azure-nd96isr-h100-v5"
NODES = ("gpu-a", "gpu-b")
HELD = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {"name": "holder", "namespace": "team"},
    "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
    "status": {
        "allocation": {
            "devices": {
                "results": [
                    {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "gpu-a", "device": "gpu-0"},
                ]
            }
        }
    },
}
RULES = "devicetaintrules.resource.k8s.io"
WAITING = {**HELD, "metadata": {"name": "waiting", "namespace": "team"}, "status": {}}


class Plugin:
    """The plugin beside a kubectl that answers each `get` with one List and records its command lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._write(
            "kubectl-rackloom", f"#!{sys.executable}", "from rackloom.cli.program import main", "main()"
        )
        self._write("kubectl", "#!/bin/sh", f'echo "$@" >> {folder}/asked', f"cat {folder}/list.json")
        slices = msgspec.to_builtins(profile_slices(PROFILE, NODES))
        classes = msgspec.to_builtins(device_classes())
        api = {"apiVersion": "resource.k8s.io/v1"}
        items = [{**api, "kind": "ResourceSlice", **slice_} for slice_ in slices]
        items += [{**api, "kind": "DeviceClass", **klass} for klass in classes]
        items += [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}} for node in NODES]
        listed = {"apiVersion": "v1", "kind": "List", "items": [*items, HELD, WAITING]}
        (folder / "list.json").write_text(json.dumps(listed))

    def _write(self, name: str, *lines: str) -> None:
        path = self.folder / name
        path.write_text("\n".join([*lines, ""]))
        path.chmod(0o755)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "COLUMNS": "200",
            "NO_COLOR": "1",
        }
        command = [str(self.folder / "kubectl-rackloom"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)

    @property
    def asked(self) -> list[str]:
        """The command lines of kubectl, except those that get DeviceTaintRules."""
        return [line for line in self._lines() if RULES not in line]

    @property
    def has_asked_for_rules(self) -> bool:
        return any(RULES in line for line in self._lines())

    def _lines(self) -> list[str]:
        asked = self.folder / "asked"
        return asked.read_text().splitlines() if asked.exists() else []


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


def test_it_is_called_as_its_user_calls_it(plugin: Plugin) -> None:
    assert "Usage: kubectl rackloom claim explain" in plugin.run("claim", "explain", "--help").stdout
    assert plugin.asked == []


def test_a_claim_meets_the_devices_of_the_cluster_and_their_holders(plugin: Plugin) -> None:
    done = plugin.run("claim", "explain", ALIGNED, "-o", "json")
    accounts = {account["node"]: account for account in json.loads(done.stdout)}
    assert accounts.keys() == set(NODES)
    assert "in use" in plugin.run("claim", "explain", ALIGNED).stdout
    left = [device for request in accounts["gpu-a"]["requests"] for device in request["left"]]
    assert any("gpu-1" in device for device in left)
    assert not any("gpu-0" in device for device in left)
    assert all(line.startswith("get resourceslices") for line in plugin.asked)
    assert plugin.has_asked_for_rules


def test_claims_that_wait_in_the_cluster_are_not_placed(plugin: Plugin) -> None:
    done = plugin.run("claim", "allocate", ALIGNED, "--context", "lab", "-o", "json")
    (answer,) = json.loads(done.stdout)
    assert (answer["claim"], answer["node"]) == ("h100-4gpu-4nic-numa-aligned", "gpu-b")
    assert plugin.asked[0].startswith("--context lab get resourceslices")


def test_a_template_asks_for_no_claims(plugin: Plugin) -> None:
    """A user who may read only the hardware gets a template, which is tried on empty nodes."""
    wanted = ("--gpus", "4", "--nics", "4", "--align", "numa")
    done = plugin.run("claim", "template", *wanted, "--cluster", "--profile", PROFILE)
    assert done.returncode == 0, done.stderr
    (asked,) = plugin.asked
    assert "resourceclaims" not in asked
    plugin.run("claim", "allocate", ALIGNED)
    assert "resourceclaims" in plugin.asked[-1]


def test_a_claim_is_planned_on_a_profile_or_on_a_cluster(plugin: Plugin) -> None:
    done = plugin.run("claim", "allocate", ALIGNED, "--cluster", "--profile", PROFILE)
    assert done.returncode == 2
    assert "not both" in done.stderr
    assert plugin.asked == []


def test_hardware_that_is_named_is_meant(plugin: Plugin) -> None:
    done = plugin.run("claim", "allocate", ALIGNED, "--profile", PROFILE, "-o", "json")
    assert json.loads(done.stdout)[0]["node"] == "node-0"
    assert plugin.asked == []


def test_a_job_is_placed_on_the_cluster(plugin: Plugin) -> None:
    job = str(CLAIMS.parent / "imex-mpijob")
    done = plugin.run("place", job)
    assert plugin.asked[0].startswith("get nodes,pods,")
    assert "name a --profile" not in done.stderr


@pytest.mark.slow
def test_the_doctor_examines_the_cluster_of_the_kubeconfig(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubeconfig's server is down: the error names the cluster, not a home of `rackloom up`."""
    kubeconfig = plugin.folder / "config"
    server = {"name": "lab", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "lab", "context": {"cluster": "lab", "user": "me"}}
    user = {"name": "me", "user": {"token": "none"}}
    kubeconfig.write_text(
        json.dumps({"clusters": [server], "contexts": [context], "users": [user], "current-context": "lab"})
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    done = plugin.run("doctor", "-o", "json")
    assert done.returncode == 1
    assert "cluster" in done.stdout + done.stderr
    assert "no site in" not in done.stderr
