"""A fake cluster of racks under virtual time: admission, a scheduler, jobs, and a controller that may die."""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from rackloom.claim.cluster.admission.gates import GateController
from rackloom.claim.cluster.admission.reviews import ReviewedResource, ReviewRequest
from rackloom.claim.cluster.admission.webhook import AdmissionCache, AdmissionReviewer, AdmissionSettings
from rackloom.claim.cluster.gang_controller import GangController, GangMetrics
from rackloom.claim.kube.api import Conflict, EventRecorder, NotFound, WatchEvent
from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import GANG_TAINT, GROUP_LABEL, SPARES_ANNOTATION
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    EVENT,
    GANG_PLAN,
    JOB,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    metav1_time,
)
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.cluster.projection import project_for_control
from rackloom.core.gangs.snapshot import WITHOUT_KUEUE, GangSettings, read_record
from rackloom.lab.kube.controllers.scheduler import SimulatedScheduler
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.patches import json_patch
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.event_loop import loop_wall_time

TEAM = "team"
GPUS = 4
SETTINGS = GangSettings(lost_after=60.0, bind_after=30.0, again=5.0)


class Died(BaseException):
    """The controller's process is gone."""


class Mortal(DirectApi):
    """An API client whose process dies right after its write number `last`."""

    def __init__(self, kube, user, last=None):
        super().__init__(kube, user)
        self.left = last
        self.done = 0
        self.dead = asyncio.Event()

    def _leave(self, call, answer):
        answer = super()._leave(call, answer)
        self._count(call.is_write)
        return answer

    async def _enter(self, verb, kind, subresource=""):
        if self.dead.is_set():
            await asyncio.Event().wait()
        return await super()._enter(verb, kind, subresource)

    async def delete(self, *args, **kwargs):
        await super().delete(*args, **kwargs)
        self._count(True)

    def _count(self, is_write):
        self.done += is_write
        if self.left is not None and self.done >= self.left:
            self.dead.set()


class ControllerApi(Mortal):
    """Keeps the part of each object that the controllers read, as the client of their process does."""

    async def list(self, kind, namespace=None, **chosen):
        found = await super().list(kind, namespace, **chosen)
        return replace_fields(found, items=tuple(project_for_control(kind, obj) for obj in found.items))

    async def watch(self, kind, namespace=None, **chosen):
        async for event in super().watch(kind, namespace, **chosen):
            is_object = event.type != "BOOKMARK"
            yield WatchEvent(event.type, project_for_control(kind, event.object)) if is_object else event


class Behind(ControllerApi):
    """A controller's API client whose first list of one kind is old, and whose watch of it is silent.

    That is a follower's view of a server whose cache lags. Later requests get true answers.
    """

    def __init__(self, kube, user, kind, old):
        super().__init__(kube, user)
        self.kind, self.old = kind, old
        self.caught_up = asyncio.Event()

    async def list(self, kind, namespace=None, **chosen):
        found = await super().list(kind, namespace, **chosen)
        if kind == self.kind and self.old is not None:
            found, self.old = self.old, None
        return found

    async def watch(self, kind, namespace=None, **chosen):
        if kind == self.kind:
            await self.caught_up.wait()
        async for event in super().watch(kind, namespace, **chosen):
            yield event


