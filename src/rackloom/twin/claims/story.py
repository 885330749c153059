"""The whole life of ComputeDomains and their jobs, with one death at one step of it.

In domain mode one job of two pods, in channel mode two jobs that share a rack. They run, one loses a pod and
gets another, and they are deleted while they run, so that the deletion is first held back. A gang of two
loses a tray instead, and must be whole on another one before that is back. Whatever died or was stopped, the
jobs must run, everything must go, and a job that comes afterwards must run on every tray.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.record import record_of
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import Isolation
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN, GANG_PLAN, NODE, POD
from rackloom.twin.claims.leftovers import left_on, leftovers, stray_labels
from rackloom.twin.claims.plant import GPUS, STOPPED, TEAM, Death, Plant, Plot, insist
from rackloom.twin.claims.seen import JOB_LABEL
from rackloom.twin.virtual import event_loop

PATIENCE = 600.0
"""Seconds for a job to run, or to go, whatever died."""
SWEPT = 1500.0
"""Seconds for the last thing to be cleared away: two sweeps of ten minutes, and what comes after."""
LOOK = 1.0


class Stuck(Exception):
    """Something that must come true did not."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one story."""

    plot: Plot
    death: Death | None
    at: int
    steps: int
    """Until the jobs were gone and cleared away: the steps at which somebody may die."""
    died: bool
    gone_after: float
    """Virtual seconds from the deletion of the jobs' last pod until the ComputeDomains were gone."""
    judged: int
    broken: tuple[str, ...] = ()


def tell(classes: Sequence[Object], plot: Plot, death: Death | None = None, at: int = 0) -> Told:
    """Play the story once. `classes` are the DeviceClasses of the installation."""
    memory = Path("/dev/shm")  # noqa: S108 (a scratch directory of random name below it)
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        return event_loop.run(1, lambda: _play(Path(root), classes, plot, death, at))


async def _play(root: Path, classes: Sequence[Object], plot: Plot, death: Death | None, at: int) -> Told:
    plant = Plant(root, classes, plot, death=death, at=at)
    story = Story(plant)
    broken = plant.seen.broken
    with plant.steps.of_files():
        try:
            await story.live()
        except Stuck as stuck:
            broken.append(str(stuck))
        finally:
            await plant.end()
    return Told(
        plot=plot,
        death=death,
        at=at,
        steps=story.steps,
        died=plant.died,
        gone_after=story.gone_after,
        judged=plant.seen.judged,
        broken=tuple(dict.fromkeys(broken)),
    )


