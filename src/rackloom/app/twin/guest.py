"""The trays of simulated racks in a cluster that others run: kind, k3s, envtest, or any other.

Objects of such a guest are labelled with the site that made them (`rackloom.dev/simulated-site`): Nodes with
their Leases and ResourceSlices, and of DeviceClasses, CustomResourceDefinitions, the namespaces of the
controller and of IMEX daemons, and the daemons' ServiceAccount, those that were not there. Nodes also have
the label `rackloom.dev/simulated=true` and, unless that was declined, the taint of the same name, so that
only pods which tolerate it are scheduled onto them. The controller of ComputeDomains stands for election
in this process: it works unless another one leads, such as that of an installation.

Before anything is made, `refuse_foreign` reads the cluster. It refuses one that has devices of the same
drivers on nodes which are not simulated (real GPUs), a node of another owner that has one of our
names, and a server without resource.k8s.io/v1. Objects that are there already are used and never changed.

At the end everything is deleted that was made here, each object by its UID, and nothing else. A
CustomResourceDefinition that still has objects stays, because its deletion would delete them. So does a
namespace with pods in it. Objects that stay are reported. A guest that was killed leaves its objects. The
next start from the same home takes them over and deletes them at its end.
"""

import asyncio
import hashlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from rackloom.app.controller import CONTROLLER_LEASE, Leadership
from rackloom.app.process import background_task
from rackloom.app.twin.cluster import GuestNodes, installed_device_classes, twin_nodes
from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound
from rackloom.claim.kube.leader import LeaderElection
from rackloom.core.allocate.driver_slices import NIC_DRIVER
from rackloom.core.cluster.names import GPU_DRIVER, IMEX_DRIVER, SIMULATED_LABEL
from rackloom.core.cluster.nodes import node_of_slice, slice_pool
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    CRD,
    DEVICE_CLASS,
    GANG_PLAN,
    LEASE,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_SLICE,
    SERVICE_ACCOUNT,
    Object,
    ResourceKind,
    labels_of,
    name_of,
    namespace_of,
    uid_of,
)
from rackloom.core.domains.crds import domain_crds
from rackloom.core.domains.manifests import DAEMON_SERVICE_ACCOUNT
from rackloom.core.domains.settings import (
    DEFAULT_DAEMON_NAMESPACE,
    DEFAULT_NAMESPACE,
    ControllerSettings,
    ImexDaemonSettings,
)
from rackloom.core.gangs.crd import gang_crd
from rackloom.errors import Refused, Retry
from rackloom.lab.kube.patches import merge_patch
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.kubelets import LEASE_NAMESPACE
from rackloom.lab.scenario.controllers import ControllerProcess, ControllersClock
from rackloom.lab.scenario.feature_discovery import FeatureDiscovery
from rackloom.lab.scenario.stage import ClusterControl, SimulatedRacks
from rackloom.lab.switches.fabric import SeededNames

SITE_LABEL = "rackloom.dev/simulated-site"
"""Says which simulated site made an object, and with that, who may delete it."""
SERVED_SECONDS = 30.0
"""The longest time that an API server may take to serve a new type."""
_DRIVERS = (GPU_DRIVER, IMEX_DRIVER, NIC_DRIVER)
Announce = Callable[[str], None]


class GuestOptions(msgspec.Struct, frozen=True):
    """The cluster that the trays join, and their marks in it."""

    kubeconfig: Path
    context: str | None = None
    taint: bool = True
    """Keep pods away that do not tolerate `rackloom.dev/simulated`."""


def site_id(racks: SimulatedRacks) -> str:
    """The value of the label on this site's objects. It is the same for each start of one home."""
    return hashlib.sha256(racks.seed.encode()).hexdigest()[:16]


def _node_names(racks: SimulatedRacks) -> set[str]:
    names = SeededNames(racks.seed)
    return {
        names.node(tray.chassis_serial, tray.slot) for domain in racks.site.domains for tray in domain.trays
    }


# Whether the cluster is one to work in.


