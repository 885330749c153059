"""Seed manifests on a real control plane with all programs of this project, from apply to nothing left.

The API server, scheduler, controllers, MPI operator, our controller, webhook, node plugins and IMEX daemons
are the real ones with the rights of their pods. Kubelets, containers and nvidia-imex are simulated.

In mode `domain`, the trays are two cliques of 18. In mode `channel`, one clique of 18 is kept warm. 36
trays with all their programs in one process need the whole machine: deadlines pass on a busy one. Deaths
between any two steps are in `tests/claim/node/imex/test_crash_points.py` and
`tests/claim/cluster/test_crashes.py`. Here, a death is a cancelled task, and `test_controller_replicas`
kills a process.
"""

import datetime as dt
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.claim.node.plugin_manager import KubeletPluginManager, SocketDraManager
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import MPI_JOB
from tests.cluster.installed import applied
from tests.cluster.policies import DAEMONS
from tests.cluster.story import Reader, Site, admission
from tests.cluster.story_jobs import DEATHS, domain, end, hand_made, prepare_event, worker
from tests.cluster.story_jobs import start as start_job
from tests.cluster.story_programs import DAEMON_ACCOUNT, Programs, pods_of
from tests.cluster.story_trays import Tray, kubelets_of
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.requests import ANSWER_SECONDS
from rackloom.core.cluster.domain_objects import Readiness
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    NAMESPACE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    Object,
)
from rackloom.core.diagnosis.checks.domains import check_domains
from rackloom.core.diagnosis.findings import CheckState, verdict
from rackloom.lab.nodes.dra_manager import pod_claim
from rackloom.lab.nodes.kubelets import SimulatedKubelets
from rackloom.prove.collectors.cluster import collect_cluster

