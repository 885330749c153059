"""Kueue and LeaderWorkerSet place their own workloads on the trays of `rackloom up --kubeconfig`.

Rackloom renders nothing here. Users follow the documentation of the two projects, with claims for the GPUs of
a tray, and the projects' own controllers and kube-scheduler decide. The trays are those of a site that runs
as a separate process, as a user starts it.
"""

import contextlib
import itertools
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import kubectl
from tests.cluster.processes import Child, start
from tests.cluster.renderings.applied import CLIQUE, RACKLOOM, apply, spread
from tests.cluster.renderings.build import KUEUE, QUEUES, source
from tests.cluster.renderings.conftest import GPUS, TRAYS
from tests.cluster.renderings.jobs import GPU
from tests.cluster.renderings.operators import Operator, installed
from tests.cluster.renderings.test_kueue import WORKLOAD
from tests.waiting import PATIENCE, until

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.core.cluster.names import GPU_DRIVER, SIMULATED_LABEL
from rackloom.core.cluster.objects import (
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
)

pytestmark = pytest.mark.anyio
_numbers = itertools.count(1)
RACKS = 2
KUEUE_VERSION = "kueue.x-k8s.io/v1beta2"
CONFIG: Object = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "namespace": "kueue-system",
    "integrations": {"frameworks": ["batch/job"]},
    "resources": {"deviceClassMappings": [{"name": GPU, "deviceClassNames": [GPU_DRIVER]}]},
}
TOLERATION = {"key": SIMULATED_LABEL, "operator": "Exists", "effect": "NoSchedule"}
# Kueue 0.19.0 counts claims towards quota, but not in its search for a topology: there the CPUs keep a
# second member off a tray. A pod with a claim but without any request crashes it on a nil pointer.
RESOURCES = {"requests": {"cpu": "100"}, "claims": [{"name": "gpus"}]}
POD_SPEC: Object = {
    "containers": [{"name": "main", "image": "none", "resources": RESOURCES}],
    "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "tray"}],
}


@pytest.fixture(scope="module")
def site(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Racks in the cluster, each of which a tenant has taken as a whole: all by the command line."""
    home = tmp_path_factory.mktemp("home")
    words = ("--port", "0", "--racks", str(RACKS), "--home", home, "--kubeconfig", cluster.admin)
    child = start("rackloom-up", [RACKLOOM, "up", *words], cluster.logs)
    try:
        _order(home, "twin", "status", "--wait", str(int(PATIENCE)))
        _order(home, "partition", "create", "train")
        _order(home, "vpc", "create", "net", "--partition", "train")
        for rack in range(RACKS):
            _order(
                home, "instance", "create", f"rack-{rack}", "--vpc", "net", "--count", str(TRAYS), "--wait"
            )
        yield child
        # It deletes its nodes, and that takes a while.
        child.process.terminate()
        assert child.process.wait(PATIENCE) == 0, child.tail()
    finally:
        child.stop()


def _order(home: Path, *words: str) -> None:
    command = [str(RACKLOOM), *words, "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


@pytest.fixture
async def trays(site: Child, api: KubeApi) -> None:
    """The trays of the site, once all publish their GPUs and belong to a clique."""

    async def published() -> bool:
        assert not site.ended(), site.tail()
        nodes = (await api.list(NODE, labels=f"{SIMULATED_LABEL}=true,{CLIQUE}")).items
        slices = (await api.list(RESOURCE_SLICE, fields=f"spec.driver={GPU_DRIVER}")).items
        return len(nodes) == len(slices) == RACKS * TRAYS

    await until(published, "every tray is published with its clique")


@pytest.fixture
async def namespace(trays: None, api: KubeApi) -> AsyncIterator[str]:
    """A namespace with a claim template for all GPUs of a tray. At the end its pods are gone."""
    name = f"users-{next(_numbers)}"
    await api.create(NAMESPACE, {"metadata": {"name": name}})
    gpus = {"name": "gpus", "exactly": {"deviceClassName": GPU_DRIVER, "count": GPUS}}
    spec = {"spec": {"devices": {"requests": [gpus]}}}
    await api.create(RESOURCE_CLAIM_TEMPLATE, {"metadata": {"name": "tray", "namespace": name}, "spec": spec})
    yield name
    await api.delete(NAMESPACE, name)

    async def is_empty() -> bool:
        return not (await api.list(POD, name)).items

    await until(is_empty, "the pods of a deleted namespace are gone")


@pytest.fixture
async def kueue(operators: Path, cluster: ControlPlane, api: KubeApi) -> AsyncIterator[None]:
    """Kueue, configured with the resource that a device of the class `gpu.nvidia.com` is."""
    operator = Operator("kueue", operators / "kueue", source(QUEUES, KUEUE), CONFIG)
    async with installed(operator, cluster, api):
        yield


def queue(namespace: str, racks: int) -> list[Object]:
    """An administrator's objects: the topology, a flavor of simulated trays, a queue for `racks` racks."""

    def made(kind: str, name: str, spec: Object, **more: str) -> Object:
        metadata = {"name": name, **more}
        return {"apiVersion": KUEUE_VERSION, "kind": kind, "metadata": metadata, "spec": spec}

    levels = [{"nodeLabel": CLIQUE}, {"nodeLabel": "kubernetes.io/hostname"}]
    flavor = {
        "nodeLabels": {SIMULATED_LABEL: "true"},
        "tolerations": [TOLERATION],
        "topologyName": "racks",
    }
    quotas = [{"name": GPU, "nominalQuota": racks * TRAYS * GPUS}, {"name": "cpu", "nominalQuota": "9999"}]
    group = {"coveredResources": [GPU, "cpu"], "flavors": [{"name": "trays", "resources": quotas}]}
    return [
        made("Topology", "racks", {"levels": levels}),
        made("ResourceFlavor", "trays", flavor),
        made("ClusterQueue", "all", {"namespaceSelector": {}, "resourceGroups": [group]}),
        made("LocalQueue", "default", {"clusterQueue": "all"}, namespace=namespace),
    ]


def queued_job(namespace: str, name: str) -> Object:
    """A Job of a whole rack, suspended as Kueue wants it."""
    wanted = {"kueue.x-k8s.io/podset-required-topology": CLIQUE}
    template = {"metadata": {"annotations": wanted}, "spec": {"restartPolicy": "Never", **POD_SPEC}}
    labels = {"kueue.x-k8s.io/queue-name": "default"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"suspend": True, "parallelism": TRAYS, "completions": TRAYS, "template": template},
    }


