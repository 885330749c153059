"""The whole life of ComputeDomains and their jobs, with one disruption at one crash point.

In domain mode one job of two pods runs. In channel mode two jobs share a rack. The jobs run, one loses
a pod and gets another, and the ComputeDomains are deleted while the jobs run, so that deletion is first
held back. A gang of two members loses a tray instead, and must be whole on another tray before the lost
one is back.

After any disruption, three things must follow. The jobs run. Nothing is left: no objects, no labels or
reservations on nodes, no prepared claims, no files (`find_leftovers`). And a later job runs on every tray.

`play_story` plays one story once, with its files in memory. `StoryResult.steps` is the number of crash
points. A test plays the story with each disruption at each of them.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tests.simulation.compute_domains.cluster import (
    GPUS_PER_TRAY,
    JOB_NAMESPACE,
    STOPPED_SECONDS,
    ComputeDomainCluster,
    Disruption,
    StoryKind,
    retry_until_answered,
)
from tests.simulation.compute_domains.machines import StoryTray
from tests.simulation.compute_domains.processes import files_as_crash_points
from tests.simulation.invariants.leftovers import find_leftovers, find_stray_labels, leftovers_on_tray
from tests.simulation.invariants.memory import JOB_LABEL

from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import GANG_GATE, SPARES_ANNOTATION
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    NODE,
    POD,
    Object,
    ResourceKind,
    is_pod_ready,
)
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.gangs.snapshot import read_record
from rackloom.lab.virtual import event_loop

STORY_TIMEOUT = 600.0
"""Seconds for a job to run, or to go, after any disruption."""
SWEEP_TIMEOUT = 1500.0
"""Seconds until everything is cleaned up: two sweeps of ten minutes, and the work after them."""
POLL_SECONDS = 1.0


class StoryStuck(Exception):
    """A condition was not met in time."""


class StoryResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one story."""

    kind: StoryKind
    death: Disruption | None
    at: int
    steps: int
    """Crash points until the jobs were gone and cleared away."""
    died: bool
    gone_after: float
    """Virtual seconds from the deletion of the jobs' last pod until the ComputeDomains were gone."""
    checks: int
    broken: tuple[str, ...] = ()


