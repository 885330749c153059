"""A Kubernetes of its own in this process: API server, controllers, scheduler, and the trays as its nodes.

Ours are the controllers of ComputeDomains and gangs, admission, the node plugins and the IMEX daemons;
stand-ins are the API server, Kubernetes' own controllers, the MPI operator, kubelets, and nvidia-imex.
Nothing of it outlives the process.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rackloom.app.leadership import LEASE, Leadership
from rackloom.app.whole.addresses import AddressedKubelets
from rackloom.app.whole.admission import Admission
from rackloom.app.whole.candidates import Candidates
from rackloom.app.whole.classes import device_classes
from rackloom.app.whole.discovery import USER as GFD
from rackloom.app.whole.discovery import Discovery
from rackloom.app.whole.ground import Chance, ControllersClock, Racks, true_chance
from rackloom.app.whole.ours import Lead, OurControllers
from rackloom.app.whole.programs import Programs
from rackloom.claim.cluster.admission.serving import NAME as WEBHOOK
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE, DaemonSettings, Settings
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.kinds import DEVICE_CLASS, NODE
from rackloom.claim.node.meter import Meter
from rackloom.twin.hosts.gpu_inventory import declared_inventory
from rackloom.twin.imex.memory import ImexNetwork
from rackloom.twin.kube import DirectApi, FakeKube
from rackloom.twin.kube.controllers import DaemonSets, Jobs, NodeLifecycle, PodClaims, Scheduler
from rackloom.twin.kube.controllers.mpi_jobs import MpiJobs
from rackloom.twin.nodes.claim_devices import ClaimDevices
from rackloom.twin.nodes.kubelets import Kubelets
from rackloom.twin.nodes.tray_host import TrayHost, tray_machine
from rackloom.twin.nodes.tray_names import TrayNames
from rackloom.twin.nodes.tray_node import Surroundings
from rackloom.twin.nodes.trays import Nodes, tray_nodes

Api = Callable[[str], KubeApi]
"""The API server as somebody (by name) asks it."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster of the twin."""

    kube: FakeKube
    nodes: Nodes
    imex: ImexNetwork
    controllers: OurControllers
    """Rackloom's; where several are elected, the first of them."""
    candidates: Candidates | None
    """Those who are elected; None: there is one, without an election."""
    clock: ControllersClock
    discovery: Discovery
    addresses: dict[str, str]
    """By node, the address of the next IMEX daemon's pod there; as they come, where there is none."""
    work: "asyncio.Task[None]"
    """Ends only when something is wrong."""


@asynccontextmanager
async def twin_cluster(
    twin: Racks, folder: Path, chance: Chance | None = None, *, elected: bool = False
) -> AsyncIterator[Cluster]:
    """The trays of `twin` in a cluster of their own; `folder` is made anew for their files.

    `elected`: two replicas of Rackloom's controllers, of which the Lease says who leads.
    """
    chance = chance or true_chance()
    kube = FakeKube(seed=chance.rng.getrandbits(32), now=chance.wall)
    imex, discovery, clock = ImexNetwork(), Discovery(kube), ControllersClock(chance.wall)

    def api(user: str) -> KubeApi:
        return discovery if user == GFD else DirectApi(kube, user)

    for one in device_classes():
        await api("kubectl").create(DEVICE_CLASS, one)
    planned: dict[str, str] = {}
    kubelets = partial(AddressedKubelets, planned)
    nodes = _nodes(twin, folder, api, imex, chance, kubelets)
    lead, user = _lead(clock, chance.rng), api(LEASE)
    candidates = Candidates(lead, user, Chance(clock, chance.rng)) if elected else None
    ours = OurControllers(lead, user) if candidates is None else candidates.first
    admission = Admission(kube, api(WEBHOOK), chance.wall, chance.rng)
    control = (candidates or ours).run()
    work = asyncio.create_task(_together(control, admission.run(), *_theirs(kube, chance), nodes.run()))
    try:
        yield Cluster(
            kube=kube,
            nodes=nodes,
            imex=imex,
            controllers=ours,
            candidates=candidates,
            clock=clock,
            discovery=discovery,
            addresses=planned,
            work=work,
        )
    finally:
        await _end(work)


@asynccontextmanager
async def twin_nodes(twin: Racks, folder: Path, api: KubeApi) -> AsyncIterator["asyncio.Task[None]"]:
    """The trays of `twin` as nodes of a cluster that others run, with their plugins and IMEX daemons.

    They leave the cluster at the end. The task ends only when something is wrong.
    """
    nodes = _nodes(twin, folder, lambda user: api, ImexNetwork(), true_chance(), Kubelets)
    work = asyncio.create_task(nodes.run())
    try:
        yield work
    finally:
        await _end(work)
        for node in nodes:
            with suppress(NotFound):
                await api.delete(NODE, node.name)


def _lead(clock: ControllersClock, rng: random.Random) -> Lead:
    """What the controllers of a cluster do."""
    settings = Settings(daemon=DaemonSettings(image="rackloom"))
    return lambda api: Leadership(api, settings, "twin", clock, rng).lead()


def _nodes(
    twin: Racks,
    folder: Path,
    api: Api,
    imex: ImexNetwork,
    chance: Chance,
    make: Callable[..., Kubelets],
) -> Nodes:
    shutil.rmtree(folder, ignore_errors=True)
    machine = tray_machine(twin.profile)
    names = TrayNames(twin.seed)
    around = Surroundings(
        plugins=api("rackloom-node"),
        labels=api(GFD),
        root=folder / "nodes",
        host=TrayHost(folder / "host", machine),
        gpus=declared_inventory(machine),
        namespace=DEFAULT_DAEMON_NAMESPACE,
        wall=chance.wall,
        meter=Meter("simulated", "simulated", ()),
    )
    made = {one.name: one for one in tray_nodes(twin.site, names, around)}
    programs = Programs(
        api("compute-domain-daemon"), folder / "pods", lambda node, claim: made[node].cdi_files(claim), imex
    )
    devices = ClaimDevices(made.__getitem__)
    kubelets = make(api("kubelet"), chance.wall, chance.rng, devices=devices, containers=programs)
    return Nodes(made.values(), kubelets, twin.fabrics, names, around.plugins)


def _theirs(kube: FakeKube, chance: Chance) -> Iterator[Coroutine[Any, Any, None]]:
    """Kubernetes' own controllers, and the MPI operator."""
    for kind in (DaemonSets, Jobs, MpiJobs, PodClaims, Scheduler):
        yield kind(kube, chance.rng).run()
    yield NodeLifecycle(kube, chance.wall).run()


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)


async def _end(work: "asyncio.Task[None]") -> None:
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
