"""A fake cluster of cliques under virtual time: admission, a scheduler, and the controller of our gate."""

import asyncio
import random
from contextlib import asynccontextmanager, suppress

from rackloom.claim.cluster.admission.gates import GateController
from rackloom.claim.cluster.admission.reviews import ReviewedResource, ReviewRequest
from rackloom.claim.cluster.admission.webhook import AdmissionCache, AdmissionReviewer, AdmissionSettings
from rackloom.claim.kube.api import EventRecorder
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import read_compute_domain
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    NODE,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.core.cluster.pods import TEMPLATE_GATE
from rackloom.core.domains.manifests import workload_template
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings
from rackloom.lab.kube.controllers.claims import ResourceClaimController
from rackloom.lab.kube.controllers.scheduler import SimulatedScheduler
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.patches import json_patch
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual.event_loop import loop_wall_time

SETTINGS = ControllerSettings(daemon=ImexDaemonSettings(image="i"))


def pod(name, *, gated=True, template="imex", labels=None, **spec):
    gates = [{"name": "other"}, {"name": TEMPLATE_GATE}] if gated else []
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": labels or {}}
    claims = [{"name": "channel", "resourceClaimTemplateName": template}]
    container = {"name": "main", "resources": {"claims": [{"name": "channel"}]}}
    return {
        "metadata": meta,
        "spec": {"containers": [container], "schedulingGates": gates, "resourceClaims": claims, **spec},
    }


class Site:
    """A fake cluster of two cliques with admission, its scheduler, and the gate controller."""

    def __init__(self, nodes, *, isolation=ImexIsolation.DOMAIN):
        self.kube = FakeKube(namespaces=("team", "kube-system", "rackloom-system"), seed=1)
        self.kube.faults.delay(0.005)
        self.user = DirectApi(self.kube, "user")
        api = DirectApi(self.kube, "webhook")
        rng = random.Random(1)
        self.known = AdmissionCache(api, isolation, rng)
        self.reviewer = AdmissionReviewer(self.known, AdmissionSettings(isolation=isolation))
        self.keeper = GateController(api, self.known, EventRecorder(api, "webhook", "w", loop_wall_time), rng)
        self.kube.admission.append(self.admit)
        self.nodes = nodes

    async def admit(self, review):
        if review.kind != POD or review.operation != "CREATE":
            return None
        namespace = review.object["metadata"]["namespace"]
        resource = ReviewedResource("", "v1", "pods")
        asked = ReviewRequest(
            uid="u", operation="CREATE", resource=resource, namespace=namespace, object=review.object
        )
        return json_patch(review.object, (await self.reviewer.mutate_pods(asked)).patch)

    async def begin(self):
        selector = {"cel": {"expression": f"device.driver == '{names.IMEX_DRIVER}'"}}
        await self.user.create(
            DEVICE_CLASS, {"metadata": {"name": names.CHANNEL_CLASS}, "spec": {"selectors": [selector]}}
        )
        for number in range(self.nodes):
            node = f"n{number}"
            labels = {names.GPU_CLIQUE_LABEL: f"u.{number % 2}"}
            room = {"allocatable": {"pods": "110"}}
            await self.user.create(NODE, {"metadata": {"name": node, "labels": labels}, "status": room})
            spec = {
                "driver": names.IMEX_DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "channel-0"}],
            }
            await self.user.create(RESOURCE_SLICE, {"metadata": {"name": node}, "spec": spec})

    async def create_pods(self, *pod_names, owner=None):
        for name in pod_names:
            obj = pod(name, gated=False)
            if owner:
                reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner, "uid": f"uid-{owner}"}
                obj["metadata"]["ownerReferences"] = [{**reference, "controller": True}]
            obj["spec"] = {key: value for key, value in obj["spec"].items() if key != "schedulingGates"}
            del obj["metadata"]["uid"]
            await self.user.create(POD, obj)

    async def die_often(self, rng):
        """One gatekeeper after the other. Each lives for milliseconds and knows nothing of the last."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.0, 0.03)):
                    await self.new_keeper().run()

    def new_keeper(self):
        api = DirectApi(self.kube, "webhook")
        keeper = GateController(
            api, self.known, EventRecorder(api, "webhook", "w", loop_wall_time), random.Random(1)
        )
        for pod in self.known.gated("team"):
            keeper.changed(POD, self.known.at(POD, "team", pod.metadata.name))
        return keeper

    async def create_domain(self, labels=None):
        spec = {"channel": {"resourceClaimTemplate": {"name": "imex"}}}
        meta = {"name": "cd", "namespace": "team", "labels": labels or {}}
        made = await self.user.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})
        return read_compute_domain(made)

    async def create_template(self, domain):
        await self.user.create(RESOURCE_CLAIM_TEMPLATE, workload_template(domain, SETTINGS))

    async def pods(self):
        return (await self.user.list(POD, "team")).items

    async def cliques(self):
        labels = {
            item["metadata"]["name"]: item["metadata"]["labels"]
            for item in (await self.user.list(NODE)).items
        }
        bound = [pod["spec"]["nodeName"] for pod in await self.pods() if pod["spec"].get("nodeName")]
        return [labels[node][names.GPU_CLIQUE_LABEL] for node in bound]


@asynccontextmanager
async def site(nodes, *, alive=True, **how):
    found = Site(nodes, **how)
    runs = [informer.run() for informer in found.known.informers]
    runs += [
        ResourceClaimController(found.kube, random.Random(2)).run(),
        SimulatedScheduler(found.kube, random.Random(3)).run(),
    ]
    if alive:
        runs.append(found.keeper.run())
    tasks = [asyncio.create_task(run) for run in runs]
    await found.known.synced()
    await found.begin()
    try:
        yield found
    finally:
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
