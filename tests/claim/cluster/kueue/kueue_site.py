"""A fake cluster with Kueue's types and what Kueue does with a check, under virtual time.

`SimulatedKueue` has quota for everything: it reserves quota, sets checks to Pending, and does what the states
of checks ask for, as kueue.x-k8s.io/v1beta2 is implemented in 0.19.
"""

import asyncio
import random
from contextlib import suppress

from msgspec.structs import replace

from rackloom.claim.cluster.gang_placer import GangCaches
from rackloom.claim.cluster.kueue_controller import KueueController
from rackloom.claim.kube.api import Conflict, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    ADMISSION_CHECK,
    DEVICE_CLASS,
    NODE,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_FLAVOR,
    RESOURCE_SLICE,
    WORKLOAD,
    has_condition,
    metav1_time,
)
from rackloom.core.gangs.snapshot import BesideKueue, GangSettings
from rackloom.core.kueue.plans import CONTROLLER_NAME
from rackloom.lab.kube.controllers.scheduler import SimulatedScheduler
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.objects import TypeSchema
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.event_loop import loop_wall_time

TEAM, CHECK, GPUS = "team", "rackloom", 4
SETTINGS = GangSettings(again=5.0)
_LISTS = {"status.conditions": ("type",), "status.admissionChecks": ("name",), "spec.podSets": ("name",)}
KUEUE_TYPES = {
    kind: TypeSchema(status=True, generation=True, lists=_LISTS) for kind in (WORKLOAD, ADMISSION_CHECK)
}
KUEUE_TYPES[RESOURCE_FLAVOR] = TypeSchema(generation=True)


