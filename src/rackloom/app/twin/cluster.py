"""A Kubernetes cluster in this process, with the trays of simulated racks as nodes.

Rackloom's own programs are the production code: the controllers of ComputeDomains and gangs, the
admission webhook, the node plugins and the IMEX daemons. Simulated are the API server, Kubernetes' own
controllers and scheduler, the MPI operator, kubelets, and nvidia-imex. Nothing of the cluster outlives
the process.

`twin_cluster` runs all of it. With `elected` two replicas of the controllers compete for the Lease.
`twin_nodes` joins the trays to a cluster that others run (`guest`).

The admission webhook is called inside the API server by a function call, in the order that the webhook
configurations register: mutation first. Device classes are those that deploy/kubernetes installs.
`FeatureDiscovery` is the API client of GPU Feature Discovery. `lag` delays its labels, as the real one
looks only once a minute.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from rackloom.app.controller import Leadership
from rackloom.app.process import background_task
from rackloom.app.twin.pods import AddressedKubelets, PodPrograms
from rackloom.claim.cluster.admission.gates import GateController
from rackloom.claim.cluster.admission.reviews import AdmissionVerdict, ReviewedResource, ReviewRequest
from rackloom.claim.cluster.admission.serving_certificate import WEBHOOK_NAME
from rackloom.claim.cluster.admission.webhook import AdmissionCache, AdmissionReviewer, AdmissionSettings
from rackloom.claim.kube.api import EventRecorder, KubeApi, Rejected
from rackloom.claim.node.nic.plugin import NIC_DRIVER
from rackloom.claim.node.prepare import PluginMetrics
from rackloom.core.cluster import names
from rackloom.core.cluster.names import SIMULATED_LABEL
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    Object,
    namespace_of,
)
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE, ControllerSettings, ImexDaemonSettings
from rackloom.lab.imex.in_process import ImexNetwork
from rackloom.lab.kube.controllers.claims import ResourceClaimController
from rackloom.lab.kube.controllers.mpi_jobs import MpiJobController
from rackloom.lab.kube.controllers.scheduler import SimulatedScheduler
from rackloom.lab.kube.controllers.workloads import (
    DaemonSetController,
    JobController,
    NodeLifecycleController,
)
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.patches import json_patch
from rackloom.lab.kube.server import AdmissionReview, FakeKube
from rackloom.lab.nodes.dra_manager import DraManager
from rackloom.lab.nodes.host_files import TrayHostFiles, declared_inventory, tray_machine
from rackloom.lab.nodes.kubelets import SimulatedKubelets
from rackloom.lab.nodes.trays import NodeRegistration, TrayEnvironment, TrayNodes, tray_nodes
from rackloom.lab.scenario.controllers import (
    CONTROLLER_LEASE,
    ClockAndRandom,
    ControllerProcess,
    ControllerReplicas,
    ControllersClock,
    ControllerTerm,
    real_clock_and_random,
)
from rackloom.lab.scenario.feature_discovery import DISCOVERY_USER, FeatureDiscovery
from rackloom.lab.scenario.stage import ClusterControl, SimulatedRacks
from rackloom.lab.switches.fabric import SeededNames

# Device classes of an installation.


_IMEX = names.IMEX_DRIVER
_CLASSES = {
    names.DAEMON_CLASS: (_IMEX, "daemon", ""),
    names.CHANNEL_CLASS: (_IMEX, "channel", f" && device.attributes['{_IMEX}'].id == 0"),
    names.ISOLATED_CHANNEL_CLASS: (_IMEX, names.ISOLATED_CHANNEL_TYPE, ""),
    "gpu.nvidia.com": (names.GPU_DRIVER, "gpu", ""),
    "mig.nvidia.com": (names.GPU_DRIVER, "mig", ""),
    "vfio.gpu.nvidia.com": (names.GPU_DRIVER, "vfio", ""),
}
"""By class of deploy/kubernetes: driver, device type, and further conditions."""
_NIC_CLASSES = ("dra.net", "dranet.net")


def installed_device_classes() -> Iterator[Object]:
    """The DeviceClass objects of deploy/kubernetes."""
    for name, (driver, kind, more) in _CLASSES.items():
        yield _device_class(
            name, f"device.driver == '{driver}' && device.attributes['{driver}'].type == '{kind}'{more}"
        )
    for name in _NIC_CLASSES:
        yield _device_class(name, f"device.driver == '{NIC_DRIVER}'")


def _device_class(name: str, expression: str) -> Object:
    return {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}


# Admission inside the API server.


ReviewHandler = Callable[[ReviewRequest], Awaitable[AdmissionVerdict]]


class InProcessAdmission:
    """The admission webhook as a function call. `run` follows its informers and removes scheduling gates."""

    def __init__(self, kube: FakeKube, api: KubeApi, wall: Callable[[], float], rng: random.Random) -> None:
        settings = AdmissionSettings()
        self._cache = AdmissionCache(api, settings.isolation, rng)
        self._gates = GateController(api, self._cache, EventRecorder(api, WEBHOOK_NAME, "twin", wall), rng)
        self._reviewer = AdmissionReviewer(self._cache, settings)
        kube.admission.append(self.review)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self._cache.informers:
                tasks.create_task(informer.run())
            tasks.create_task(self._gates.run())

    async def review(self, review: AdmissionReview) -> Object | None:
        """The object after mutation and validation. Raises `Rejected`."""
        obj = review.object
        if obj is None or review.subresource:
            return None
        for review_by in self._handlers(review):
            request = ReviewRequest(
                uid="",
                operation=review.operation,
                resource=ReviewedResource(review.kind.group, review.kind.version, review.kind.plural),
                namespace=namespace_of(obj) or "",
                object=obj,
                old_object=review.old,
            )
            verdict = await review_by(request)
            if not verdict.allowed:
                why = f'admission webhook "{WEBHOOK_NAME}" denied the request: {verdict.message}'
                raise Rejected(verdict.code, "Invalid", why)
            if verdict.patch:
                obj = json_patch(obj, list(verdict.patch))
        return obj

    def _handlers(self, review: AdmissionReview) -> tuple[ReviewHandler, ...]:
        """The handlers that the webhook configurations register, mutation before validation."""
        if review.kind == POD and review.operation == "CREATE":
            return self._reviewer.mutate_pods, self._reviewer.validate_pods
        if review.kind in (RESOURCE_CLAIM, RESOURCE_CLAIM_TEMPLATE):
            return (self._reviewer.validate_claims,)
        return ()


# The cluster.


ADMIN_USER = "admin"
ApiOfUser = Callable[[str], KubeApi]
"""An API client by the name of its user."""


class TwinCluster(ClusterControl, frozen=True, kw_only=True):
    """A running cluster of the twin."""

    terms: list[Leadership]
    """Every term of the controllers so far, the newest last."""
    work: "asyncio.Task[None]"
    """Ends only when something is wrong."""


@asynccontextmanager
async def twin_cluster(
    racks: SimulatedRacks, folder: Path, chance: ClockAndRandom | None = None, *, elected: bool = False
) -> AsyncIterator[TwinCluster]:
    """The trays of `racks` as a simulated cluster. `folder` is deleted and created again for their files.

    `elected`: two replicas of Rackloom's controllers, with a Lease that names the leader.
    """
    chance = chance or real_clock_and_random()
    kube = FakeKube(seed=chance.rng.getrandbits(32), now=chance.wall)
    imex, discovery, clock = ImexNetwork(), FeatureDiscovery(kube), ControllersClock(chance.wall)

    def api(user: str) -> KubeApi:
        return discovery if user == DISCOVERY_USER else DirectApi(kube, user)

    for klass in installed_device_classes():
        await api("kubectl").create(DEVICE_CLASS, klass)
    planned: dict[str, str] = {}
    kubelets = partial(AddressedKubelets, planned)
    nodes = _tray_nodes(racks, folder, api, imex, chance, kubelets)
    terms: list[Leadership] = []
    lead, user = _controller_term(clock, chance.rng, terms), api(CONTROLLER_LEASE)
    candidates = ControllerReplicas(lead, user, ClockAndRandom(clock, chance.rng)) if elected else None
    controllers = ControllerProcess(lead, user) if candidates is None else candidates.first
    admission = InProcessAdmission(kube, api(WEBHOOK_NAME), chance.wall, chance.rng)
    control = (candidates or controllers).run()
    together = run_together(control, admission.run(), *kubernetes_controllers(kube, chance), nodes.run())
    async with background_task(together) as work:
        yield TwinCluster(
            kube=kube,
            api=api(ADMIN_USER),
            nodes=nodes,
            imex=imex,
            controllers=controllers,
            candidates=candidates,
            clock=clock,
            discovery=discovery,
            addresses=planned,
            terms=terms,
            work=work,
        )


class GuestNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The trays of a site as nodes of a cluster that others run."""

    nodes: TrayNodes
    imex: ImexNetwork
    """The true addresses of the IMEX daemons."""
    work: "asyncio.Task[None]"
    """Ends only when something is wrong."""


