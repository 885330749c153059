"""Another image under a running job, according to docs/install.md, and back again."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml
from tests.node.conftest import ROOT, only_all
from tests.node.nodes import NodeCluster
from tests.node.workloads import claiming, compute_domain, is_ready, pod, until_gone, until_running
from tests.waiting import until_seen

pytestmark = only_all
SYSTEM = ("-n", "rackloom-system")
PLUGINS = ("node-imex", "node-gpu", "node-nic")
WORKLOADS = (
    "deployment/rackloom-controller",
    "deployment/rackloom-webhook",
    *(f"daemonset/rackloom-{plugin}" for plugin in PLUGINS),
)
DELETE_JOB = ("delete", *SYSTEM, "job", "rackloom-webhook-certificates-1", "--ignore-not-found")
NEXT = "next"
"""The tag of the image that is upgraded to: the same program, since there is one release only."""


def test_a_job_runs_on_through_an_upgrade_and_back(admission: NodeCluster, tmp_path: Path) -> None:
    for node in admission.nodes:
        node.run(
            "ctr",
            "-n",
            "k8s.io",
            "images",
            "tag",
            "docker.io/library/rackloom:0.1.0",
            f"docker.io/library/rackloom:{NEXT}",
        )
    pods = _job(admission, "before")
    until_running(admission, *pods)
    began = _started(admission, pods), _daemons(admission)

    _upgrade(admission, _with_image(tmp_path, "base", NEXT), _with_image(tmp_path, "webhook", NEXT))
    assert _images(admission) == {f"rackloom:{NEXT}"}
    assert (_started(admission, pods), _daemons(admission)) == began, "the job or its daemons were restarted"
    until_seen(lambda: is_ready(admission, "before"), "the job's domain is Ready", 60)
    later = _job(admission, "later", at=1)  # it waits: a node is of one job
    _end(admission, "before", pods)
    until_running(admission, *later)
    assert {image for image, _ in _daemons(admission)} == {f"rackloom:{NEXT}"}

    _go_back(admission)
    assert _images(admission) == {"rackloom:0.1.0"}
    until_seen(lambda: is_ready(admission, "later"), "the job's domain is Ready", 60)
    _end(admission, "later", later)
    last = _job(admission, "last")
    until_running(admission, *last)
    _end(admission, "last", last)


def _with_image(folder: Path, part: str, tag: str) -> Path:
    """The files with another tag of the image, set where deploy/kubernetes/README.md sets it."""
    copied = shutil.copytree(ROOT / "deploy/kubernetes" / part, folder / part)
    file = copied / "kustomization.yaml"
    kustomization = yaml.safe_load(file.read_text())
    kustomization["images"] = [{"name": "rackloom", "newTag": tag}]
    file.write_text(yaml.safe_dump(kustomization))
    return copied


def _upgrade(cluster: NodeCluster, files: Path, webhook: Path) -> None:
    """The commands of docs/install.md, in their order."""
    others = f"app.kubernetes.io/component notin ({', '.join(PLUGINS)})"
    cluster.kubectl("apply", "-k", str(files), "-l", others)
    cluster.kubectl("rollout", "status", *SYSTEM, "deployment/rackloom-controller", "--timeout=120s")
    cluster.kubectl("apply", "-k", str(files))
    cluster.kubectl(*DELETE_JOB)
    cluster.kubectl("apply", "-k", str(webhook))
    _until_rolled_out(cluster)


def _go_back(cluster: NodeCluster) -> None:
    """Plugins first, and the definitions stay."""
    built = yaml.safe_load_all(cluster.kubectl("kustomize", str(ROOT / "deploy/kubernetes/base")))
    base = yaml.safe_dump_all(obj for obj in built if obj["kind"] != "CustomResourceDefinition")
    ours = f"app.kubernetes.io/component in ({', '.join(PLUGINS)})"
    cluster.kubectl("apply", "-f", "-", "-l", ours, given=base)
    cluster.kubectl("apply", "-f", "-", given=base)
    cluster.kubectl(*DELETE_JOB)
    cluster.kubectl("apply", "-k", str(ROOT / "deploy/kubernetes/webhook"))
    _until_rolled_out(cluster)


def _until_rolled_out(cluster: NodeCluster) -> None:
    for workload in WORKLOADS:
        cluster.kubectl("rollout", "status", *SYSTEM, workload, "--timeout=120s")


def _images(cluster: NodeCluster) -> set[str]:
    """The images of our programs that run, without pods that no upgrade replaces: MPS daemons, ended Jobs."""
    others = "app.kubernetes.io/component notin (node-mps, webhook-certificates)"
    found = cluster.get("pods", *SYSTEM, "-l", others)["items"]
    live = [item for item in found if "deletionTimestamp" not in item["metadata"]]
    return {container["image"] for item in live for container in item["spec"]["containers"]}


def _job(cluster: NodeCluster, name: str, at: int = 0) -> list[str]:
    """A ComputeDomain with a pod on each node, from the one at this index on."""
    nodes = [node.name for node in cluster.nodes[at:]]
    pods = [f"{name}-{node}" for node in nodes]
    workers = [
        claiming(pod(worker, node=node), f"{name}-channel") for worker, node in zip(pods, nodes, strict=True)
    ]
    cluster.apply(compute_domain(name, f"{name}-channel"), *workers)
    return pods


def _started(cluster: NodeCluster, pods: Sequence[str]) -> list[str]:
    path = "jsonpath={.status.containerStatuses[0].state.running.startedAt}"
    return [cluster.kubectl("get", "pod", name, "-o", path) for name in pods]


def _daemons(cluster: NodeCluster) -> set[tuple[str, str]]:
    """Image and UID of each IMEX daemon's pod."""
    found = cluster.get("pods", "-n", "rackloom-imex")["items"]
    return {(item["spec"]["containers"][0]["image"], item["metadata"]["uid"]) for item in found}


def _end(cluster: NodeCluster, domain: str, pods: Sequence[str]) -> None:
    cluster.kubectl("delete", "pod", *pods, "--wait=false")
    cluster.kubectl("delete", "computedomain", domain, "--timeout=60s")
    until_gone(cluster, *pods)
