"""MPIJobs from the operator's own end-to-end tests, each as a Rackloom gang, under the real operator.

One operator, with `--cluster-domain`, works for the whole module. No container runs MPI: a launcher ends when
the test ends it, or at once if its command is `false`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from tests.cluster.build import Tools
from tests.cluster.conftest import adding_nodes, administered, at_work, has_account, mpi_operator_at_work
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import MPI_JOB
from tests.cluster.gangs_at_work import PATIENCE, gangs_at_work, record, two_racks
from tests.cluster.test_mpi_operator import ROLE
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.gang_objects import GROUP_LABEL, SEGMENT_ANNOTATION, reserving_plans
from rackloom.core.cluster.objects import CONFIG_MAP, JOB, NAMESPACE, NODE, POD, SECRET, SERVICE, Object
from rackloom.core.cluster.pods import SIZE_ANNOTATION
from rackloom.lab.nodes.pods import IdleContainers, NoDeviceManager

pytestmark = pytest.mark.anyio
CLUSTER_DOMAIN = "cluster.local"
TRAYS = 4
"""In each of the two racks."""
USER = 1000
"""Of a job that does not run as root."""
SSH_PORT = 2222


class Launchers:
    """Launchers succeed when the test marks their job as done. Workers serve until they are deleted."""

    def __init__(self) -> None:
        self._done: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def end(self, job: str) -> None:
        self._done[job].set()

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        labels = pod["metadata"]["labels"]
        if labels.get(ROLE) != "launcher":
            return await IdleContainers().run(node, pod, ready)
        await ready()
        if pod["spec"]["containers"][0].get("command") == ["false"]:
            return 1
        await self._done[labels["training.kubeflow.org/job-name"]].wait()
        return 0


class Story:
    """The jobs of the module, in one namespace: the end of each would take seconds."""

    def __init__(self, api: KubeApi, namespace: str, launchers: Launchers, racks: dict[str, str]) -> None:
        self.api = api
        self.namespace = namespace
        self.launchers = launchers
        self.racks = racks

    async def pods(self, job: str) -> list[Object]:
        """Sorted by name. The launcher's pod has a random name and comes first."""
        found = (await self.api.list(POD, self.namespace, labels=f"job={job}")).items
        return sorted(found, key=lambda pod: (pod["metadata"]["labels"][ROLE], pod["metadata"]["name"]))

    async def create(self, job: Object) -> None:
        job["metadata"]["namespace"] = self.namespace
        await self.api.create(MPI_JOB, job)

    async def run(self, job: Object) -> list[Object]:
        """The pods of a new job, once all of them run: each on a tray that is reserved for its gang."""
        name = job["metadata"]["name"]
        workers = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
        await self.create(job)

        async def look() -> list[Object]:
            pods = await self.pods(name)
            do_run = [pod["status"].get("phase") == "Running" for pod in pods]
            return pods if do_run == [True] * (1 + workers) else []

        pods = await until(look, f"launcher and workers of {name} run", PATIENCE)
        plan = await record(self.api, self.namespace, name)
        assert plan is not None
        assert set(plan.reserved) == {pod["spec"]["nodeName"] for pod in pods}
        return pods

    async def condition(self, job: str, wanted: str) -> bool:
        status = (await self.api.get(MPI_JOB, job, self.namespace)).get("status", {})
        met = [item["type"] for item in status.get("conditions", ()) if item["status"] == "True"]
        return wanted in met

    async def succeeds(self, *jobs: str) -> None:
        """The launchers end, each job succeeded, and no tray is reserved any more."""
        for job in jobs:
            self.launchers.end(job)
        for job in jobs:
            await until(partial(self.condition, job, "Succeeded"), f"{job} succeeded", PATIENCE)
            await until(partial(self.is_released, job), f"{job} has given its trays back", PATIENCE)

    async def is_released(self, job: str) -> bool:
        return await record(self.api, self.namespace, job) is None

    async def hosts(self, job: str) -> list[str]:
        found = await self.api.get(CONFIG_MAP, f"{job}-config", self.namespace)
        return str(found["data"]["hostfile"]).splitlines()

    def address(self, pod: str, job: str) -> str:
        return f"{pod}.{job}.{self.namespace}.svc.{CLUSTER_DOMAIN}"