class Job:
    """Pods by name. A missing pod is created again, as by the MPI operator."""

    def __init__(
        self,
        site,
        name,
        sizes,
        *,
        gpus=GPUS,
        gang=True,
        spares=0,
        templates=(),
        own_claims=False,
        completions=None,
        cpu=None,
    ):
        self.cpu, self.own_claims = cpu, own_claims
        self.site, self.name, self.sizes, self.gpus, self.gang = site, name, sizes, gpus, gang
        self.completions = completions
        self.spares, self.templates = spares, templates
        self.is_wanted, self.uid = True, None

    async def run(self):
        spec = {"template": {"spec": {"containers": [{"name": "main", "image": "none"}]}}}
        spec |= {"completions": self.completions, "parallelism": sum(self.sizes.values())}
        meta = {"name": self.name, "namespace": TEAM}
        self.uid = (await self.site.user.create(JOB, {"metadata": meta, "spec": spec}))["metadata"]["uid"]
        while self.is_wanted:
            for group, size in self.sizes.items():
                for number in range(size):
                    with suppress(Conflict):
                        await self.site.user.create(POD, self.pod(group, number))
            await asyncio.sleep(1.0)

    def pod(self, group, number):
        size = ",".join(f"{name}={count}" for name, count in self.sizes.items())
        meta = {"name": f"{self.name}-{group}-{number}", "namespace": TEAM, "labels": {"job": self.name}}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.name}
        meta["ownerReferences"] = [owner | {"uid": self.uid, "controller": True}]
        if self.gang:
            meta["labels"] |= {GANG_LABEL: self.name, GROUP_LABEL: group}
            meta["annotations"] = {SIZE_ANNOTATION: size, SPARES_ANNOTATION: str(self.spares)}
        limits = {} if group == "launcher" else {"nvidia.com/gpu": str(self.gpus)}
        requests = {} if self.cpu is None or group == "launcher" else {"cpu": self.cpu}
        resources = {"limits": limits, "requests": requests}
        container = {"name": "main", "image": "none", "resources": resources}
        claims = [{"name": template, "resourceClaimTemplateName": template} for template in self.templates]
        if self.own_claims:
            claims.append({"name": "own", "resourceClaimName": meta["name"]})
        return {"metadata": meta, "spec": {"containers": [container], "resourceClaims": claims}}

    async def succeed(self, name):
        """A pod ends well. This job does not make it again, since it is still there."""
        await self._say(name, "Succeeded")

    async def fail(self, name):
        """A pod fails. It also stays there until the job makes it `again`, under another name."""
        await self._say(name, "Failed")

    async def again(self, name):
        group, number = name.removeprefix(f"{self.name}-").split("-")[:2]
        pod = self.pod(group, int(number))
        pod["metadata"]["name"] = f"{name}-again"
        await self.site.user.create(POD, pod)

    async def _say(self, name, phase):
        await self.site.user.patch(POD, name, TEAM, {"status": {"phase": phase}}, subresource="status")

    async def end(self):
        self.is_wanted = False
        for pod in await self.site.pods(self.name):
            with suppress(NotFound):
                await self.site.user.delete(POD, pod["metadata"]["name"], TEAM, grace_seconds=0)