pytestmark = [
    pytest.mark.anyio,
    # asyncio of Python 3.11 leaves connections with a cancelled opener to the collector, and daemons that die
    # in this process are cancelled tasks.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
WORKERS = 18


@dataclass(frozen=True)
class Scene:
    """Trays by clique, and the installation on them."""

    racks: Mapping[int, int]
    isolation: ImexIsolation = ImexIsolation.DOMAIN
    overlay: str = "base"
    with_webhook: bool = False


TWO_RACKS = Scene({1: 18, 2: 18})
SHARED_RACK = Scene({1: 18}, ImexIsolation.CHANNEL, "channel-isolation", with_webhook=True)
FEW_TRAYS = Scene({1: 3, 2: 3})
"""Every rack takes a whole job: affinity alone lets the first pod choose one that is too small for all."""


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Scene:
    found: Scene = request.param
    return found


@pytest.fixture
def trays(scene: Scene) -> Iterator[dict[str, Tray]]:
    with tempfile.TemporaryDirectory(prefix="rl") as home:
        places = [(rack, slot) for rack, count in scene.racks.items() for slot in range(1, count + 1)]
        made = {
            f"rack{rack}-tray{slot}": Tray(Path(home) / f"{rack}-{slot}", rack, slot) for rack, slot in places
        }
        for tray in made.values():
            tray.furnish()
        yield made


@pytest.fixture
async def node_kubelets(
    api: KubeApi, trays: dict[str, Tray]
) -> AsyncIterator[dict[str, KubeletPluginManager]]:
    async with kubelets_of(trays, api) as kubelets:
        yield kubelets


@pytest.fixture
def devices(node_kubelets: dict[str, KubeletPluginManager]) -> SocketDraManager:
    return SocketDraManager(node_kubelets)


@pytest.fixture
def containers(
    scene: Scene,
    cluster: ControlPlane,
    api: KubeApi,
    trays: dict[str, Tray],
    tmp_path: Path,
    loopback_network: str,
) -> Programs:
    return Programs(cluster, api, trays, tmp_path, loopback_network, scene.isolation)


@pytest.fixture
async def site(
    scene: Scene,
    cluster: ControlPlane,
    api: KubeApi,
    kubelets: SimulatedKubelets,
    trays: dict[str, Tray],
    containers: Programs,
    namespace: str,
) -> AsyncIterator[Site]:
    """Everything installed and running."""
    site = Site(cluster, api, kubelets, trays, containers)
    await site.power_on()
    async with applied(cluster, api, scene.overlay), AsyncExitStack() as stack:
        if scene.with_webhook:
            await stack.enter_async_context(admission(cluster, api, containers))
        await site.serves()
        yield site
        await site.give_up(namespace)
    await site.power_off()


@pytest.mark.parametrize("scene", [TWO_RACKS, SHARED_RACK], indirect=True, ids=["domain", "channel"])
async def test_both_seed_manifests_reach_ready_and_leave_nothing(
    site: Site, scene: Scene, mpi_operator: None, namespace: str
) -> None:
    shares = scene.isolation is ImexIsolation.CHANNEL
    if shares:
        await site.warm()
    await site.apply("imex-minimal", namespace)
    (pod,) = await site.running(namespace, "imex-minimal", 1)
    status = await site.ready("imex-minimal", namespace, {pod["spec"]["nodeName"]}, shared=shares)
    await site.api.delete(POD, "imex-minimal", namespace)

    async def empty() -> bool:
        left = await site.status("imex-minimal", namespace)
        return (left.status, left.nodes) == (Readiness.NOT_READY, ())

    if not shares:
        await until(empty, "the domain that stays has no node, and is not ready")
    await site.api.delete(COMPUTE_DOMAIN, "imex-minimal", namespace)
    await site.is_clean(namespace)

    await site.apply("imex-mpijob", namespace)
    pods = await site.running(namespace, "rack-bandwidth-worker", WORKERS)
    assert len(site.cliques_of(pods)) == 1
    nodes = {pod["spec"]["nodeName"] for pod in pods}
    assert len(nodes) == WORKERS
    status = await site.ready("rack-bandwidth", namespace, nodes, shared=shares)
    assert {node.index for node in status.nodes} == set(range(WORKERS))
    await site.running(namespace, "rack-bandwidth-launcher", 1)
    claims = await site.kubectl("get", "resourceclaims", "-n", namespace)
    assert claims.count("allocated,reserved") == (1 if shares else WORKERS)

    async def shown() -> bool:
        table = (await site.kubectl("get", "computedomains", "-n", namespace, "-o", "wide")).splitlines()
        asked = ["NAME", "STATUS", "REASON"], ["rack-bandwidth", "Ready", "AllNodesReady"]
        return [line.split()[:3] for line in table] == [*asked]

    await until(shown, "kubectl shows it")

    async def all_holds() -> bool:
        findings = check_domains(await collect_cluster(Reader(site.api).read, DAEMONS))
        return verdict(findings) is CheckState.HOLDS

    await until(all_holds, "every check of the doctor holds")
    site.programs.done.set()

    async def succeeded() -> bool:
        found = (await site.api.get(MPI_JOB, "rack-bandwidth", namespace)).get("status", {})
        return any(condition["type"] == "Succeeded" for condition in found.get("conditions", ()))

    await until(succeeded, "the job succeeded")
    await site.api.delete(MPI_JOB, "rack-bandwidth", namespace)
    await site.api.delete(COMPUTE_DOMAIN, "rack-bandwidth", namespace)
    await site.is_clean(namespace)
    if shares:
        await site.cool_down()
    await site.is_clean()
    assert not site.programs.failures, "\n".join(site.programs.failures)


@pytest.mark.parametrize("scene", [FEW_TRAYS], indirect=True, ids=["few"])
@pytest.mark.parametrize("who", DEATHS)
async def test_whoever_dies_on_the_way_a_job_starts_and_ends(site: Site, who: str, namespace: str) -> None:
    await start_job(site, namespace, "job", 3)
    await until(lambda: pods_of(site.api, DAEMON_ACCOUNT), "daemons are being started")
    await DEATHS[who](site)
    pods = await site.running(namespace, "job", 3)
    await site.ready("job", namespace, {pod["spec"]["nodeName"] for pod in pods})
    await DEATHS[who](site)
    await site.ready("job", namespace, {pod["spec"]["nodeName"] for pod in pods})
    await end(site, namespace, "job", 3)
    await DEATHS[who](site)
    await site.is_clean()


@pytest.mark.parametrize("scene", [FEW_TRAYS], indirect=True, ids=["few"])
async def test_what_can_never_work_is_said_on_the_pod_with_what_to_change(
    site: Site, namespace: str, node_kubelets: dict[str, KubeletPluginManager]
) -> None:
    made = await site.api.create(COMPUTE_DOMAIN, domain(namespace, "cd"))
    uid = made["metadata"]["uid"]
    other = f"{namespace}-other"
    await site.api.create(NAMESPACE, {"metadata": {"name": other}})
    await until(lambda: site.has_account(other), "the new namespace takes pods")
    nobody = "00000000-0000-4000-8000-000000000000"

    await hand_made(site, namespace, "unknown-field", domainID=uid, alocationMode="All")
    await said_in_time(site, namespace, "unknown-field-0", 'unknown field "alocationMode"')
    await hand_made(site, other, "foreign", domainID=uid)
    await said_in_time(
        site, other, "foreign-0", "create the pod and its claim in the namespace of the ComputeDomain"
    )
    await hand_made(site, namespace, "unknown-domain", domainID=nobody)
    await said_in_time(site, namespace, "unknown-domain-0", f"there is no ComputeDomain with UID {nobody}")
    for where, name in ((namespace, "unknown-field"), (other, "foreign"), (namespace, "unknown-domain")):
        await site.api.delete(POD, f"{name}-0", where)
        await site.api.delete(RESOURCE_CLAIM_TEMPLATE, f"channel-{name}", where)

    site.programs.may_start.clear()
    await site.api.create(POD, worker(namespace, "cd", 0))
    await until(lambda: pods_of(site.api, DAEMON_ACCOUNT), "the channel waits for its daemon")
    (claim,) = (await site.api.list(RESOURCE_CLAIM, namespace)).items
    node = (await site.api.get(POD, "cd-0", namespace))["spec"]["nodeName"]
    await node_kubelets[node].unprepare(pod_claim(claim))
    await prepare_event(site, namespace, "cd-0", "delete the pod")
    site.programs.may_start.set()
    await site.api.delete(POD, "cd-0", namespace)
    await site.api.delete(COMPUTE_DOMAIN, "cd", namespace)
    await site.api.delete(NAMESPACE, other)
    await site.is_clean()


async def said_in_time(site: Site, namespace: str, pod: str, text: str) -> None:
    """The error is permanent, so it is reported at once, not after the retries for transient errors."""
    event = await prepare_event(site, namespace, pod, text)
    assert event["message"].startswith("Permanent error: ")
    bound = await site.api.get(POD, pod, namespace)
    waited = moment(event["metadata"]["creationTimestamp"]) - moment(scheduled(bound))
    assert waited.total_seconds() < ANSWER_SECONDS


def scheduled(pod: Object) -> str:
    (found,) = (condition for condition in pod["status"]["conditions"] if condition["type"] == "PodScheduled")
    return str(found["lastTransitionTime"])


def moment(stamp: str) -> dt.datetime:
    return dt.datetime.fromisoformat(stamp)