@pytest.fixture(scope="module")
async def story(binaries: Callable[[Tools], Path], cluster: ControlPlane) -> AsyncIterator[Story]:
    """Our installation on two racks, and the operator."""
    launchers = Launchers()
    async with (
        administered(cluster) as api,
        at_work(api, NoDeviceManager(), launchers) as kubelets,
        adding_nodes(api, kubelets) as add,
        mpi_operator_at_work(binaries, cluster, api, CLUSTER_DOMAIN),
        gangs_at_work(cluster, api, add),
    ):
        racks = await two_racks(add, TRAYS)
        namespace = "mpi-job-kinds"
        await api.create(NAMESPACE, {"metadata": {"name": namespace}})
        await until(partial(has_account, api, namespace), "the service account of a new namespace")
        yield Story(api, namespace, launchers, racks)
        # Every pod there has ended, so the deletion does not need the kubelets.
        await api.delete(NAMESPACE, namespace)


def pod_template(name: str, size: str, group: str | None, gpus: int) -> Object:
    labels = {"job": name, "rackloom.dev/gang": name}
    limits = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if gpus else {}
    return {
        "metadata": {
            "labels": labels if group is None else {**labels, GROUP_LABEL: group},
            "annotations": {SIZE_ANNOTATION: size},
        },
        "spec": {"containers": [{"name": "main", "image": "none", **limits}]},
    }


def mpi_job(name: str, *, workers: int = 2, gpus: int = 4, **fields: object) -> Object:
    """A gang of a launcher without a GPU and of workers."""
    size = f"launcher=1,worker={workers}"
    launcher, worker = pod_template(name, size, "launcher", 0), pod_template(name, size, "worker", gpus)
    return {
        "apiVersion": MPI_JOB.api_version,
        "kind": MPI_JOB.kind,
        "metadata": {"name": name},
        "spec": {
            "slotsPerWorker": gpus,
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {"restartPolicy": "OnFailure", "template": launcher},
                "Worker": {"replicas": workers, "template": worker},
            },
            **fields,
        },
    }


def specs(job: Object) -> tuple[Object, Object]:
    """The pod specs of launcher and workers."""
    roles = job["spec"]["mpiReplicaSpecs"]
    return roles["Launcher"]["template"]["spec"], roles["Worker"]["template"]["spec"]


def as_user(job: Object) -> Object:
    """The job under another user, whose keys are elsewhere."""
    job["spec"]["sshAuthMountPath"] = "/home/mpiuser/.ssh"
    for role in specs(job):
        role["containers"][0]["securityContext"] = {"runAsUser": USER}
    return job


async def test_a_job_whose_launcher_fails_has_failed_and_gives_its_trays_back(story: Story) -> None:
    job = mpi_job("fails")
    job["spec"]["runPolicy"]["backoffLimit"] = 1
    specs(job)[0]["containers"][0]["command"] = ["false"]
    await story.create(job)
    await until(lambda: story.condition("fails", "Failed"), "the job failed", PATIENCE)
    await until(lambda: story.is_released("fails"), "it has given its trays back", PATIENCE)
    first, second = await story.pods("fails")
    assert first["spec"]["nodeName"] == second["spec"]["nodeName"], "its launcher is tried again on its tray"