async def refuse_foreign(api: KubeApi, racks: SimulatedRacks) -> None:
    """Raise Refused for a cluster in which the guest would meet objects that are not its own."""
    try:
        nodes = {name_of(node): node for node in (await api.list(NODE)).items}
        slices = (await api.list(RESOURCE_SLICE)).items
    except NotFound as error:
        raise Refused(
            "this API server does not serve resource.k8s.io/v1",
            nearest_fix="use Kubernetes 1.34 or later",
        ) from error
    except KubeError as error:
        raise _asked(error, "list nodes and resource slices") from error
    for name in sorted(_node_names(racks) & nodes.keys()):
        if labels_of(nodes[name]).get(SITE_LABEL) != site_id(racks):
            raise Refused(
                f"the cluster has a node {name} that this site did not make",
                nearest_fix="use another cluster, or another --home or --seed",
            )
    for item in slices:
        driver, node = slice_pool(item).driver, node_of_slice(item)
        if driver in _DRIVERS and labels_of(nodes.get(node, {})).get(SIMULATED_LABEL) != "true":
            place = f"on node {node}, which is not simulated" if node else "for several nodes"
            raise Refused(
                f"the cluster has devices of {driver} {place}:"
                " its workloads would be scheduled onto simulated ones",
                nearest_fix="use a cluster of its own, such as one of kind",
            )


def _asked(error: KubeError, what: str) -> Exception:
    if error.code in (401, 403):
        return Refused(
            f"the API server forbids to {what}: {error.message}",
            nearest_fix="use a kubeconfig of a cluster administrator",
        )
    return Retry(f"cannot {what}: {error.message}", after=SERVED_SECONDS)


# Objects made beside the nodes.


def _wanted() -> Iterator[tuple[ResourceKind, Object]]:
    for crd in (*domain_crds(), gang_crd()):
        yield CRD, crd
    for name, level in ((DEFAULT_NAMESPACE, "privileged"), (DEFAULT_DAEMON_NAMESPACE, "baseline")):
        labels = {"pod-security.kubernetes.io/enforce": level}
        yield NAMESPACE, {"metadata": {"name": name, "labels": labels}}
    account = {"name": DAEMON_SERVICE_ACCOUNT, "namespace": DEFAULT_DAEMON_NAMESPACE}
    yield SERVICE_ACCOUNT, {"metadata": account}
    for klass in installed_device_classes():
        yield DEVICE_CLASS, klass


class GuestObjects:
    """One site's objects in a cluster that others run: makes missing ones, deletes those that it made."""

    def __init__(self, api: KubeApi, site: str) -> None:
        self._api = api
        self._site = site
        self._made: list[tuple[ResourceKind, Object]] = []

    async def make(self) -> None:
        """Make missing objects, and wait until new types are served. Raises Refused, Retry."""
        for kind, wanted in _wanted():
            try:
                await self._make(kind, wanted)
            except KubeError as error:
                raise _asked(error, f"create {kind.kind} {name_of(wanted)}") from error
        deadline = time.monotonic() + SERVED_SECONDS
        while not await self._is_served():
            if time.monotonic() > deadline:
                raise Retry("the API server does not serve ComputeDomain", after=SERVED_SECONDS)
            await asyncio.sleep(0.2)

    async def _make(self, kind: ResourceKind, wanted: Object) -> None:
        added = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"labels": {SITE_LABEL: self._site}},
        }
        try:
            made = await self._api.create(kind, merge_patch(wanted, added))
        except Conflict:
            made = await self._api.get(kind, name_of(wanted), namespace_of(wanted))
            if labels_of(made).get(SITE_LABEL) != self._site:
                return  # Somebody else's: used, and left alone.
        self._made.append((kind, made))

    async def _is_served(self) -> bool:
        try:
            await self._api.list(COMPUTE_DOMAIN)
        except KubeError:
            return False
        return True

    async def remove(self) -> list[str]:
        """Delete the objects that were made, the newest first. Return the reasons why some of them stay."""
        kept = []
        for kind, made in reversed(self._made):
            title = f"{kind.kind} {name_of(made)}"
            try:
                why = await self._in_use(kind, made)
                if why:
                    kept.append(f"{title} stays: {why}")
                else:
                    await self._api.delete(kind, name_of(made), namespace_of(made), uid=uid_of(made))
            except NotFound:
                continue
            except KubeError as error:
                kept.append(f"{title} could not be deleted: {error.message}")
        return kept

    async def _in_use(self, kind: ResourceKind, made: Object) -> str:
        name = name_of(made)
        if kind == CRD:
            # Cliques are records of IMEX daemons, and mean nothing without a ComputeDomain.
            is_of_gangs = name == f"{GANG_PLAN.plural}.{GANG_PLAN.group}"
            counted = GANG_PLAN if is_of_gangs else COMPUTE_DOMAIN
            left = len((await self._api.list(counted)).items)
            return f"{left} {counted.plural} are there" if left else ""
        if kind == NAMESPACE:
            left = len((await self._api.list(POD, name)).items)
            return f"{left} pods are in it" if left else ""
        return ""


