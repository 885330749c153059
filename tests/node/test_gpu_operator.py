"""A node as NVIDIA's GPU Operator lays it out: a driver container that comes, is replaced, and goes.

`Operator` stands for the operator: its labels and taint, the CDI files of its toolkit, its validations, and
the root of its driver container, mounted at /run/nvidia/driver and taken away as its k8s-driver-manager does.
The driver's files are the stand-ins of hardware.py. kubelet, containerd and all of Rackloom are real.
Source: GPU Operator 26.7, its driver container of August 2026, k8s-driver-manager 0.12. docs/gpus.md
describes the same to users.
"""

import json
import time
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from tests.node import installation
from tests.node.hardware import LIBRARIES, install_driver
from tests.node.nodes import NodeCluster, RealNode
from tests.node.workloads import claim_template, claiming, inside, phase, pod, until_gone, until_running
from tests.waiting import until_seen

from rackloom.claim.node.cdi import DRIVER_SECONDS

OLD, NEW = "570.172.08", "580.95.05"
DRIVER_ROOT = "run/nvidia/driver"
VALIDATIONS = "run/nvidia/validations"
HOST_DRIVER = "opt/driver-of-the-host"
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
FOUND = {
    "feature.node.kubernetes.io/pci-10de.present": "true",
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.deploy.driver": "true",
}
OPERANDS = ("container-toolkit", "gpu-feature-discovery", "dcgm-exporter", "operator-validator", "client")
PAUSED = "paused-for-driver-upgrade"
HELD = "libnvidia-ml.gpus"
"""The stand-in of NVML keeps it open, as NVIDIA's library keeps /dev/nvidiactl open."""
NOTICED_WITHIN = 30.0
"""Seconds. The plugins look every 5 or 10 s, and publish."""
LOOKED_AT = DRIVER_SECONDS + 2
"""Seconds in which the plugins have looked for a driver that is missing."""
LOST_TAINT = "gpu.nvidia.com/gpu-lost"
JOBS = ("kept", "first", "waiting")


class Operator:
    """GPU Operator, as one node sees it."""

    def __init__(self, cluster: NodeCluster, node: RealNode, index: int) -> None:
        self.cluster, self.node, self._index = cluster, node, index

    def arrive(self) -> None:
        """Label and taint the node, and write the CDI files of the toolkit. There is no driver yet."""
        self.label("true")
        self.cluster.kubectl("taint", "node", self.node.name, "nvidia.com/gpu=present:NoSchedule")
        self.node.run("mkdir", "-p", f"/{VALIDATIONS}", f"/{DRIVER_ROOT}", "/var/run/cdi")
        for kind in ("management.nvidia.com/gpu", "nvidia.com/gpu"):
            edits = {"env": ["TOOLKIT=1"], "deviceNodes": [{"path": "/dev/nvidiactl"}]}
            spec = {
                "cdiVersion": "0.5.0",
                "kind": kind,
                "devices": [{"name": "all", "containerEdits": edits}],
            }
            file = self.node.root / "run/cdi" / f"{kind.replace('/', '-')}.yaml"
            file.write_text(json.dumps(spec))

    def label(self, operands: str) -> None:
        """The labels of its operands: `true`, or paused while it replaces the driver."""
        labels = FOUND | {f"nvidia.com/gpu.deploy.{name}": operands for name in OPERANDS}
        words = [f"{key}={value}" for key, value in labels.items()]
        self.cluster.kubectl("label", "node", self.node.name, "--overwrite", *words)

    def mount(self, version: str) -> None:
        """The driver container has loaded the module and mounts its root."""
        root = PurePosixPath(f"/opt/driver-{version}")
        if not (self.node.root / str(root)[1:]).exists():
            install_driver(self.node.root / str(root)[1:], self._index, 1, version)
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
        (self.node.root / "proc/driver/nvidia/version").write_text(text)
        self.node.run("mount", "--rbind", str(root), f"/{DRIVER_ROOT}")

    def call_ready(self) -> None:
        """The startup probe of the driver's pod has passed."""
        (self.node.root / VALIDATIONS / ".driver-ctr-ready").write_text("GDS_ENABLED: false\n")

    def call_unready(self) -> None:
        """The driver's pod is deleted: its preStop hook, before anything else."""
        (self.node.root / VALIDATIONS / ".driver-ctr-ready").unlink()

    def unmount(self) -> None:
        """The module is unloaded, and the root taken away."""
        (self.node.root / "proc/driver/nvidia/version").unlink()
        self.node.run("umount", "-l", "-R", f"/{DRIVER_ROOT}")

    def leave(self) -> None:
        """Remove the operator's mounts, files, labels and taint."""
        self.node.run("umount", "-l", "-R", f"/{DRIVER_ROOT}", check=False)
        self.node.run("sh", "-c", "rm -rf /run/nvidia /run/cdi/*nvidia.com-gpu.yaml")
        (self.node.root / "proc/driver/nvidia/version").unlink(missing_ok=True)
        names = [key for key in FOUND if key != "nvidia.com/gpu.present"]
        names += [f"nvidia.com/gpu.deploy.{name}" for name in OPERANDS]
        self.cluster.kubectl("label", "node", self.node.name, *(f"{name}-" for name in names))
        self.cluster.kubectl("taint", "node", self.node.name, "nvidia.com/gpu-", check=False)