class Job:
    """A ComputeDomain and pods that are created anew when they are gone, as a Job's are."""

    def __init__(self, plant: Plant, name: str, pods: int) -> None:
        self.name = name
        self._plant = plant
        self._claim: dict[str, str] = {}
        self._pods = [f"{name}-{number}" for number in range(pods)]
        self._keeper: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Apply it."""
        template = f"channel-{self.name}"
        spec = {"channel": {"resourceClaimTemplate": {"name": template}}}
        meta = {"name": self.name, "namespace": TEAM}
        made = await insist(lambda: self._plant.user.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec}))
        self._claim = {"resourceClaimTemplateName": template}
        if self._plant.isolation is Isolation.CHANNEL:  # as the webhook rewrites it
            self._claim = {"resourceClaimName": names.shared_claim_name(made["metadata"]["uid"])}
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            for name in self._pods:
                if self._plant.kube.store.find(POD, (TEAM, name)) is None:
                    await insist(lambda name=name: self._plant.user.create(POD, self._pod(name)))  # type: ignore[misc]
            await asyncio.sleep(LOOK)

    def _pod(self, name: str) -> Object:
        containers = [{"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}]
        spec = {"containers": containers, "resourceClaims": [{"name": "channel", **self._claim}]}
        return {
            "metadata": {"name": name, "namespace": TEAM, "labels": {JOB_LABEL: self.name}},
            "spec": spec,
        }

    def nodes(self) -> tuple[str, ...]:
        """Where its pods are that are ready."""
        found = (
            self._plant.kube.store.find(POD, (TEAM, name)) for name in self._pods if self._is_ready(name)
        )
        return tuple(pod["spec"]["nodeName"] for pod in found if pod is not None)

    def runs(self) -> bool:
        """Whether every pod is ready on a machine that is on, and the ComputeDomain says so too."""
        domain = self._plant.kube.store.find(COMPUTE_DOMAIN, (TEAM, self.name))
        ready = domain is not None and (domain.get("status") or {}).get("status") == "Ready"
        return ready and all(self._is_ready(name) for name in self._pods)

    def _is_ready(self, name: str) -> bool:
        pod = self._plant.kube.store.find(POD, (TEAM, name))
        if pod is None or "deletionTimestamp" in pod["metadata"]:
            return False
        conditions = pod.get("status", {}).get("conditions", ())
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return ready and pod["spec"]["nodeName"] in self._plant.machines.on

    async def replace_a_pod(self) -> None:
        """Delete the first pod, and wait until another one has its name."""
        before = self._plant.kube.store.read(POD, (TEAM, self._pods[0]))
        await self._plant.delete_pod(before)

        def replaced() -> bool:
            now = self._plant.kube.store.find(POD, (TEAM, self._pods[0]))
            return now is not None and now["metadata"]["uid"] != before["metadata"]["uid"]

        await until(f"{self._pods[0]} is replaced", replaced)

    async def delete_domain(self) -> None:
        """Ask for it while the pods run."""
        await insist(lambda: self._plant.user.delete(COMPUTE_DOMAIN, self.name, TEAM))

    async def stop(self) -> None:
        """The pods come to their end."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for name in self._pods:
            pod = self._plant.kube.store.find(POD, (TEAM, name))
            if pod is not None:
                await self._plant.delete_pod(pod)

    def is_gone(self) -> bool:
        """Whether neither its pods nor its ComputeDomain is left."""
        store = self._plant.kube.store
        pods = any(store.find(POD, (TEAM, name)) is not None for name in self._pods)
        return not pods and store.find(COMPUTE_DOMAIN, (TEAM, self.name)) is None


class Gang(Job):
    """The same as a gang: its pods come as the webhook lets them in."""

    def _pod(self, name: str) -> Object:
        pod = super()._pod(name)
        meta, spec = pod["metadata"], pod["spec"]
        meta["labels"] |= {GANG_LABEL: self.name}
        meta["annotations"] = {marks.SIZE_ANNOTATION: str(len(self._pods)), marks.SPARES_ANNOTATION: "1"}
        spec["schedulingGates"] = [{"name": marks.GATE}]
        spec["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": GPUS}
        return pod

    def runs(self) -> bool:
        """The same, and all are where the plan has them."""
        plan = self._plant.kube.store.find(GANG_PLAN, (TEAM, self.name))
        bound = None if plan is None else record_of(plan).condition("Bound")
        return super().runs() and bound is not None and bound.reason == "AllBound"

    def is_gone(self) -> bool:
        """The same, and no tray is reserved for it."""
        return super().is_gone() and self._plant.kube.store.find(GANG_PLAN, (TEAM, self.name)) is None


