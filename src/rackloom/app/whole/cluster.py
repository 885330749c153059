"""A Kubernetes of its own in this process: API server, controllers, scheduler, and the trays as its nodes.

Ours are the controllers of ComputeDomains and gangs, admission, the node plugins and the IMEX daemons;
stand-ins are the API server, Kubernetes' own controllers, the MPI operator, kubelets, and nvidia-imex.
Nothing of it outlives the process.
"""

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from rackloom.app.controller import Leadership
from rackloom.app.twin_site import TwinSite
from rackloom.app.whole.admission import Admission
from rackloom.app.whole.classes import device_classes
from rackloom.app.whole.ours import OurControllers
from rackloom.app.whole.programs import Programs
from rackloom.claim.cluster.settings import DEFAULT_NAMESPACE, DaemonSettings, Settings
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.kinds import DEVICE_CLASS, NODE
from rackloom.claim.node.meter import Meter
from rackloom.twin.gpu_inventory import declared_inventory
from rackloom.twin.imex.memory import ImexNetwork
from rackloom.twin.kube import DirectApi, FakeKube
from rackloom.twin.kube.controllers import DaemonSets, Jobs, NodeLifecycle, PodClaims, Scheduler
from rackloom.twin.kube.controllers.mpi_jobs import MpiJobs
from rackloom.twin.nodes.kubelets import Kubelets
from rackloom.twin.nodes.tray_host import TrayHost, tray_machine
from rackloom.twin.nodes.tray_names import TrayNames
from rackloom.twin.nodes.tray_node import Surroundings
from rackloom.twin.nodes.trays import Nodes, TrayDevices, tray_nodes

Api = Callable[[str], KubeApi]
"""The API server as somebody (by name) asks it."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster of the twin."""

    kube: FakeKube
    nodes: Nodes
    imex: ImexNetwork
    kill_controllers: Callable[[float], Awaitable[None]]
    """Kills Rackloom's controllers where they stand; others begin after so many seconds."""
    work: "asyncio.Task[None]"
    """Ends only when something is wrong."""


@asynccontextmanager
async def twin_cluster(twin: TwinSite, folder: Path) -> AsyncIterator[Cluster]:
    """The trays of `twin` in a cluster of their own; `folder` is made anew for their files."""
    kube = FakeKube(seed=random.SystemRandom().getrandbits(32), now=time.time)
    imex = ImexNetwork()

    def api(user: str) -> KubeApi:
        return DirectApi(kube, user)

    for one in device_classes():
        await api("kubectl").create(DEVICE_CLASS, one)
    nodes = _nodes(twin, folder, api, imex)
    settings = Settings(daemon=DaemonSettings(image="rackloom"))
    ours = OurControllers(Leadership(api("rackloom-controller"), settings, "twin").lead)
    admission = Admission(kube, api("rackloom-webhook"))
    work = asyncio.create_task(_together(ours.run(), admission.run(), *_theirs(kube), nodes.run()))
    try:
        yield Cluster(kube=kube, nodes=nodes, imex=imex, kill_controllers=ours.kill, work=work)
    finally:
        await _end(work)


@asynccontextmanager
async def twin_nodes(twin: TwinSite, folder: Path, api: KubeApi) -> AsyncIterator["asyncio.Task[None]"]:
    """The trays of `twin` as nodes of a cluster that others run, with their plugins and IMEX daemons.

    They leave the cluster at the end. The task ends only when something is wrong.
    """
    nodes = _nodes(twin, folder, lambda user: api, ImexNetwork())
    work = asyncio.create_task(nodes.run())
    try:
        yield work
    finally:
        await _end(work)
        for node in nodes:
            with suppress(NotFound):
                await api.delete(NODE, node.name)


def _nodes(twin: TwinSite, folder: Path, api: Api, imex: ImexNetwork) -> Nodes:
    shutil.rmtree(folder, ignore_errors=True)
    machine = tray_machine(twin.profile)
    names = TrayNames(twin.seed)
    around = Surroundings(
        plugins=api("rackloom-node"),
        labels=api("gpu-feature-discovery"),
        root=folder / "nodes",
        host=TrayHost(folder / "host", machine),
        gpus=declared_inventory(machine),
        namespace=DEFAULT_NAMESPACE,
        wall=time.time,
        meter=Meter("simulated", "simulated", ()),
    )
    made = {one.name: one for one in tray_nodes(twin.site, names, around)}
    programs = Programs(
        api("compute-domain-daemon"), folder / "pods", lambda node, claim: made[node].cdi_files(claim), imex
    )
    kubelets = Kubelets(api("kubelet"), time.time, devices=TrayDevices(made), containers=programs)
    return Nodes(made.values(), kubelets, [one.fabric for one in twin.servers.values()], names)


def _theirs(kube: FakeKube) -> Iterator[Coroutine[Any, Any, None]]:
    """Kubernetes' own controllers, and the MPI operator."""
    rng = random.Random()  # noqa: S311 (jitter)
    for kind in (DaemonSets, Jobs, MpiJobs, PodClaims, Scheduler):
        yield kind(kube, rng).run()
    yield NodeLifecycle(kube, time.time).run()


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)


async def _end(work: "asyncio.Task[None]") -> None:
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