@asynccontextmanager
async def twin_nodes(
    racks: SimulatedRacks,
    folder: Path,
    api: KubeApi,
    *,
    labels: Mapping[str, str] = MappingProxyType({}),
    taint: bool = False,
) -> AsyncIterator[GuestNodes]:
    """The trays of `racks` as nodes of an existing cluster, with their plugins and IMEX daemons.

    `labels` come on top of those that every simulated node has. `taint` keeps pods away that do not tolerate
    `rackloom.dev/simulated`. The Node objects stay at the end (`guest.remove_nodes` deletes them).
    """
    imex = ImexNetwork()
    taints = ({"key": SIMULATED_LABEL, "value": "true", "effect": "NoSchedule"},) if taint else ()
    nodes = _tray_nodes(
        racks,
        folder,
        lambda user: api,
        imex,
        real_clock_and_random(),
        SimulatedKubelets,
        registration=NodeRegistration(labels, taints),
    )
    async with background_task(nodes.run()) as work:
        yield GuestNodes(nodes=nodes, imex=imex, work=work)


def _controller_term(clock: ControllersClock, rng: random.Random, terms: list[Leadership]) -> ControllerTerm:
    """The production controllers, as one term of a leader. Each is added to `terms`."""
    settings = ControllerSettings(daemon=ImexDaemonSettings(image="rackloom"))

    def term(api: KubeApi) -> Coroutine[Any, Any, None]:
        terms.append(Leadership(api, settings, "twin", clock, rng))
        return terms[-1].lead()

    return term


