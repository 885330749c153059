"""Files for `rackloom place`, and the command itself."""

from pathlib import Path
from typing import Any

import yaml

from rackloom.cli.main import app


def ran(*words: str) -> object:
    return app(["place", *words], result_action="return_value")


def saved(folder: Path, *objects: dict[str, Any]) -> str:
    path = folder / "saved.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    return str(path)


def node(name: str, clique: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"nvidia.com/gpu.clique": clique}}
    ready = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": {"nvidia.com/gpu": "4"}, "conditions": ready}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec, "status": status}


def pod(name: str, on: str | None, gpus: int = 4, **metadata: Any) -> dict[str, Any]:
    limits = {"limits": {"nvidia.com/gpu": gpus}}
    spec = {"containers": [{"name": "main", "resources": limits}]} | ({"nodeName": on} if on else {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}


def job(name: str, members: int, gpus: int = 4) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"parallelism": members, "template": {"spec": pod("x", None, gpus)["spec"]}},
    }


def mpi_job(workers: int, *, launcher: dict[str, Any] | None = None, **worker: Any) -> dict[str, Any]:
    """Fields of the worker's pod spec as keywords, of the launcher's as a mapping."""
    specs = {
        "Launcher": {"template": {"spec": {"containers": [{"name": "main"}], **(launcher or {})}}},
        "Worker": {"replicas": workers, "template": {"spec": {**pod("x", None)["spec"], **worker}}},
    }
    spec = {"mpiReplicaSpecs": specs}
    return {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": "m"}, "spec": spec}