async def running(api: KubeApi, namespace: str, labels: str, count: int) -> list[Object]:
    """`count` pods that run on simulated trays, each with all GPUs of its tray."""
    pods: list[Object] = []

    async def all_run() -> bool:
        pods[:] = (await api.list(POD, namespace, labels=labels)).items
        return [pod["status"].get("phase") for pod in pods] == ["Running"] * count

    try:
        await until(all_run, f"{count} pods run")
    except AssertionError as error:
        error.add_note(f"they wait for: {await waiting_for(api, namespace)}")
        raise
    nodes = [pod["spec"]["nodeName"] for pod in pods]
    assert len(set(nodes)) == count
    for pod in pods:
        assert await gpus_of(api, namespace, pod) == {pod["spec"]["nodeName"]: GPUS}
    return pods


async def waiting_for(api: KubeApi, namespace: str) -> dict[str, int]:
    """The messages of the scheduler and of Kueue about pods and workloads."""
    objects = [*(await api.list(POD, namespace)).items]
    with contextlib.suppress(NotFound):  # Without Kueue there are no workloads.
        objects += (await api.list(WORKLOAD, namespace)).items
    conditions = (condition for found in objects for condition in found["status"].get("conditions", ()))
    return dict(Counter(f"{condition['type']}: {condition.get('message', '')}" for condition in conditions))


async def gpus_of(api: KubeApi, namespace: str, pod: Object) -> dict[str, int]:
    """The number of GPUs of each node's pool in a pod's claim, which the node's plugin has prepared."""
    (status,) = pod["status"]["resourceClaimStatuses"]
    claim = (await api.get(RESOURCE_CLAIM, status["resourceClaimName"], namespace))["status"]
    assert [holder["name"] for holder in claim["reservedFor"]] == [pod["metadata"]["name"]]
    allocated = claim["allocation"]["devices"]["results"]
    assert len({result["device"] for result in allocated}) == len(allocated)
    assert {result["driver"] for result in allocated} == {GPU_DRIVER}
    return dict(Counter(result["pool"] for result in allocated))


async def test_kueue_runs_jobs_of_claims_within_its_quota_each_in_a_clique(
    kueue: None, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    apply(cluster, queue(namespace, racks=1))
    apply(cluster, [queued_job(namespace, "first")])
    pods = await running(api, namespace, "job-name=first", TRAYS)
    assert list((await spread(api, pods)).values()) == [TRAYS]

    apply(cluster, [queued_job(namespace, "second")])

    async def waits_for_quota() -> bool:
        return any(map(_lacks_quota, (await api.list(WORKLOAD, namespace)).items))

    # A rack is free: the job waits for the quota alone.
    await until(waits_for_quota, "the second job waits for quota")
    assert not (await api.list(POD, namespace, labels="job-name=second")).items

    kubectl(cluster, "delete", "job", "first", "-n", namespace)
    pods = await running(api, namespace, "job-name=second", TRAYS)
    assert list((await spread(api, pods)).values()) == [TRAYS]


def _lacks_quota(workload: Object) -> bool:
    conditions = workload.get("status", {}).get("conditions", ())
    return any("insufficient unused quota" in condition["message"] for condition in conditions)


async def test_leader_worker_set_keeps_each_replica_in_a_clique(
    lws: None, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    template = {"size": TRAYS, "workerTemplate": {"spec": {**POD_SPEC, "tolerations": [TOLERATION]}}}
    exclusive = {"leaderworkerset.sigs.k8s.io/exclusive-topology": CLIQUE}
    service: Object = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "decode", "namespace": namespace, "annotations": exclusive},
        "spec": {"replicas": RACKS, "leaderWorkerTemplate": template},
    }
    apply(cluster, [service])

    name = "leaderworkerset.sigs.k8s.io/name=decode"
    pods = await running(api, namespace, name, RACKS * TRAYS)
    cliques = await spread(api, pods, "leaderworkerset.sigs.k8s.io/group-index")
    assert list(cliques.values()) == [TRAYS] * RACKS
    assert len({clique for _, clique in cliques}) == RACKS