def play_story(
    classes: Sequence[Object], kind: StoryKind, death: Disruption | None = None, at: int = 0
) -> StoryResult:
    """Play the story once. `classes` are the DeviceClasses of the installation."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        return event_loop.run_simulation(1, lambda: _play_in(Path(root), classes, kind, death, at))


async def _play_in(
    root: Path, classes: Sequence[Object], kind: StoryKind, death: Disruption | None, at: int
) -> StoryResult:
    cluster = ComputeDomainCluster(root, classes, kind, death=death, at=at)
    story = ComputeDomainStory(cluster)
    broken = cluster.channels.broken
    with files_as_crash_points(cluster.steps):
        try:
            await story.live()
        except StoryStuck as stuck:
            broken.append(str(stuck))
        finally:
            await cluster.end()
    return StoryResult(
        kind=kind,
        death=death,
        at=at,
        steps=story.steps,
        died=cluster.died,
        gone_after=story.gone_after,
        checks=cluster.channels.checks,
        broken=tuple(dict.fromkeys(broken)),
    )


class SimulatedJob:
    """A ComputeDomain and pods that are created again when they are gone, like a Job's pods."""

    def __init__(self, cluster: ComputeDomainCluster, name: str, pods: int) -> None:
        self.name = name
        self._cluster = cluster
        self._claim: dict[str, str] = {}
        self._pods = [f"{name}-{number}" for number in range(pods)]
        self._keeper: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Apply it."""
        template = f"channel-{self.name}"
        spec = {"channel": {"resourceClaimTemplate": {"name": template}}}
        meta = {"name": self.name, "namespace": JOB_NAMESPACE}
        made = await retry_until_answered(
            lambda: self._cluster.user.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})
        )
        self._claim = {"resourceClaimTemplateName": template}
        if self._cluster.isolation is ImexIsolation.CHANNEL:  # as the webhook rewrites it
            self._claim = {"resourceClaimName": names.shared_claim_name(made["metadata"]["uid"])}
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            for name in self._pods:
                if self._find(POD, name) is None:
                    await retry_until_answered(
                        lambda name=name: self._cluster.user.create(POD, self._pod(name))  # type: ignore[misc]
                    )
            await asyncio.sleep(POLL_SECONDS)

    def _pod(self, name: str) -> Object:
        containers = [{"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}]
        spec = {"containers": containers, "resourceClaims": [{"name": "channel", **self._claim}]}
        return {
            "metadata": {"name": name, "namespace": JOB_NAMESPACE, "labels": {JOB_LABEL: self.name}},
            "spec": spec,
        }

    def nodes(self) -> tuple[str, ...]:
        """The nodes of its ready pods."""
        return tuple(pod["spec"]["nodeName"] for pod in map(self._ready_pod, self._pods) if pod)

    def runs(self) -> bool:
        """Whether every pod is ready on a machine that is on, and the ComputeDomain is Ready."""
        domain = self._find(COMPUTE_DOMAIN, self.name)
        ready = domain is not None and (domain.get("status") or {}).get("status") == "Ready"
        return ready and all(map(self._ready_pod, self._pods))

    def _find(self, kind: ResourceKind, name: str) -> Object | None:
        return self._cluster.kube.store.find(kind, (JOB_NAMESPACE, name))

    def _ready_pod(self, name: str) -> Object | None:
        pod = self._find(POD, name)
        if pod is None or "deletionTimestamp" in pod["metadata"] or not is_pod_ready(pod):
            return None
        return pod if pod["spec"]["nodeName"] in self._cluster.machines.on else None

    async def replace_a_pod(self) -> None:
        """Delete the first pod, and wait until another one has its name."""
        before = self._cluster.kube.store.read(POD, (JOB_NAMESPACE, self._pods[0]))
        await self._cluster.delete_pod(before)

        def replaced() -> bool:
            now = self._find(POD, self._pods[0])
            return now is not None and now["metadata"]["uid"] != before["metadata"]["uid"]

        await wait_until(f"{self._pods[0]} is replaced", replaced)

    async def delete_domain(self) -> None:
        """Ask for it while the pods run."""
        await retry_until_answered(
            lambda: self._cluster.user.delete(COMPUTE_DOMAIN, self.name, JOB_NAMESPACE)
        )

    async def stop(self) -> None:
        """Delete the pods and create no new ones."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for name in self._pods:
            if pod := self._find(POD, name):
                await self._cluster.delete_pod(pod)

    def is_gone(self) -> bool:
        """Whether neither its pods nor its ComputeDomain is left."""
        pods = any(self._find(POD, name) is not None for name in self._pods)
        return not pods and self._find(COMPUTE_DOMAIN, self.name) is None


class SimulatedGang(SimulatedJob):
    """The same as a gang: its pods come as the webhook lets them in."""

    def _pod(self, name: str) -> Object:
        pod = super()._pod(name)
        meta, spec = pod["metadata"], pod["spec"]
        meta["labels"] |= {GANG_LABEL: self.name}
        meta["annotations"] = {
            SIZE_ANNOTATION: str(len(self._pods)),
            SPARES_ANNOTATION: "1",
        }
        spec["schedulingGates"] = [{"name": GANG_GATE}]
        spec["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": GPUS_PER_TRAY}
        return pod

    def runs(self) -> bool:
        """The same, and all are where the plan has them."""
        plan = self._find(GANG_PLAN, self.name)
        bound = None if plan is None else read_record(plan).status.condition("Bound")
        return super().runs() and bound is not None and bound.reason == "AllBound"

    def is_gone(self) -> bool:
        """The same, and no tray is reserved for it."""
        return super().is_gone() and self._find(GANG_PLAN, self.name) is None