def _tray_nodes(
    racks: SimulatedRacks,
    folder: Path,
    api: ApiOfUser,
    imex: ImexNetwork,
    chance: ClockAndRandom,
    make: Callable[..., SimulatedKubelets],
    registration: NodeRegistration = NodeRegistration(),  # noqa: B008 (a frozen value)
) -> TrayNodes:
    shutil.rmtree(folder, ignore_errors=True)
    machine = tray_machine(racks.profile)
    names = SeededNames(racks.seed)
    environment = TrayEnvironment(
        plugins=api("rackloom-node"),
        labels=api(DISCOVERY_USER),
        root=folder / "nodes",
        host=TrayHostFiles(folder / "host", machine),
        gpus=declared_inventory(machine),
        namespace=DEFAULT_DAEMON_NAMESPACE,
        wall=chance.wall,
        metrics=PluginMetrics("simulated", "simulated", ()),
    )
    made = {node.name: node for node in tray_nodes(racks.site, names, environment)}
    programs = PodPrograms(
        api("compute-domain-daemon"), folder / "pods", lambda node, claim: made[node].cdi_files(claim), imex
    )
    devices = DraManager(made.__getitem__)
    kubelets = make(api("kubelet"), chance.wall, chance.rng, devices=devices, containers=programs)
    return TrayNodes(made.values(), kubelets, racks.fabrics, names, environment.plugins, registration)


def kubernetes_controllers(kube: FakeKube, chance: ClockAndRandom) -> Iterator[Coroutine[Any, Any, None]]:
    """Kubernetes' own controllers, and the MPI operator."""
    kinds = (
        DaemonSetController,
        JobController,
        MpiJobController,
        ResourceClaimController,
        SimulatedScheduler,
    )
    for kind in kinds:
        yield kind(kube, chance.rng).run()
    yield NodeLifecycleController(kube, chance.wall).run()


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until cancelled. Raises the error of the first that fails."""
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)