class GangSite:
    """Racks `r0`, `r1`... with trays `r0-t0`... `start` begins a controller, `kill` ends it."""

    def __init__(self, racks, trays, seed=1, kueue=WITHOUT_KUEUE, **chosen):
        self.kueue = kueue
        self.kube = FakeKube(namespaces=(TEAM, "kube-system", "rackloom-system"), seed=seed)
        self.kube.faults.delay(0.002)
        self.user = Mortal(self.kube, "user")
        self.trays = [f"r{rack}-t{tray}" for rack in range(racks) for tray in range(trays)]
        self.rng = random.Random(seed)
        self.known = AdmissionCache(DirectApi(self.kube, "webhook"), ImexIsolation.DOMAIN, self.rng)
        self.reviewer = AdmissionReviewer(self.known, AdmissionSettings())
        self.kube.admission.append(self._admit)
        self.tasks, self.controller, self.api = [], None, None
        self.meter, self.settings = GangMetrics(), replace(SETTINGS, **chosen)

    async def _admit(self, review):
        if review.kind != POD or review.operation != "CREATE":
            return None
        namespace = review.object["metadata"]["namespace"]
        resource = ReviewedResource("", "v1", "pods")
        asked = ReviewRequest(
            uid="u", operation="CREATE", resource=resource, namespace=namespace, object=review.object
        )
        verdict = await self.reviewer.mutate_pods(asked)
        assert verdict.allowed, verdict.message
        return json_patch(review.object, verdict.patch)

    async def begin(self):
        runs = [informer.run() for informer in self.known.informers]
        runs.append(SimulatedScheduler(self.kube, random.Random(3)).run())
        self.tasks = [asyncio.create_task(run) for run in runs]
        await self.known.synced()
        for name in self.trays:
            await self.power_on(name)

    async def power_on(self, name):
        labels = {names.GPU_CLIQUE_LABEL: f"u.{name.split('-')[0]}"}
        there = {"nvidia.com/gpu": str(GPUS), "pods": "110", "cpu": "144", "memory": "960Gi"}
        status = {"allocatable": there, "conditions": [_ready("True")]}
        await self.user.create(NODE, {"metadata": {"name": name, "labels": labels}, "status": status})

    async def label_trays(self):
        """Label the trays, so that pods may choose one."""
        for name in self.trays:
            await self.user.patch(NODE, name, None, {"metadata": {"labels": {"tray": name}}})

    async def publish(self, driver=names.GPU_DRIVER, without=()):
        """As the node plugins do: four devices on each tray."""
        selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
        meta = {"name": driver}
        await self.user.create(DEVICE_CLASS, {"metadata": meta, "spec": {"selectors": [selector]}})
        for name in (tray for tray in self.trays if tray not in without):
            spec = {
                "driver": driver,
                "nodeName": name,
                "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": f"device-{number}"} for number in range(GPUS)],
            }
            await self.user.create(RESOURCE_SLICE, {"metadata": {"name": f"{name}-{driver}"}, "spec": spec})

    async def make_template(self, name, count, driver=names.GPU_DRIVER):
        spec = {"spec": _devices(count, driver)}
        await self.user.create(
            RESOURCE_CLAIM_TEMPLATE, {"metadata": {"name": name, "namespace": TEAM}, "spec": spec}
        )

    async def make_claim(self, name, count, driver=names.GPU_DRIVER):
        meta = {"name": name, "namespace": TEAM}
        await self.user.create(RESOURCE_CLAIM, {"metadata": meta, "spec": _devices(count, driver)})

    def gatekeeper(self):
        """The controller of the webhook's other gate."""
        api = DirectApi(self.kube, "webhook")
        return GateController(api, self.known, EventRecorder(api, "webhook", "w", loop_wall_time), self.rng)

    async def say_ready(self, name, status):
        since = metav1_time(loop_wall_time())
        found = {"status": {"conditions": [_ready(status) | {"lastTransitionTime": since}]}}
        await self.user.patch(NODE, name, None, found, subresource="status")

    async def cordon(self, name, is_cordoned=True):
        await self.user.patch(NODE, name, None, {"spec": {"unschedulable": is_cordoned}})

    def start(self, last=None, api=None):
        self.api = api or ControllerApi(self.kube, "controller", last)
        recorder = EventRecorder(self.api, "rackloom-controller", "test", loop_wall_time)
        gang_controller = GangController(
            self.api, recorder, loop_wall_time, self.rng, self.settings, self.meter, self.kueue
        )
        self.controller = asyncio.create_task(gang_controller.run())

    async def kill(self):
        self.controller.cancel()
        await asyncio.gather(self.controller, return_exceptions=True)

    def job(self, *args, **kwargs):
        made = Job(self, *args, **kwargs)
        self.tasks.append(asyncio.create_task(made.run()))
        return made

    async def end(self):
        for task in self.tasks:
            assert not task.done() or task.exception() is None, task
            task.cancel()
        if self.controller is not None:
            assert not self.controller.done(), self.controller
            self.controller.cancel()
        await asyncio.gather(*self.tasks, *filter(None, [self.controller]), return_exceptions=True)

    async def pods(self, job):
        return (await self.user.list(POD, TEAM, labels=f"job={job}")).items

    async def places(self, job):
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in await self.pods(job)}

    async def is_bound(self, job, count):
        places = await self.places(job)
        return len(places) == count and all(places.values())

    async def has_pods(self, job, count):
        return len(await self.pods(job)) == count

    async def ungated(self, job):
        return [pod for pod in await self.pods(job) if not pod["spec"].get("schedulingGates")]

    async def has_ungated(self, job, count):
        return len(await self.ungated(job)) == count

    async def taints(self):
        """Nodes by the value of our taint."""
        nodes = (await self.user.list(NODE)).items
        return {
            node["metadata"]["name"]: taint["value"]
            for node in nodes
            for taint in (node.get("spec") or {}).get("taints") or ()
            if taint["key"] == GANG_TAINT
        }

    async def record(self, name):
        return read_record(await self.user.get(GANG_PLAN, name, TEAM))

    async def says(self, name, type_, reason):
        with suppress(NotFound):
            found = (await self.record(name)).status.condition(type_)
            return found is not None and found.reason == reason
        return False

    async def is_clean(self):
        return not await self.taints() and not (await self.user.list(GANG_PLAN)).items

    async def events(self, reason):
        return [item for item in (await self.user.list(EVENT, TEAM)).items if item["reason"] == reason]

    async def until(self, holds, seconds=200):
        for _ in range(seconds * 2):
            if await holds():
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"did not come true; plans: {(await self.user.list(GANG_PLAN)).items}")


def _devices(count, driver):
    exactly = {"deviceClassName": driver, "allocationMode": "ExactCount", "count": count}
    return {"devices": {"requests": [{"name": "devices", "exactly": exactly}]}}


def _ready(status):
    return {"type": "Ready", "status": status, "lastTransitionTime": "1970-01-01T00:00:00Z"}


def rack_of(node):
    return node.split("-")[0]


def run(story, seed=1):
    event_loop.run_simulation(seed, story)


async def planned(site, gang):
    """The plan of a gang at the moment when it is recorded."""
    async with asyncio.timeout(60):
        while True:
            with suppress(NotFound):
                if plan := (await site.record(gang)).plan:
                    return plan
            await asyncio.sleep(0.001)
