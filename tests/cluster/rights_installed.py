"""The objects of a folder of deploy, built by kustomize."""

import subprocess
from collections.abc import Iterator

import yaml
from deploy.kubernetes.rights import INSTALLED, ROOT

from rackloom.core.cluster.objects import Object


def built(folder: str) -> Iterator[Object]:
    """The objects of a folder, as `kubectl apply -k` sends them."""
    path, _ = INSTALLED[folder]
    command = ["kubectl", "kustomize", str(ROOT / "deploy" / path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    yield from filter(None, yaml.safe_load_all(done.stdout))