class ComputeDomainStory:
    """The story on one cluster."""

    def __init__(self, cluster: ComputeDomainCluster) -> None:
        self._cluster = cluster
        self._store = cluster.kube.store
        self._on = cluster.machines.on
        self.steps = 0
        self.gone_after = 0.0

    async def live(self) -> None:
        """Play the whole story. Raises `StoryStuck`."""
        await self._cluster.begin()
        if self._cluster.kind is StoryKind.GANG:
            await self._gang_story(SimulatedGang(self._cluster, "gang", pods=2))
        else:
            count = 1 if self._cluster.kind is StoryKind.DOMAIN else 2
            await self._job_story(
                [SimulatedJob(self._cluster, f"job-{number}", pods=2) for number in range(count)]
            )
        await self._release_cliques()
        await wait_until(
            "nothing is left",
            lambda: not any(find_leftovers(self._store, self._on)),
            self._left,
            SWEEP_TIMEOUT,
        )
        self.steps = self._cluster.steps.taken
        await self._run_on_every_tray()

    async def _job_story(self, jobs: Sequence[SimulatedJob]) -> None:
        await asyncio.gather(*(job.begin() for job in jobs))
        await self._until_all("runs", jobs, lambda job: job.runs())
        await jobs[0].replace_a_pod()
        await self._until_all("runs again", jobs, lambda job: job.runs())
        # While the ComputeDomain lives no controller takes the label of a node away: its plugin has to.
        await wait_until(
            "only the jobs' nodes are labelled",
            lambda: not find_stray_labels(self._store, self._on, JOB_NAMESPACE),
            lambda: ", ".join(find_stray_labels(self._store, self._on, JOB_NAMESPACE)),
            SWEEP_TIMEOUT,
        )
        await asyncio.gather(*(job.delete_domain() for job in jobs))
        await asyncio.sleep(2 * POLL_SECONDS)
        await self._end(jobs)

    async def _gang_story(self, gang: SimulatedGang) -> None:
        await gang.begin()
        await self._until_all("runs", [gang], lambda job: job.runs())
        lost = await self._lose_a_tray(gang)
        await self._until_all("runs without the tray that is lost", [gang], lambda job: job.runs())
        await self._cluster.boot(lost)
        await wait_until(
            "the tray that is back is free",
            lambda: not leftovers_on_tray(self._store, self._on, lost),
            self._state,
            SWEEP_TIMEOUT,
        )
        # During this time, a process that was stopped when the tray was lost resumes with outdated readings.
        await asyncio.sleep(STOPPED_SECONDS)
        await self._until_all("runs on", [gang], lambda job: job.runs())
        await gang.delete_domain()
        await asyncio.sleep(2 * POLL_SECONDS)
        await self._end([gang])

    async def _lose_a_tray(self, gang: SimulatedGang) -> StoryTray:
        """Cut a tray on which a member runs, as soon as there is one: another may be lost already."""
        await wait_until("a member runs", lambda: bool(gang.nodes()), self._state)
        tray = self._cluster.machines.on[gang.nodes()[0]]
        await self._cluster.cut_off(tray)
        return tray

    async def _end(self, jobs: Sequence[SimulatedJob]) -> None:
        await asyncio.gather(*(job.stop() for job in jobs))
        began = asyncio.get_running_loop().time()
        await self._until_all("is gone", jobs, lambda job: job.is_gone())
        self.gone_after = max(self.gone_after, asyncio.get_running_loop().time() - began)

    async def _release_cliques(self) -> None:
        """In channel mode every clique is kept warm until its nodes are set to the other mode."""
        await self._set_mode(ImexIsolation.DOMAIN)

    async def _set_mode(self, isolation: ImexIsolation) -> None:
        for node in self._cluster.kube.store.all(NODE):
            labels = {names.ISOLATION_LABEL: isolation.value}
            name = node["metadata"]["name"]
            await retry_until_answered(
                lambda name=name, labels=labels: self._cluster.user.patch(  # type: ignore[misc]
                    NODE, name, None, {"metadata": {"labels": labels}}
                )
            )

    async def _run_on_every_tray(self) -> None:
        await self._set_mode(self._cluster.isolation)
        job = SimulatedJob(self._cluster, "after", pods=len(self._cluster.machines.on))
        await job.begin()
        await self._until_all("runs", [job], lambda job: job.runs())
        await job.delete_domain()
        await self._end([job])

    async def _until_all(
        self, what: str, jobs: Sequence[SimulatedJob], holds: Callable[[SimulatedJob], bool]
    ) -> None:
        for job in jobs:
            await wait_until(f"{job.name} {what}", lambda job=job: holds(job), self._state)  # type: ignore[misc]

    def _left(self) -> str:
        return ", ".join(find_leftovers(self._store, self._on))

    def _state(self) -> str:
        """The state that explains why the story does not continue."""
        domains = self._cluster.kube.store.all(COMPUTE_DOMAIN)
        conditions = [
            f"{domain['metadata']['name']}: {condition['reason']} {condition['message']}"
            for domain in domains
            for condition in (domain.get("status") or {}).get("conditions", ())
        ]
        return f"{self._left()}; {'; '.join(conditions)}"


async def wait_until(
    what: str, holds: Callable[[], bool], state: Callable[[], str] = str, seconds: float = STORY_TIMEOUT
) -> None:
    """Wait for a condition. Raises `StoryStuck` with the state after `seconds` of virtual time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not holds():
        if loop.time() > deadline:
            raise StoryStuck(f"not in {seconds:g} s: {what}; {state()}")
        await asyncio.sleep(POLL_SECONDS)