async def remove_nodes(api: KubeApi, names: set[str], site: str) -> None:
    """Delete the nodes of a site that have its label, with their slices and leases."""
    labelled = (await api.list(NODE, labels=f"{SITE_LABEL}={site}")).items
    slices = (await api.list(RESOURCE_SLICE)).items
    for node in labelled:
        name = name_of(node)
        if name not in names:
            continue
        with suppress(NotFound, Conflict):
            await api.delete(NODE, name, uid=uid_of(node))
        # Without garbage collection (envtest), objects that a node owns would stay.
        for item in slices:
            if node_of_slice(item) == name and slice_pool(item).driver in _DRIVERS:
                with suppress(NotFound):
                    await api.delete(RESOURCE_SLICE, name_of(item), uid=uid_of(item))
        with suppress(NotFound):
            await api.delete(LEASE, name, LEASE_NAMESPACE)


# Scenarios on it.


GUEST_STEPS = frozenset(
    {
        *("submit", "delete-object", "object", "condition", "gone", "pods", "one-clique"),
        *("node-lost", "node-back", "node-reboots", "node", "gpu-lost", "gpu-xid", "nic-link-down"),
        *("fabric-state", "clique-label", "devices", "gpus", "imex-daemon-killed", "imex-mesh"),
    }
)
"""Steps of the layer `cluster` that need only the standard behaviour of an API server."""


def guest_control(guests: GuestNodes, api: KubeApi) -> ClusterControl:
    """The targets of `GUEST_STEPS`. The unused ones belong to an empty API server that is never called."""
    unused = FakeKube()

    async def no_controllers(_: KubeApi) -> None:
        await asyncio.Event().wait()

    return ClusterControl(
        kube=unused,
        api=api,
        nodes=guests.nodes,
        imex=guests.imex,
        controllers=ControllerProcess(no_controllers, api),
        candidates=None,
        clock=ControllersClock(time.time),
        discovery=FeatureDiscovery(unused),
        addresses={},
    )


# All of it.


class GuestRacks(msgspec.Struct, frozen=True, kw_only=True):
    """Racks that are guests of a cluster."""

    nodes: GuestNodes
    controlling: "asyncio.Task[None]"
    """The controller, or its candidacy. It ends only when something is wrong."""


@asynccontextmanager
async def guest_racks(
    racks: SimulatedRacks, folder: Path, api: KubeApi, announce: Announce, *, taint: bool = True
) -> AsyncIterator[GuestRacks]:
    """The trays of `racks` in the cluster behind `api`, and the controller of ComputeDomains.

    Raises Refused, before anything is made, if the cluster is unsuitable, and Retry if it does not answer.
    """
    await refuse_foreign(api, racks)
    site = site_id(racks)
    objects = GuestObjects(api, site)
    identity = f"rackloom-up-{uuid.uuid4()}"
    settings = ControllerSettings(daemon=ImexDaemonSettings(image="rackloom"))
    rng = random.Random()  # noqa: S311 (jitter)
    election = LeaderElection(api, DEFAULT_NAMESPACE, CONTROLLER_LEASE, identity, wall=time.time, rng=rng)
    async with AsyncExitStack() as stack:

        async def leave() -> None:
            try:
                await remove_nodes(api, _node_names(racks), site)
                kept = await objects.remove()
            except KubeError as error:
                kept = [f"the cluster was not cleaned: {error.message}"]
            for line in kept:
                announce(f"rackloom: {line}")

        stack.push_async_callback(leave)
        await objects.make()
        nodes = await stack.enter_async_context(
            twin_nodes(racks, folder, api, labels={SITE_LABEL: site}, taint=taint)
        )
        leadership = Leadership(api, settings, identity)
        controlling = await stack.enter_async_context(background_task(election.run(leadership.lead)))
        yield GuestRacks(nodes=nodes, controlling=controlling)
