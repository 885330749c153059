"""How Rackloom comes onto the nodes: deploy/kubernetes by kustomize, or the chart by Helm.

`run.py --chart` chooses the chart with its default values, `run.py --chart=one-process` with the values of
deploy/helm/one-process.yaml. Users install the same files unchanged.
"""

import os
import subprocess
from pathlib import Path

from tests.cluster.build import HELM, made
from tests.node.nodes import NodeCluster

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = "RACKLOOM_NODE_CHART"
"""Set if the chart is installed: the name of a values file of deploy/helm, or empty."""
_RELEASE = "rackloom"


def plugins() -> list[str]:
    """The DaemonSets of the node plugins."""
    kinds = ("all",) if os.environ.get(CHART) == "one-process" else ("gpu", "imex", "nic")
    return [f"rackloom-node-{kind}" for kind in kinds]


def gpu_plugin() -> str:
    """The DaemonSet that serves GPUs."""
    return plugins()[0]


def install(cluster: NodeCluster) -> None:
    """Everything but admission."""
    if CHART not in os.environ:
        cluster.kubectl("apply", "-k", str(DEPLOY / "kubernetes/base"))
        return
    values = os.environ[CHART]
    words = ("--values", str(DEPLOY / f"helm/{values}.yaml")) if values else ()
    _helm(cluster, "install", _RELEASE, str(DEPLOY / "helm/rackloom"), *words)


def install_webhook(cluster: NodeCluster) -> None:
    """Install admission beside the core that `install` has installed."""
    if CHART not in os.environ:
        cluster.kubectl("apply", "-k", str(DEPLOY / "kubernetes/webhook"))
        return
    values = str(DEPLOY / "helm/webhook.yaml")
    _helm(cluster, "upgrade", _RELEASE, str(DEPLOY / "helm/rackloom"), "--reuse-values", "--values", values)


def words_to_uninstall() -> list[str]:
    """The words that describe the installation to `rackloom uninstall`."""
    return ["--helm-release", _RELEASE] if CHART in os.environ else []


def _helm(cluster: NodeCluster, *words: str) -> None:
    homes = {
        f"HELM_{kind}_HOME": str(cluster.folder / f"helm-{kind}") for kind in ("CACHE", "CONFIG", "DATA")
    }
    environment = {**os.environ, **homes, "KUBECONFIG": str(cluster.plane.admin)}
    command = [made(HELM) / "helm", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"helm {' '.join(words)}: {done.stdout}{done.stderr}"
