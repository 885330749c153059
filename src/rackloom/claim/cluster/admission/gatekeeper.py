"""Opens the gates of pods: woken by templates and pods, one namespace at a time."""

import asyncio
import random
from contextlib import suppress

import structlog

from rackloom.claim.cluster.admission.gates import Opening, TooEarly, channel_template, steps
from rackloom.claim.cluster.admission.groups import Group
from rackloom.claim.cluster.admission.serving import NAME
from rackloom.claim.cluster.admission.shapes import Pod
from rackloom.claim.cluster.admission.surroundings import Known
from rackloom.claim.cluster.echoes import Echoes
from rackloom.claim.cluster.executor import carry_out
from rackloom.claim.domain.names import GPU_CLIQUE_LABEL
from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Object, Rejected
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import NODE, POD
from rackloom.claim.kube.queue import WorkQueue

log = structlog.get_logger(__name__)

WORKERS = 8
TOO_EARLY = "CreatedBeforeComputeDomain"


class Gatekeeper:
    """Works while its replica leads, and gathers work meanwhile. `rng` draws the jitter of retries."""

    def __init__(self, api: KubeApi, known: Known, recorder: Recorder, rng: random.Random) -> None:
        self._api = api
        self._known = known
        self._recorder = recorder
        self._queue: WorkQueue[str] = WorkQueue(rng)
        self._echoes = Echoes(known, lambda: asyncio.get_running_loop().time())
        known.on_change(self.saw)

    def saw(self, obj: Object) -> None:
        """Look again at the namespace of a template or a pod."""
        self._queue.add(obj["metadata"]["namespace"])

    async def run(self) -> None:
        """Open gates until cancelled, once per term of leading; somebody else keeps `known` up to date."""
        await self._known.synced()
        await self._queue.work(self._do, workers=WORKERS)

    async def _do(self, namespace: str) -> float | None:
        waits = self._echoes.outstanding(namespace)
        if waits is not None:
            return waits
        gated = self._known.gated(namespace)
        templates = {
            name: self._known.template(namespace, name)
            for name in dict.fromkeys(name for pod in gated for name in pod.templates)
        }
        channels = dict.fromkeys(channel_template(pod, templates) for pod in gated)
        groups = {name: await self._group(namespace, name) for name in channels if name is not None}
        refusals = [await self._take(namespace, step) for step in steps(gated, templates, groups)]
        for refusal in refusals:
            if refusal is not None:
                raise refusal
        return None

    async def _take(self, namespace: str, step: Opening | TooEarly) -> KubeError | None:
        """Do it. A pod that may not be changed is told to the caller: it must not hold up the others."""
        if isinstance(step, TooEarly):
            await self._tell(namespace, step)
            return None
        try:
            written = await carry_out(self._api, step.patch(namespace))
        except (Conflict, Rejected) as refusal:
            log.warning("gatekeeper.refused", pod=step.pod.metadata.name, why=refusal.message)
            return refusal
        if written is not None:
            self._echoes.expect(namespace, POD, written)
        return None

    async def _tell(self, namespace: str, step: TooEarly) -> None:
        pod = self._known.at(POD, namespace, step.pod.metadata.name)
        condition = step.condition(TOO_EARLY)
        if pod is None or condition in ((pod.get("status") or {}).get("conditions") or ()):
            return
        await self._recorder.record(pod, "Warning", TOO_EARLY, step.message)
        meta = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        said = {"metadata": meta, "status": {"conditions": [condition]}}
        with suppress(NotFound):
            written = await self._api.apply(POD, said, manager=NAME, force=True, subresource="status")
            self._echoes.expect(namespace, POD, written)

    async def _group(self, namespace: str, template: str) -> Group:
        pods = self._known.group(namespace, template).pods
        return Group(pods, await self._clique(pods))

    async def _clique(self, pods: tuple[Pod, ...]) -> str | None:
        """The clique of the first pod that is in one; a node without the label is in none."""
        for node in dict.fromkeys(pod.spec.node_name for pod in pods):
            if node and (clique := await self._clique_of(node)):
                return clique
        return None

    async def _clique_of(self, node: str) -> str | None:
        try:
            found = await self._api.get(NODE, node)
        except NotFound:
            return None
        return (found["metadata"].get("labels") or {}).get(GPU_CLIQUE_LABEL)