class KueueSite:
    """Racks `r0`, `r1`... with trays `r0-t0`..."""

    def __init__(self, racks, trays, seed=1, *, serves_kueue=True, **chosen):
        self.kube = FakeKube(namespaces=(TEAM, "other", "rackloom-system"), seed=seed)
        self.user = DirectApi(self.kube, "user")
        self.trays = [f"r{rack}-t{tray}" for rack in range(racks) for tray in range(trays)]
        self.rng = random.Random(seed)
        self.settings = replace(SETTINGS, **chosen)
        self.tasks, self.controller = [], None
        if serves_kueue:
            self.install_kueue()

    def install_kueue(self):
        for kind, schema in KUEUE_TYPES.items():
            self.kube.serve(kind, schema)

    async def begin(self):
        self.tasks = [asyncio.create_task(SimulatedScheduler(self.kube, random.Random(3)).run())]
        for name in self.trays:
            await self.power_on(name)

    async def power_on(self, name, **labels):
        labels = {names.GPU_CLIQUE_LABEL: f"u.{name.split('-')[0]}", "kubernetes.io/hostname": name} | labels
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:00:00Z"}
        status = {"allocatable": {"nvidia.com/gpu": str(GPUS), "pods": "110"}, "conditions": [ready]}
        await self.user.create(NODE, {"metadata": {"name": name, "labels": labels}, "status": status})

    async def publish(self, driver=names.GPU_DRIVER):
        """As the node plugins do: four devices on each tray."""
        selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
        await self.user.create(
            DEVICE_CLASS, {"metadata": {"name": driver}, "spec": {"selectors": [selector]}}
        )
        for name in self.trays:
            pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
            devices = [{"name": f"device-{number}"} for number in range(GPUS)]
            spec = {"driver": driver, "nodeName": name, "pool": pool, "devices": devices}
            await self.user.create(RESOURCE_SLICE, {"metadata": {"name": f"{name}-{driver}"}, "spec": spec})

    async def make_template(self, name, **counts):
        """A claim template for so many devices of each driver."""
        requests = [
            {
                "name": f"of-{number}",
                "exactly": {"deviceClassName": driver, "allocationMode": "ExactCount", "count": count},
            }
            for number, (driver, count) in enumerate(counts.items())
        ]
        spec = {"spec": {"devices": {"requests": requests}}}
        await self.user.create(
            RESOURCE_CLAIM_TEMPLATE, {"metadata": {"name": name, "namespace": TEAM}, "spec": spec}
        )

    async def add_check(self, name=CHECK, **spec):
        obj = {"metadata": {"name": name}, "spec": {"controllerName": CONTROLLER_NAME} | spec}
        await self.user.create(ADMISSION_CHECK, obj)

    def start(self, api=None):
        api = api or DirectApi(self.kube, "controller")
        caches = GangCaches(api, self.rng, self.settings, BesideKueue(has_plans=True))
        controller = KueueController(api, loop_wall_time, self.rng, self.settings, caches)
        self.controller = asyncio.create_task(_run_together(controller, caches))

    async def kill(self):
        self.controller.cancel()
        await asyncio.gather(self.controller, return_exceptions=True)

    def run_kueue(self, **given):
        kueue = SimulatedKueue(self, **given)
        self.tasks.append(asyncio.create_task(kueue.run()))
        return kueue

    async def end(self):
        for task in self.tasks:
            assert not task.done() or task.exception() is None, task
            task.cancel()
        if self.controller is not None:
            assert not self.controller.done(), self.controller
            self.controller.cancel()
        await asyncio.gather(*self.tasks, *filter(None, [self.controller]), return_exceptions=True)

    async def submit(self, name, members, gpus=GPUS, *, namespace=TEAM, priority=0, **more):
        """A workload of one pod set, as Kueue makes it of a suspended job."""
        await self.submit_sets(name, [pod_set(members, gpus, **more)], namespace=namespace, priority=priority)

    async def submit_sets(self, name, pod_sets, *, namespace=TEAM, priority=0):
        spec = {"podSets": pod_sets, "queueName": "q", "active": True, "priority": priority}
        await self.user.create(WORKLOAD, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})

    async def occupy(self, tray, name="busy", namespace="other", gpus=GPUS):
        container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
        spec = {"containers": [container], "nodeName": tray}
        await self.user.create(
            POD, {"metadata": {"name": f"{name}-{tray}", "namespace": namespace}, "spec": spec}
        )

    async def free(self, tray, name="busy", namespace="other"):
        await self.user.delete(POD, f"{name}-{tray}", namespace, grace_seconds=0)

    async def workload(self, name, namespace=TEAM):
        return await self.user.get(WORKLOAD, name, namespace)

    async def check(self, name, namespace=TEAM, check=CHECK):
        """The state of the check on a workload; empty where there is none."""
        checks = ((await self.workload(name, namespace)).get("status") or {}).get("admissionChecks") or ()
        return next((entry for entry in checks if entry["name"] == check), {})

    async def is_in(self, name, state, namespace=TEAM):
        return (await self.check(name, namespace)).get("state") == state

    async def is_admitted(self, name, namespace=TEAM):
        return has_condition(await self.workload(name, namespace), "Admitted")

    async def until(self, holds, seconds=200):
        for _ in range(seconds * 2):
            if await holds():
                return
            await asyncio.sleep(0.5)
        found = (await self.user.list(WORKLOAD)).items
        raise AssertionError(f"did not come true; workloads: {[obj.get('status') for obj in found]}")


async def _run_together(controller, caches):
    """The gang controller runs the informers where both are at work."""
    async with asyncio.TaskGroup() as tasks:
        for informer in caches.informers:
            tasks.create_task(informer.run())
        tasks.create_task(controller.run())


def pod_set(
    members,
    gpus=GPUS,
    name="main",
    topology=None,
    template=None,
    selector=None,
    labels=None,
    annotations=None,
):
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    spec = {"containers": [{"name": "c", "resources": resources}]}
    if template is not None:
        spec["resourceClaims"] = [{"name": "devices", "resourceClaimTemplateName": template}]
        spec["containers"][0]["resources"]["claims"] = [{"name": "devices"}]
    if selector is not None:
        spec["nodeSelector"] = selector
    meta = {"labels": labels or {}, "annotations": annotations or {}}
    found = {"name": name, "count": members, "template": {"metadata": meta, "spec": spec}}
    return found if topology is None else found | {"topologyRequest": topology}


