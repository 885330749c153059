"""The output of `rackloom place --render`, applied unchanged, and the nodes of its pods."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import tried
from tests.waiting import until, until_seen

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import CRD, NODE, POD, Object

CLIQUE = "nvidia.com/gpu.clique"
RACKLOOM = Path(sys.executable).with_name("rackloom")
SMALL = "small"
"""The label of pods that are in the way of a job."""


def apply(cluster: ControlPlane, documents: Sequence[Object], *more: str) -> None:
    """Apply them as they are. An unknown field is an error."""
    text = yaml.safe_dump_all(documents)
    words = ("apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", "-")

    def are_applied() -> bool:
        """The API server can call an operator's webhook only a moment after its registration."""
        done = tried(cluster, *words, *more, given=text)
        assert done.returncode == 0 or "calling webhook" in done.stderr, done.stderr
        return done.returncode == 0

    until_seen(are_applied, "the objects are taken")


async def established(api: KubeApi) -> None:
    """Wait until the API server serves all that has been defined."""

    async def all_served() -> bool:
        return all(_is_established(item) for item in (await api.list(CRD)).items)

    await until(all_served, "the definitions are established")


def _is_established(definition: Object) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(
        condition["type"] == "Established" and condition["status"] == "True" for condition in conditions
    )


def place(cluster: ControlPlane, job: Path, *words: str) -> str:
    """The output of `rackloom place` for a job, on the cluster as it is now."""
    command = [RACKLOOM, "place", str(job), "--cluster", *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "KUBECONFIG": str(cluster.admin)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(cluster: ControlPlane, job: Path, target: str, *words: str) -> list[Object]:
    """The objects that are printed for a scheduler."""
    printed = place(cluster, job, "--render", target, *words)
    return [document for document in yaml.safe_load_all(printed) if document]


def planned(cluster: ControlPlane, job: Path, *words: str) -> Object:
    """The plan itself."""
    answer = json.loads(place(cluster, job, "-o", "json", *words))
    plan: Object = answer["jobs"][0]["plan"]
    return plan


async def landed(api: KubeApi, namespace: str, count: int) -> list[Object]:
    """The members of the only job of a namespace, once all of them have a node.

    Raises:
        AssertionError: not all have one in time. It lists their nodes and the reasons of those that wait.
    """
    pods: list[Object] = []

    async def all_bound() -> bool:
        pods[:] = (await api.list(POD, namespace, labels=f"!{SMALL}")).items
        return len(pods) == count and all("nodeName" in pod["spec"] for pod in pods)

    try:
        await until(all_bound, f"{count} members have a node")
    except AssertionError as error:
        error.add_note(f"{dict(await spread(api, pods))}; waiting: {dict(Counter(map(_reason, pods)))}")
        raise
    return pods


def _reason(pod: Object) -> str:
    conditions = pod.get("status", {}).get("conditions", ())
    messages = [
        condition.get("message", "") for condition in conditions if condition["type"] == "PodScheduled"
    ]
    return messages[0] if messages else "nobody has looked at it"


async def spread(api: KubeApi, pods: Sequence[Object], *labels: str) -> Counter[tuple[str, ...]]:
    """The number of pods for each clique and each value of the labels, or for each clique without labels."""
    nodes = {node["metadata"]["name"]: node["metadata"]["labels"] for node in (await api.list(NODE)).items}
    return Counter(
        (*(pod["metadata"]["labels"][label] for label in labels), nodes[pod["spec"]["nodeName"]][CLIQUE])
        for pod in pods
        if "nodeName" in pod["spec"]
    )