@pytest.fixture
def operator(installed: NodeCluster) -> Iterator[Operator]:
    """The second node without a host driver, and the operator on it. Plugins start after that."""
    node = installed.nodes[1]
    libraries = f"/{LIBRARIES}/libnvidia-ml.* /{LIBRARIES}/libcuda.so*"
    kept = f"/{HOST_DRIVER}"
    node.run("sh", "-c", f"mkdir -p {kept} && mv {libraries} {kept}")
    made = Operator(installed, node, 2)
    made.arrive()
    _restart_plugins(installed, node)
    yield made
    installed.kubectl("delete", "pod", *JOBS, "--ignore-not-found", "--timeout=60s")
    made.leave()
    node.run("sh", "-c", f"mv {kept}/* /{LIBRARIES} && rmdir {kept}")
    until_seen(lambda: _gpus(installed, node), "the node has its own driver again", NOTICED_WITHIN)
    _until_ready(installed, node)


def test_a_driver_container_comes_is_replaced_and_goes(operator: Operator) -> None:
    cluster, node = operator.cluster, operator.node
    # No driver: the plugins wait and log the reason.
    until_seen(lambda: "driver container is not ready" in _log(cluster, node), "the log says why", 60)
    assert _versions(cluster, node) == set()
    assert not _plugin_is_ready(cluster, node)
    # Its root alone does not count: the program that mounted it may still be at work.
    operator.mount(OLD)
    time.sleep(LOOKED_AT)
    assert _versions(cluster, node) == set()
    operator.call_ready()
    _until_versions(cluster, node, {"570.172.8"})
    _until_ready(cluster, node)
    until_seen(lambda: _holds_nvml(node), "NVML is listened to", 15)

    cluster.apply(claim_template("operator-gpu", "gpu.nvidia.com"))
    cluster.apply(_job("kept", node), _job("first", node))
    until_running(cluster, "kept", "first")
    for name in ("kept", "first"):
        assert _driver_of(cluster, name) == OLD
        assert "TOOLKIT" not in inside(cluster, name, "env")
        assert "nvidiactl" in inside(cluster, name, "ls", "/dev").split()
    cluster.kubectl("delete", "pod", "first", "--wait=false")
    until_gone(cluster, "first")

    # The operator replaces the driver. It ends jobs first, but one is left here, to see how it fares.
    operator.call_unready()
    operator.label(PAUSED)
    until_seen(lambda: not _holds_nvml(node), "nothing keeps the module", 15)
    until_seen(lambda: _all_tainted(cluster, node), "the GPUs are tainted", NOTICED_WITHIN)
    assert _started_plugins(cluster, node), "the operator's labels end no plugin"
    cluster.apply(_job("waiting", node))
    operator.unmount()
    time.sleep(LOOKED_AT)
    assert phase(cluster, "waiting") == "Pending"
    assert _versions(cluster, node) == set()
    assert not _holds_nvml(node)
    assert (phase(cluster, "kept"), _driver_of(cluster, "kept")) == ("Running", OLD)
    operator.mount(NEW)
    operator.call_ready()
    operator.label("true")
    _until_versions(cluster, node, {"580.95.5"})
    until_seen(lambda: not _tainted(cluster, node), "no GPU is tainted", NOTICED_WITHIN)
    until_running(cluster, "waiting")
    assert _driver_of(cluster, "waiting") == NEW
    _until_ready(cluster, node)
    # Running pods kept the files that they had. A container starts again with the new ones.
    assert (phase(cluster, "kept"), _driver_of(cluster, "kept")) == ("Running", OLD)
    cluster.tried("exec", "kept", "--", "kill", "1")  # the container may end before the answer
    until_seen(lambda: _driver_or_none(cluster, "kept") == NEW, "the container has the new driver", 60)
    cluster.kubectl("delete", "pod", "kept", "waiting", "--wait=false")
    until_gone(cluster, "kept", "waiting")

    # A driver container that the operator does not manage: its validator alone calls it ready.
    operator.call_unready()
    until_seen(lambda: not _holds_nvml(node), "nothing keeps the module", 15)
    (node.root / VALIDATIONS / "driver-ready").write_text("IS_HOST_DRIVER=false\n")
    until_seen(lambda: _holds_nvml(node), "NVML is listened to again", NOTICED_WITHIN)
    until_seen(lambda: not _tainted(cluster, node), "no GPU is tainted", NOTICED_WITHIN)