class SimulatedKueue:
    """Quota for everything, and what follows from the states of checks. `flavor`: of all pod sets."""

    def __init__(self, site, *, makes_pods=False, flavor=None):
        self.site, self.makes_pods, self.flavor = site, makes_pods, flavor
        self.api = DirectApi(site.kube, "kueue")
        self.messages = {}
        """Messages of checks by workload, in their order."""

    async def run(self):
        while True:
            for obj in (await self.api.list(WORKLOAD)).items:
                with suppress(Conflict, NotFound):
                    await self._reconcile(obj)
            await asyncio.sleep(0.25)

    async def _reconcile(self, obj):
        status, now = obj.get("status") or {}, loop_wall_time()
        checks = {entry["name"]: entry for entry in status.get("admissionChecks") or ()}
        ours = checks.get(CHECK)
        if has_condition(obj, "Finished") or not obj["spec"].get("active", True):
            return
        if not has_condition(obj, "QuotaReserved"):
            if (status.get("requeueState") or {}).get("at", 0) <= now:
                await self._reserve(obj)
            return
        if ours is None:
            return
        reported = self.messages.setdefault(obj["metadata"]["name"], [])
        if ours["state"] != "Pending" and ours["message"] not in reported:
            reported.append(ours["message"])
        if ours["state"] == "Ready" and not has_condition(obj, "Admitted"):
            await self._patch(obj, {}, Admitted="True")
            if self.makes_pods:
                await self._make_pods(obj, ours)
        elif ours["state"] == "Retry":
            since = now + ours.get("requeueAfterSeconds", 0)
            count = ours.get("retryCount", 0) + 1
            reset = {"name": CHECK, "state": "Pending", "message": "", "lastTransitionTime": metav1_time(now)}
            more = {"admission": None, "requeueState": {"at": since}}
            more["admissionChecks"] = [reset | {"retryCount": count}]
            await self._patch(obj, more, QuotaReserved="False", Evicted="True")
        elif ours["state"] == "Rejected":
            await self.api.patch(
                WORKLOAD, obj["metadata"]["name"], obj["metadata"]["namespace"], {"spec": {"active": False}}
            )

    async def _reserve(self, obj):
        assigned = [
            {"name": pod_set["name"], "count": pod_set["count"]}
            | ({"flavors": {"nvidia.com/gpu": self.flavor}} if self.flavor else {})
            for pod_set in obj["spec"]["podSets"]
        ]
        since = metav1_time(loop_wall_time())
        more = {"admission": {"clusterQueue": "all", "podSetAssignments": assigned}}
        present = (obj.get("status") or {}).get("admissionChecks")
        more["admissionChecks"] = present or [
            {"name": CHECK, "state": "Pending", "message": "", "lastTransitionTime": since}
        ]
        await self._patch(obj, more, QuotaReserved="True", Evicted="False")

    async def _patch(self, obj, more, **conditions):
        since = metav1_time(loop_wall_time())
        kept = [
            condition
            for condition in (obj.get("status") or {}).get("conditions") or ()
            if condition["type"] not in conditions
        ]
        changed = [
            {
                "type": type_,
                "status": status,
                "reason": "Simulated",
                "message": "",
                "lastTransitionTime": since,
            }
            for type_, status in conditions.items()
        ]
        meta = {"resourceVersion": obj["metadata"]["resourceVersion"]}
        patch = {"metadata": meta, "status": more | {"conditions": kept + changed}}
        name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
        await self.api.patch(WORKLOAD, name, namespace, patch, subresource="status")

    async def _make_pods(self, obj, check):
        updates = {update["name"]: update for update in check.get("podSetUpdates") or ()}
        for pod_set in obj["spec"]["podSets"]:
            update, template = updates.get(pod_set["name"], {}), pod_set["template"]
            for number in range(pod_set["count"]):
                meta = {
                    "name": f"{obj['metadata']['name']}-{pod_set['name']}-{number}",
                    "namespace": obj["metadata"]["namespace"],
                }
                for key in ("labels", "annotations"):
                    meta[key] = (template["metadata"].get(key) or {}) | (update.get(key) or {})
                spec = dict(template["spec"])
                spec["nodeSelector"] = (spec.get("nodeSelector") or {}) | (update.get("nodeSelector") or {})
                await self.api.create(POD, {"metadata": meta, "spec": spec})


def run(story, seed=1):
    event_loop.run_simulation(seed, story)