async def test_a_job_in_the_hosts_network_has_a_tray_for_each_port(story: Story) -> None:
    """Two workers of one GPU would fit on one tray, were it not for the port of their SSH server."""
    job = mpi_job("hosts", gpus=1)
    for role in specs(job):
        role["hostNetwork"] = True
    specs(job)[1]["containers"][0]["ports"] = [{"containerPort": SSH_PORT}]
    launcher, *workers = await story.run(job)
    assert all(pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet" for pod in (launcher, *workers))
    assert len({pod["spec"]["nodeName"] for pod in workers}) == len(workers)
    assert launcher["spec"]["nodeName"] == workers[0]["spec"]["nodeName"]
    await story.succeeds("hosts")


async def test_a_job_of_another_manager_is_left_alone_and_one_of_the_operator_runs(story: Story) -> None:
    theirs, own = as_user(mpi_job("theirs")), as_user(mpi_job("own"))
    theirs["spec"]["runPolicy"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    own["spec"]["runPolicy"]["managedBy"] = "kubeflow.org/mpi-operator"
    await story.create(theirs)
    await story.run(own)
    await story.succeeds("own")

    assert "status" not in await story.api.get(MPI_JOB, "theirs", story.namespace)
    for kind in (POD, JOB, SERVICE, SECRET, CONFIG_MAP):
        names = [item["metadata"]["name"] for item in (await story.api.list(kind, story.namespace)).items]
        assert not [name for name in names if name.startswith("theirs")], kind
    assert await record(story.api, story.namespace, "theirs") is None
    assert not [node for node in (await story.api.list(NODE)).items if reserving_plans(node)]


async def test_jobs_of_other_mpis_run_as_root_and_as_a_user(story: Story) -> None:
    host_files = {"Intel": "I_MPI_HYDRA_HOST_FILE", "MPICH": "HYDRA_HOST_FILE"}
    jobs = {}
    for implementation, user in product(host_files, (None, USER)):
        name = f"{implementation.lower()}-{'root' if user is None else 'user'}"
        job = mpi_job(name, mpiImplementation=implementation)
        jobs[name] = job if user is None else as_user(job)
    every = await asyncio.gather(*map(story.run, jobs.values()))
    for (name, job), pods in zip(jobs.items(), every, strict=True):
        launcher, *workers = (pod["spec"] for pod in pods)
        assert host_files[job["spec"]["mpiImplementation"]] in {
            entry["name"] for entry in launcher["containers"][0]["env"]
        }
        assert launcher["nodeName"] == workers[0]["nodeName"]
        assert len({story.racks[worker["nodeName"]] for worker in workers}) == 1
        addresses = (story.address(f"{name}-worker-{index}", name) for index in range(len(workers)))
        assert await story.hosts(name) == [f"{address}:4" for address in addresses]
        for pod in (launcher, *workers):
            user = pod["containers"][0].get("securityContext", {}).get("runAsUser")
            assert user == (USER if name.endswith("user") else None)
    await story.succeeds(*jobs)


async def test_a_launcher_that_is_a_worker_is_the_first_of_its_gang(story: Story) -> None:
    """Six members in segments of three on two racks of four trays: workers 0 and 1 are in its rack."""
    job = mpi_job("segments", workers=5, runLauncherAsWorker=True)
    for role in job["spec"]["mpiReplicaSpecs"].values():
        role["template"] = pod_template("segments", "6", None, gpus=4)
        role["template"]["metadata"]["annotations"][SEGMENT_ANNOTATION] = "3"
    pods = await story.run(job)
    indexes = [pod["metadata"]["labels"]["training.kubeflow.org/replica-index"] for pod in pods]
    assert indexes == ["0", "1", "2", "3", "4", "5"], "the operator counts the launcher as the first"
    hosts = ["segments-launcher", *(f"segments-worker-{index}" for index in range(5))]
    assert await story.hosts("segments") == [f"{story.address(host, 'segments')} slots=4" for host in hosts]
    trays = [pod["spec"]["nodeName"] for pod in pods]
    assert len(set(trays)) == len(pods), "the launcher has a tray of its own"
    racks = [story.racks[tray] for tray in trays]
    assert racks[0] != racks[3]
    assert racks == [racks[0]] * 3 + [racks[3]] * 3
    await story.succeeds("segments")
