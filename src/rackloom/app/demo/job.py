"""The demo's whole-rack job: placed before its pods exist, run over a rack, broken by a lost GPU.

`RackJob` plans `examples/whole-rack-job` from the nodes' reports, applies it, and verifies that all
workers run in the planned clique, that every claim is allocated and reserved, and that the ComputeDomain
is Ready with its IMEX daemons connected. At the end it verifies that no pod, claim, ComputeDomain, plan
or taint is left.

`LostGpu` takes a GPU off the bus below a running worker. The switch still counts it, the claim still
holds it, and the node no longer has it: the doctor must name the node with the evidence of both sides and
the fix. After the GPU answers again, no finding may name it. The steps print the doctor's last line, from
the same examination that `rackloom doctor` makes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import yaml

from rackloom.app.demo.story import Evidence, NotObserved, example_directory, wait_until
from rackloom.app.twin.up import RunningTwin
from rackloom.core.cluster.claims import claim_consumers, is_allocated
from rackloom.core.cluster.gang_objects import GANG_TAINT
from rackloom.core.cluster.jobs import read_jobs
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL, ORG_LABEL, SchedulerLabels
from rackloom.core.cluster.nodes import gpus_by_node, node_clique, taints_of
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
    ResourceKind,
    conditions_of,
    labels_of,
    name_of,
    pod_phase,
)
from rackloom.core.cluster.objects import NAMESPACE as NAMESPACES
from rackloom.core.cluster.pods import node_of
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.trays import Gang, GangGroup, GangPlan, placement_site
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.report import summary_line
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.errors import Refused
from rackloom.lab.kube.controllers.mpi_jobs import MPI_JOB
from rackloom.topology.part_names import PartName

# The job.


JOB_NAMESPACE = "whole-rack"


_JOB_KINDS: dict[str, ResourceKind] = {
    "ComputeDomain": COMPUTE_DOMAIN,
    "ResourceClaimTemplate": RESOURCE_CLAIM_TEMPLATE,
    "MPIJob": MPI_JOB,
}


class RackJob:
    """`examples/whole-rack-job` in the cluster of a twin."""

    def __init__(self, whole: RunningTwin, org: str) -> None:
        """`org` is the organisation of the tenant that owns the job."""
        self._whole = whole
        self._org = org
        text = (example_directory("whole-rack-job") / "job.yaml").read_text()
        self._objects: list[Object] = list(yaml.safe_load_all(text))
        # The ComputeDomain, the job and its gang have one name.
        (job,) = read_jobs(self._objects, SchedulerLabels())
        self._name = job.name
        self.workers = next(group.members for group in job.groups if group.name == "worker")
        self._clique = ""

    async def place(self) -> Evidence:
        """Choose the clique by the nodes' present reports. No tray of it may belong to another tenant."""
        await self._whole.nodes.up.wait()
        await self._whole.nodes.settle()
        plan = await self._plan()
        self._clique = plan.cliques[0]
        return {"clique": self._clique, "workers": self.workers, "because": plan.reason}

    async def run(self) -> Evidence:
        """Apply the job, and verify that it runs as a gang in the planned clique, with its own channel."""
        began = time.monotonic()
        # Without the label the map would show the tenant none of its pods.
        labelled = {"metadata": {"name": JOB_NAMESPACE, "labels": {ORG_LABEL: self._org}}}
        await self._whole.api.create(NAMESPACES, labelled)
        for obj in self._objects:
            metadata = {"name": name_of(obj), "namespace": JOB_NAMESPACE}
            await self._whole.api.create(_JOB_KINDS[obj["kind"]], {**obj, "metadata": metadata})
        pods = await wait_until(self._running, "the job does not run")
        # The IMEX daemons of all workers are connected to one another.
        ready = partial(self._message_of, COMPUTE_DOMAIN, "Ready", "Meshed")
        status = await wait_until(ready, "the ComputeDomain is not Ready")
        bound = partial(self._message_of, GANG_PLAN, "Bound")
        held = await self._held()
        nodes = await self._nodes_of(pods)
        return {
            "running": f"{self.workers} workers and the launcher, after {time.monotonic() - began:.1f} s",
            "namespace": f"{JOB_NAMESPACE}, labelled {ORG_LABEL}={await self._labelled()}",
            "nodes": f"{len(nodes)} of clique {self._clique}",
            "gang": await wait_until(bound, "the gang is not bound"),
            "computeDomain": status,
            "claims": f"{held} allocated,reserved: a channel and 4 GPUs for each worker",
            "simulated": "API server, kubelets, containers, nvidia-imex; our programs are the real ones",
        }

    async def end(self) -> Evidence:
        """Delete the job, and verify that no pod, claim, ComputeDomain, plan, taint or daemon is left."""
        for obj in reversed(self._objects):
            await self._whole.api.delete(_JOB_KINDS[obj["kind"]], name_of(obj), JOB_NAMESPACE)
        await self._whole.api.delete(NAMESPACES, JOB_NAMESPACE)
        await wait_until(self._nothing_left, "something of the job is left")
        return {"pods": 0, "claims": 0, "computeDomains": 0, "gangPlans": 0, "reservedTrays": 0}

    async def _plan(self) -> GangPlan:
        # The controller places the pods by the published devices. With fewer devices this plan would differ.
        await wait_until(self._published, "not all nodes publish their GPUs")
        nodes, pods = (await self._whole.api.list(NODE)).items, (await self._whole.api.list(POD)).items
        slices = (await self._whole.api.list(RESOURCE_SLICE)).items
        site = placement_site(read_state(nodes, pods, slices=slices), claimed=True)
        gpus = self._whole.site.twin.profile.gpus_per_tray
        worker = GangGroup(name="worker", members=self.workers, gpus=gpus)
        launcher = GangGroup(name="launcher", members=1, gpus=0)
        try:
            return plan_gang(site, Gang(name=self._name, groups=(worker, launcher)))
        except Refused as refused:
            raise NotObserved(refused.reason, fix=refused.nearest_fix) from refused

    async def _published(self) -> Counter[str] | None:
        """The GPUs that drivers publish, by node, once each node has those of a tray."""
        nodes = (await self._whole.api.list(NODE)).items
        found = (await self._whole.api.list(RESOURCE_SLICE)).items
        gpus = gpus_by_node(read_state(slices=found).published)
        whole = self._whole.site.twin.profile.gpus_per_tray
        return gpus if all(gpus[name_of(node)] == whole for node in nodes) else None

    async def _running(self) -> list[Object] | None:
        pods = (await self._whole.api.list(POD, JOB_NAMESPACE)).items
        running = [pod for pod in pods if pod_phase(pod) == "Running"]
        return running if len(running) == self.workers + 1 else None

    async def _message_of(self, kind: ResourceKind, *conditions: str) -> str | None:
        """The message of the first of these conditions, once all of them hold."""
        found = await self._whole.api.get(kind, self._name, JOB_NAMESPACE)
        met = {known.type: known.message for known in conditions_of(found) if known.status == "True"}
        return met[conditions[0]] if met.keys() >= set(conditions) else None

    async def _nodes_of(self, pods: list[Object]) -> set[str]:
        """The nodes of the pods. Raises NotObserved if they are not in the clique of the plan."""
        names = set(map(node_of, pods))
        nodes = (await self._whole.api.list(NODE)).items
        cliques = {node_clique(labels_of(node), GPU_CLIQUE_LABEL) for node in nodes if name_of(node) in names}
        if cliques != {self._clique}:
            raise NotObserved(
                f"the job runs in {sorted(map(str, cliques))}, and was placed in {self._clique}"
            )
        return names

    async def _held(self) -> int:
        claims = (await self._whole.api.list(RESOURCE_CLAIM, JOB_NAMESPACE)).items
        held = [claim for claim in claims if is_allocated(claim) and claim_consumers(claim)]
        wanted = 2 * self.workers
        if not len(held) == len(claims) == wanted:
            raise NotObserved(
                f"{len(held)} of {len(claims)} claims are allocated,reserved, of {wanted} wanted"
            )
        return len(held)

    async def _labelled(self) -> str:
        """The organisation to which the map assigns the pods of the job."""
        found = await self._whole.api.get(NAMESPACES, JOB_NAMESPACE)
        return labels_of(found)[ORG_LABEL]

    async def _nothing_left(self) -> bool:
        for kind in (POD, RESOURCE_CLAIM, COMPUTE_DOMAIN, GANG_PLAN):
            if (await self._whole.api.list(kind)).items:
                return False
        nodes = (await self._whole.api.list(NODE)).items
        return all(taint.key != GANG_TAINT for node in nodes for taint in taints_of(node))