class Story:
    """One telling on one plant."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self.steps = 0
        self.gone_after = 0.0

    async def live(self) -> None:
        """All of it. Raises `Stuck`."""
        await self._plant.begin()
        if self._plant.plot is Plot.GANG:
            await self._life_of_a_gang(Gang(self._plant, "gang", pods=2))
        else:
            number = 1 if self._plant.plot is Plot.DOMAIN else 2
            await self._whole_life([Job(self._plant, f"job-{one}", pods=2) for one in range(number)])
        await self._let_cliques_go()
        await until("nothing is left", lambda: not any(leftovers(self._plant)), self._left, SWEPT)
        self.steps = self._plant.steps.taken
        await self._use_every_tray()

    async def _whole_life(self, jobs: Sequence[Job]) -> None:
        await asyncio.gather(*(job.begin() for job in jobs))
        await self._until_all("runs", jobs, lambda job: job.runs())
        await jobs[0].replace_a_pod()
        await self._until_all("runs again", jobs, lambda job: job.runs())
        # While the ComputeDomain lives no controller takes the label of a node away: its plugin has to.
        await until(
            "only the jobs' nodes are labelled",
            lambda: not stray_labels(self._plant),
            lambda: ", ".join(stray_labels(self._plant)),
            SWEPT,
        )
        await asyncio.gather(*(job.delete_domain() for job in jobs))
        await asyncio.sleep(2 * LOOK)
        await self._end(jobs)

    async def _life_of_a_gang(self, gang: Gang) -> None:
        await gang.begin()
        await self._until_all("runs", [gang], lambda job: job.runs())
        lost = await self._lose_a_tray(gang)
        await self._until_all("runs without the tray that is lost", [gang], lambda job: job.runs())
        await self._plant.switch_on(*lost)
        await until(
            "the tray that is back is free", lambda: not left_on(self._plant, lost[0]), self._state, SWEPT
        )
        # A process that was stopped when the tray was lost goes on meanwhile, with what it had read before.
        await asyncio.sleep(STOPPED)
        await self._until_all("runs on", [gang], lambda job: job.runs())
        await gang.delete_domain()
        await asyncio.sleep(2 * LOOK)
        await self._end([gang])

    async def _lose_a_tray(self, gang: Gang) -> tuple[str, int]:
        """One on which a member runs, as soon as there is one: another may be lost already."""
        await until("a member runs", lambda: bool(gang.nodes()), self._state)
        node = gang.nodes()[0]
        return node, await self._plant.cut_off(node)

    async def _end(self, jobs: Sequence[Job]) -> None:
        await asyncio.gather(*(job.stop() for job in jobs))
        began = asyncio.get_running_loop().time()
        await self._until_all("is gone", jobs, lambda job: job.is_gone())
        self.gone_after = max(self.gone_after, asyncio.get_running_loop().time() - began)

    async def _let_cliques_go(self) -> None:
        """In channel mode every clique is kept warm until its nodes are set to the other mode."""
        await self._set_mode(Isolation.DOMAIN)

    async def _set_mode(self, isolation: Isolation) -> None:
        for node in self._plant.kube.store.all(NODE):
            labels = {names.ISOLATION_LABEL: isolation.value}
            name = node["metadata"]["name"]
            await insist(
                lambda name=name, labels=labels: self._plant.user.patch(  # type: ignore[misc]
                    NODE, name, None, {"metadata": {"labels": labels}}
                )
            )

    async def _use_every_tray(self) -> None:
        await self._set_mode(self._plant.isolation)
        job = Job(self._plant, "after", pods=len(self._plant.living_trays))
        await job.begin()
        await self._until_all("runs", [job], lambda one: one.runs())
        await job.delete_domain()
        await self._end([job])

    async def _until_all(self, what: str, jobs: Sequence[Job], holds: Callable[[Job], bool]) -> None:
        for job in jobs:
            await until(f"{job.name} {what}", lambda job=job: holds(job), self._state)  # type: ignore[misc]

    def _left(self) -> str:
        return ", ".join(leftovers(self._plant))

    def _state(self) -> str:
        """What a reader needs to see why nothing goes on."""
        domains = self._plant.kube.store.all(COMPUTE_DOMAIN)
        said = [
            f"{one['metadata']['name']}: {condition['reason']} {condition['message']}"
            for one in domains
            for condition in (one.get("status") or {}).get("conditions", ())
        ]
        return f"{self._left()}; {'; '.join(said)}"


async def until(
    what: str, holds: Callable[[], bool], state: Callable[[], str] = str, seconds: float = PATIENCE
) -> None:
    """Wait. Raises `Stuck` with the state when it does not come true in so many virtual seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not holds():
        if loop.time() > deadline:
            raise Stuck(f"not in {seconds:g} s: {what}; {state()}")
        await asyncio.sleep(LOOK)