def _job(name: str, node: RealNode) -> dict[str, Any]:
    """A pod with one GPU that is started again when its program ends."""
    made = claiming(pod(name, "trap exit TERM; sleep 100000 & wait", node=node.name), "operator-gpu")
    made["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    made["spec"]["restartPolicy"] = "Always"
    return made


def _driver_of(cluster: NodeCluster, name: str) -> str:
    """The version of the driver's library in a pod's container."""
    (file,) = inside(cluster, name, "sh", "-c", f"ls /{LIBRARIES}/libcuda.so.*.*").split()
    inside(cluster, name, "sh", "-c", f"cat {file} >/dev/null")
    return file.rpartition(".so.")[2]


def _driver_or_none(cluster: NodeCluster, name: str) -> str | None:
    done = cluster.tried("exec", name, "--", "sh", "-c", f"ls /{LIBRARIES}/libcuda.so.*.*")
    return done.stdout.strip().rpartition(".so.")[2] if done.returncode == 0 else None


def _gpus(cluster: NodeCluster, node: RealNode) -> list[dict[str, Any]]:
    """The devices that the node's GPU plugin publishes."""
    slices = cluster.get("resourceslices")["items"]
    mine = [slice_["spec"] for slice_ in slices if slice_["spec"].get("nodeName") == node.name]
    return [
        device for spec in mine if spec["driver"] == "gpu.nvidia.com" for device in spec.get("devices") or ()
    ]


def _versions(cluster: NodeCluster, node: RealNode) -> set[str]:
    """Versions of the driver in the GPUs' attributes. A lost GPU has none."""
    found = [gpu["attributes"].get("driverVersion") for gpu in _gpus(cluster, node)]
    return {version["version"] for version in found if version is not None}


def _until_versions(cluster: NodeCluster, node: RealNode, wanted: set[str]) -> None:
    until_seen(lambda: _versions(cluster, node) == wanted, f"{wanted} is published", NOTICED_WITHIN)


def _taints(gpu: dict[str, Any]) -> set[str]:
    return {taint["key"] for taint in gpu.get("taints") or ()}


def _tainted(cluster: NodeCluster, node: RealNode) -> bool:
    return any(LOST_TAINT in _taints(gpu) for gpu in _gpus(cluster, node))


def _all_tainted(cluster: NodeCluster, node: RealNode) -> bool:
    gpus = _gpus(cluster, node)
    return bool(gpus) and all(LOST_TAINT in _taints(gpu) for gpu in gpus)


def _plugin(cluster: NodeCluster, node: RealNode) -> dict[str, Any]:
    """The pod of the plugin that serves GPUs on the node."""
    component = installation.plugins()[0].removeprefix("rackloom-")
    words = ("-n", "rackloom-system", "-l", f"app.kubernetes.io/component={component}")
    pods = cluster.get("pods", *words, "--field-selector", f"spec.nodeName={node.name}")["items"]
    alive = [found for found in pods if "deletionTimestamp" not in found["metadata"]]
    return alive[0] if alive else {}


def _plugin_is_ready(cluster: NodeCluster, node: RealNode) -> bool:
    statuses = _plugin(cluster, node).get("status", {}).get("containerStatuses", [])
    return bool(statuses) and all(status["ready"] for status in statuses)


def _started_plugins(cluster: NodeCluster, node: RealNode) -> bool:
    statuses = _plugin(cluster, node).get("status", {}).get("containerStatuses", [])
    return bool(statuses) and all(status["restartCount"] == 0 for status in statuses)


def _log(cluster: NodeCluster, node: RealNode) -> str:
    found = _plugin(cluster, node)
    if not found:
        return ""
    return cluster.tried("logs", "-n", "rackloom-system", found["metadata"]["name"]).stdout


def _restart_plugins(cluster: NodeCluster, node: RealNode) -> None:
    """End the node's plugins. Their DaemonSets start others."""
    for plugin in installation.plugins():
        component = plugin.removeprefix("rackloom-")
        words = ("-l", f"app.kubernetes.io/component={component}", "--field-selector")
        cluster.kubectl(
            "delete", "pod", "-n", "rackloom-system", *words, f"spec.nodeName={node.name}", "--timeout=60s"
        )
    cluster.kubectl(
        "delete", "resourceslices", "--field-selector", f"spec.nodeName={node.name}", "--timeout=60s"
    )
    until_seen(lambda: _started_plugins(cluster, node), "the plugins run again", 60)


def _until_ready(cluster: NodeCluster, node: RealNode) -> None:
    until_seen(lambda: _plugin_is_ready(cluster, node), "the GPU plugin is ready", NOTICED_WITHIN)


def _holds_nvml(node: RealNode) -> bool:
    """Whether a process of the node has a session of NVML."""
    return HELD in node.run("sh", "-c", "ls -l /proc/[0-9]*/fd 2>/dev/null", check=False)
