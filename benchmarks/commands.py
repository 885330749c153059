"""The cost of commands that read a cluster, from the shell, beside a bare JSON decoder.

    .venv/bin/python benchmarks/commands.py [--nodes 5000] [--profile oci-bm.gpu.gb200-v3.4] [--quick]

One JSON object a row. The cluster is a file as `kubectl get ... -o json` writes it: device classes, nodes,
and the slices of NVIDIA's driver and of DRANET on each node. Each command runs in its own process. `cpu_s` is
its processor time, `resident_mib` its largest memory. `decode_ratio` divides `cpu_s` by that of one
`json.load` of the same file, in a process that ran just before. `--quick` reads 300 nodes.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.topology.profiles import load_machine

RACKLOOM = (sys.executable, "-m", "rackloom.cli.main")
GPUS_PER_NODE, NODES_PER_CLIQUE = 4, 18
CLAIM = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: four}
spec:
  devices:
    requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 4}}]
"""
JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  parallelism: 8
  completions: 8
  template:
    spec:
      containers: [{name: main, image: train, resources: {limits: {nvidia.com/gpu: 4}}}]
"""
COMMANDS: dict[str, tuple[str, ...]] = {
    "rackloom claim allocate": ("claim", "allocate", "--file", "claim.yaml", "--slices", "cluster.json"),
    "rackloom claim check": ("claim", "check", "claim.yaml", "--slices", "cluster.json"),
    "rackloom claim explain": ("claim", "explain", "--file", "claim.yaml", "--slices", "cluster.json"),
    "rackloom place": ("place", "job.yaml", "--site", "cluster.json"),
    "rackloom topology slurm": (
        *("topology", "slurm", "--site", "cluster.json"),
        *("--to", "topology.yaml", "--all-nodes", "--once"),
    ),
}


class Cost(NamedTuple):
    """The cost of one process."""

    cpu_s: float
    resident_mib: int


def cluster(nodes: int, profile: str) -> dict[str, Any]:
    """A List of the classes, nodes and slices of a cluster of equal machines."""
    machine = load_machine(profile)

    def objects() -> Iterator[dict[str, Any]]:
        for device_class in device_classes():
            yield {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"} | msgspec.to_builtins(
                device_class
            )
        for number in range(nodes):
            name = f"node-{number:05}"
            clique = f"00000000-0000-0000-0000-{number // NODES_PER_CLIQUE + 1:012d}.1"
            amounts = {"cpu": "144", "memory": "960Gi", "pods": "110", "nvidia.com/gpu": str(GPUS_PER_NODE)}
            yield {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "uid": f"u{number}",
                    "labels": {"kubernetes.io/hostname": name, "nvidia.com/gpu.clique": clique},
                },
                "spec": {},
                "status": {
                    "allocatable": amounts,
                    "capacity": amounts,
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }
            for slice_ in slices_of(machine, name):
                yield {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"} | msgspec.to_builtins(
                    slice_
                )

    return {"apiVersion": "v1", "kind": "List", "items": list(objects())}


def run(command: Sequence[str], folder: Path) -> Cost:
    """Run a command to its end. Raises RuntimeError if it fails."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    text = process.stderr.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {text}")
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss // 1024)


def rows(nodes: int, profile: str) -> Iterator[dict[str, Any]]:
    """A row for each command."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        content = json.dumps(cluster(nodes, profile))
        (folder / "cluster.json").write_text(content)
        (folder / "claim.yaml").write_text(CLAIM)
        (folder / "job.yaml").write_text(JOB)
        run((*RACKLOOM, *COMMANDS["rackloom place"]), folder)  # compiles the modules
        for title, words in COMMANDS.items():
            bare = run((sys.executable, "-c", "import json; json.load(open('cluster.json'))"), folder)
            cost = run((*RACKLOOM, *words), folder)
            yield {
                "benchmark": "commands",
                "command": title,
                "nodes": nodes,
                "input_mib": round(len(content) / 2**20, 1),
                "cpu_s": round(cost.cpu_s, 2),
                "resident_mib": cost.resident_mib,
                "decode_ratio": round(cost.cpu_s / bare.cpu_s, 1),
                "load": round(os.getloadavg()[0], 1),
                "cpus": os.cpu_count(),
            }


def main() -> None:
    """Print a row for each command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--profile", default="oci-bm.gpu.gb200-v3.4")
    parser.add_argument("--quick", action="store_true", help="300 nodes: shows that it works")
    asked = parser.parse_args()
    for row in rows(300 if asked.quick else asked.nodes, asked.profile):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
