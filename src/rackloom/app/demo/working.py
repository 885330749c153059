"""The demo's job: placed before a pod of it exists, then run over a whole rack of the twin's cluster."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import yaml

from rackloom.app.demo.story import Evidence, NotSeen
from rackloom.app.examples import example
from rackloom.app.picture.cluster import ORG_LABEL
from rackloom.app.whole.site import Whole
from rackloom.claim.cluster.gang.marks import TAINT
from rackloom.claim.domain.names import GPU_CLIQUE_LABEL
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
)
from rackloom.claim.kube.kinds import NAMESPACE as NAMESPACES
from rackloom.claim.place.gang import plan_gang
from rackloom.claim.place.reading.observed import site_of
from rackloom.claim.place.values import Gang, Group, Plan
from rackloom.errors import Refused
from rackloom.twin.kube.controllers.mpi_jobs import MPI_JOB

NAMESPACE = "whole-rack"
PATIENCE = 60.0
"""Seconds until something in the cluster must have been seen."""
_LOOK_AGAIN = 0.1
_KINDS: dict[str, Kind] = {
    "ComputeDomain": COMPUTE_DOMAIN,
    "ResourceClaimTemplate": RESOURCE_CLAIM_TEMPLATE,
    "MPIJob": MPI_JOB,
}


class RackJob:
    """`examples/whole-rack-job` in the cluster of a twin."""

    def __init__(self, whole: Whole, org: str) -> None:
        """`org` is the organisation of the tenant whose job it is."""
        self._whole = whole
        self._org = org
        text = (example("whole-rack-job") / "job.yaml").read_text()
        self._objects: list[Object] = list(yaml.safe_load_all(text))
        self._job = next(one for one in self._objects if one["kind"] == "MPIJob")
        self._clique = ""

    @property
    def workers(self) -> int:
        """How many there are to be."""
        return int(self._roles["Worker"]["replicas"])

    @property
    def _roles(self) -> dict[str, Any]:
        roles: dict[str, Any] = self._job["spec"]["mpiReplicaSpecs"]
        return roles

    async def place(self) -> Evidence:
        """Choose the clique by what the nodes say now; a clique that another tenant has part of is none."""
        await self._whole.nodes.up.wait()
        await self._whole.nodes.settle()
        plan = await self._plan()
        self._clique = plan.cliques[0]
        return {"clique": self._clique, "workers": self.workers, "because": plan.reason}

    async def run(self) -> Evidence:
        """Apply it, and see all of it run as a gang in the planned clique, with a channel of its own."""
        began = time.monotonic()
        await self._whole.api.create(NAMESPACES, namespace_of(self._org))
        for one in self._objects:
            one["metadata"]["namespace"] = NAMESPACE
            await self._whole.api.create(_KINDS[one["kind"]], one)
        pods = await until(self._running, "the job does not run")
        status = await until(self._ready, "the ComputeDomain is not Ready")
        held = await self._held()
        nodes = await self._nodes_of(pods)
        return {
            "running": f"{self.workers} workers and the launcher, after {time.monotonic() - began:.1f} s",
            "namespace": f"{NAMESPACE}, labelled {ORG_LABEL}={await self._labelled()}",
            "nodes": f"{len(nodes)} of clique {self._clique}",
            "gang": await until(self._bound, "the gang is not bound"),
            "computeDomain": status,
            "claims": f"{held} allocated,reserved: a channel and 4 GPUs for each worker",
            "simulated": "API server, kubelets, containers, nvidia-imex; our programs are the real ones",
        }

    async def end(self) -> Evidence:
        """Delete it, and see that no pod, claim, ComputeDomain, plan, taint or daemon of it is left."""
        for one in reversed(self._objects):
            await self._whole.api.delete(_KINDS[one["kind"]], one["metadata"]["name"], NAMESPACE)
        await self._whole.api.delete(NAMESPACES, NAMESPACE)
        await until(self._nothing_left, "something of the job is left")
        return {"pods": 0, "claims": 0, "computeDomains": 0, "gangPlans": 0, "reservedTrays": 0}

    async def _plan(self) -> Plan:
        nodes = (await self._whole.api.list(NODE)).items
        per_tray = {node["metadata"]["name"]: self._whole.site.twin.profile.gpus_per_tray for node in nodes}
        site = site_of(nodes, (await self._whole.api.list(POD)).items, published=per_tray)
        worker = Group(name="worker", members=self.workers, gpus=self._job["spec"]["slotsPerWorker"])
        launcher = Group(name="launcher", members=1, gpus=0)
        try:
            return plan_gang(site, Gang(name=self._job["metadata"]["name"], groups=(worker, launcher)))
        except Refused as refused:
            raise NotSeen(refused.reason, fix=refused.nearest_fix) from refused

    async def _running(self) -> list[Object] | None:
        pods = (await self._whole.api.list(POD, NAMESPACE)).items
        running = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
        return running if len(running) == self.workers + 1 else None

    async def _ready(self) -> str | None:
        """Ready with every worker's node, and the IMEX daemons connected to one another."""
        found = await self._whole.api.get(COMPUTE_DOMAIN, self._domain, NAMESPACE)
        conditions = (found.get("status") or {}).get("conditions") or ()
        said = {one["type"]: one for one in conditions if one["status"] == "True"}
        return str(said["Ready"]["message"]) if {"Ready", "Meshed"} <= said.keys() else None

    async def _bound(self) -> str | None:
        """What the GangPlan says once every pod is where it was planned."""
        plan = await self._whole.api.get(GANG_PLAN, self._job["metadata"]["name"], NAMESPACE)
        said = {one["type"]: one for one in (plan.get("status") or {}).get("conditions") or ()}
        bound = said.get("Bound", {})
        return str(bound["message"]) if bound.get("status") == "True" else None

    async def _nodes_of(self, pods: list[Object]) -> set[str]:
        """Where they run. Raises NotSeen where that is not the clique that was chosen before they existed."""
        names = {str(pod["spec"]["nodeName"]) for pod in pods}
        nodes = [one for one in (await self._whole.api.list(NODE)).items if one["metadata"]["name"] in names]
        cliques = {one["metadata"]["labels"].get(GPU_CLIQUE_LABEL) for one in nodes}
        if cliques != {self._clique}:
            raise NotSeen(f"the job runs in {sorted(map(str, cliques))}, and was placed in {self._clique}")
        return names

    async def _held(self) -> int:
        claims = (await self._whole.api.list(RESOURCE_CLAIM, NAMESPACE)).items
        held = [one for one in claims if {"allocation", "reservedFor"} <= (one.get("status") or {}).keys()]
        wanted = 2 * self.workers
        if not len(held) == len(claims) == wanted:
            raise NotSeen(f"{len(held)} of {len(claims)} claims are allocated,reserved, of {wanted} wanted")
        return len(held)

    async def _labelled(self) -> str:
        """Whose pods the map says that the job's are."""
        found = await self._whole.api.get(NAMESPACES, NAMESPACE)
        return str(found["metadata"]["labels"][ORG_LABEL])

    async def _nothing_left(self) -> bool:
        for kind in (POD, RESOURCE_CLAIM, COMPUTE_DOMAIN, GANG_PLAN):
            if (await self._whole.api.list(kind)).items:
                return False
        return not any(_is_reserved(node) for node in (await self._whole.api.list(NODE)).items)

    @property
    def _domain(self) -> str:
        names = [one["metadata"]["name"] for one in self._objects if one["kind"] == "ComputeDomain"]
        return str(names[0])


def _is_reserved(node: Object) -> bool:
    return any(taint["key"] == TAINT for taint in (node.get("spec") or {}).get("taints") or ())


def namespace_of(org: str) -> Object:
    """The job's namespace, which says whose it is: else the map would show its tenant none of its pods."""
    return {"metadata": {"name": NAMESPACE, "labels": {ORG_LABEL: org}}}


async def until(look: Callable[[], Awaitable[Any]], complaint: str) -> Any:
    """The first true answer of `look`, asked again and again. Raises NotSeen when there is none in time."""
    deadline = time.monotonic() + PATIENCE
    while not (seen := await look()):
        if time.monotonic() > deadline:
            raise NotSeen(f"{complaint} within {PATIENCE:.0f} s")
        await asyncio.sleep(_LOOK_AGAIN)
    return seen