# The lost GPU.


_LOST_MODULE = 3
"""The GPU of the tray that is lost, by its NVLink module, which counts from 1. Devices count from 0."""
_LOST_WORKER = "whole-rack-worker-7"


class LostGpu:
    """One GPU of a worker's tray."""

    def __init__(self, whole: RunningTwin) -> None:
        self._whole = whole
        self._node = ""

    async def check_healthy(self) -> Evidence:
        """The doctor finds nothing in any layer."""
        return await self._says(lambda found: not found, "the doctor still finds something")

    async def lose(self) -> Evidence:
        """The switch still counts the GPU and the claim holds it, but the node does not have it any more."""
        pod = await self._whole.api.get(POD, _LOST_WORKER, JOB_NAMESPACE)
        self._node = node_of(pod)
        self._whole.nodes[self._node].gpus.lose(_LOST_MODULE)
        await self._whole.nodes.look(self._node)
        tray = self._whole.nodes[self._node].tray
        lost = PartName(tray.rack, tray.slot, gpu=_LOST_MODULE - 1)
        return {"lost": f"{lost} (node {self._node}), under {_LOST_WORKER}"}

    async def check_found(self) -> Evidence:
        """The doctor names the node, the evidence of both sides, and the fix."""
        line = await self._says(self._about, "no finding names the node")
        about = self._about(await self._whole.real.findings())
        return {**line, **{finding.check: _finding_evidence(finding) for finding in about}}

    async def heal(self) -> Evidence:
        """The GPU answers again, as after the reboot that the fix names, and no finding names it any more.

        Other findings of the doctor, such as a transfer that was too slow, are in its sentence.
        """
        self._whole.nodes[self._node].gpus.find(_LOST_MODULE)
        await self._whole.nodes.look(self._node)
        line = await self._says(lambda found: not self._about(found), "the doctor still names the node")
        return {"simulated": "the GPU answers again, as after a reboot", **line}

    async def doctor_says(self) -> str:
        """The last line of the doctor now."""
        return summary_line(await self._whole.real.findings())

    async def _says(self, holds: Callable[[tuple[Finding, ...]], object], complaint: str) -> Evidence:
        """The last line of the doctor, once its findings are as expected."""

        async def look() -> str | None:
            found = await self._whole.real.findings()
            return summary_line(found) if holds(found) else None

        return {"doctor": await wait_until(look, complaint)}

    def _about(self, found: Iterable[Finding]) -> list[Finding]:
        """The findings that name the node of the lost GPU."""
        return [
            finding
            for finding in found
            if self._node in " ".join((finding.subject, finding.message, *finding.evidence))
        ]


def _finding_evidence(finding: Finding) -> Evidence:
    return {
        "what": f"{finding.subject}: {finding.message}",
        "evidence": "; ".join(finding.evidence),
        "fix": finding.fix,
    }
