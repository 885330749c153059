"""The gate controller: when and where a pod may be scheduled that came before its claim template.

Affinity to other pods cannot be added to a gated pod. Only its node affinity can be narrowed
(Kubernetes, "Pod Scheduling Readiness"). So if the template turns out to be one for channels, this
controller has the effect of the affinity rule: one pod goes first, into any clique, and the
others follow into that clique.

It works per namespace, while its replica is the leader. Its writes test the pod's UID and gates. A pod
that can never get its channel (it was created before the ComputeDomain, whose pods share one claim)
gets a condition and an event.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec
import structlog

from rackloom.claim.cluster.admission.channel_pods import (
    ClaimTemplateState,
    DomainPods,
    add_labels,
    has_clique_rule,
    require_clique,
)
from rackloom.claim.cluster.admission.serving_certificate import WEBHOOK_NAME
from rackloom.claim.cluster.admission.webhook import AdmissionCache
from rackloom.claim.cluster.controller_runtime import ControllerRuntime
from rackloom.claim.kube.api import Conflict, EventRecorder, KubeApi, KubeError, NotFound, Rejected
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.nodes import node_clique
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    NODE,
    POD,
    EventNotice,
    Object,
    PatchObject,
    PatchOperation,
    ResourceKind,
    condition_of,
    identity_of,
    labels_of,
    namespace_of,
)
from rackloom.core.cluster.pods import (
    CHANNEL_CONDITION,
    CHANNEL_LABEL,
    TEMPLATE_GATE,
    PodObject,
    channel_label,
)

# The rules.


class GateOpening(msgspec.Struct, frozen=True):
    """Remove the gate from a pod, together with these changes."""

    pod: PodObject
    changes: tuple[PatchOperation, ...] = ()

    def patch(self, namespace: str) -> PatchObject:
        """One write, which fails if the pod was replaced or its gates have changed."""
        index = self.pod.gate_index
        gate = f"/spec/schedulingGates/{index}"
        meta = self.pod.metadata
        operations: tuple[PatchOperation, ...] = (
            {"op": "test", "path": "/metadata/uid", "value": meta.uid},
            {"op": "test", "path": gate, "value": {"name": TEMPLATE_GATE}},
            {"op": "remove", "path": gate},
            *self.changes,
        )
        return PatchObject(kind=POD, namespace=namespace, name=meta.name, patch=operations)


class CreatedTooEarly(msgspec.Struct, frozen=True):
    """A pod that can never start: it names a template, and its ComputeDomain shares one claim."""

    pod: PodObject
    template: str

    @property
    def message(self) -> str:
        """The message for its owner."""
        return (
            f"the pod was created before the ComputeDomain of template {self.template!r}, whose pods share "
            "one claim (channel mode), and a pod's claims are fixed: delete the pod and create it again"
        )


GateStep = GateOpening | CreatedTooEarly


def channel_template(pod: PodObject, templates: Mapping[str, ClaimTemplateState]) -> str | None:
    """The template by which a pod claims a channel."""
    named = (name for name in pod.templates if name in templates and templates[name].channel is not None)
    return next(named, None)


def gate_steps(
    gated: tuple[PodObject, ...],
    templates: Mapping[str, ClaimTemplateState],
    groups: Mapping[str, DomainPods],
) -> tuple[GateStep, ...]:
    """The steps for the gated pods of one namespace. `groups` are its pods with channels, by template."""
    steps: list[GateStep] = []
    members: dict[str, list[PodObject]] = {}
    for pod in gated:
        if not all(templates[name].exists for name in pod.templates):
            continue
        name = channel_template(pod, templates)
        channel = templates[name].channel if name is not None else None
        if name is None or channel is None or pod.is_of_a_gang:
            steps.append(GateOpening(pod, _channel_labels(pod, name)))
        elif channel.is_shared:
            steps.append(CreatedTooEarly(pod, name))
        else:
            members.setdefault(name, []).append(pod)
    for name, group in groups.items():
        steps += _openings_for(members.get(name, []), name, group)
    return tuple(steps)


def _openings_for(gated: list[PodObject], template: str, group: DomainPods) -> Iterator[GateOpening]:
    """Open gates so that all pods of a ComputeDomain come into one clique.

    Until a clique is known, at most one pod without a clique rule is being scheduled. It decides the clique.
    """
    led = [pod for pod in gated if has_clique_rule(pod.spec)]
    free = [pod for pod in gated if not has_clique_rule(pod.spec)]
    if group.clique is not None:
        yield from (GateOpening(pod, _channel_labels(pod, template)) for pod in led)
        for pod in free:
            changes = (*_channel_labels(pod, template), *require_clique(pod.spec, group.clique))
            yield GateOpening(pod, changes)
        return
    under_way = [pod for pod in group.waiting if pod.gate_index is None]
    if any(not has_clique_rule(pod.spec) for pod in under_way):
        # The first pod is being scheduled, and the others follow it.
        return
    if led or under_way:
        yield from (GateOpening(pod, _channel_labels(pod, template)) for pod in led)
    elif free:
        first = min(free, key=lambda pod: (pod.metadata.creation_timestamp or "", pod.metadata.name))
        yield GateOpening(first, (*_channel_labels(first, template), *require_clique(first.spec, None)))


def _channel_labels(pod: PodObject, template: str | None) -> tuple[PatchOperation, ...]:
    return () if template is None else add_labels(pod, {CHANNEL_LABEL: channel_label(template)})


# The controller.


log = structlog.get_logger(__name__)

GATE_WORKERS = 8
TOO_EARLY_REASON = "CreatedBeforeComputeDomain"


class GateController:
    """Works while its replica leads, and queues work at other times. `rng` draws the jitter of retries."""

    def __init__(
        self, api: KubeApi, cache: AdmissionCache, recorder: EventRecorder, rng: random.Random
    ) -> None:
        self._api = api
        self._cache = cache
        self._recorder = recorder
        self._runtime: ControllerRuntime[str] = ControllerRuntime("gates", api, cache, rng, self._reconcile)
        cache.on_change(self.changed)

    def changed(self, kind: ResourceKind, obj: Object) -> None:
        """Queue the namespace of a template or a pod that changed."""
        # A ComputeDomain opens no gate: pods wait for its template, which follows.
        if kind != COMPUTE_DOMAIN:
            self._runtime.queue.add(namespace_of(obj) or "")

    async def run(self) -> None:
        """Open gates until cancelled, for one term as leader. The caller runs the informers of the cache."""
        await self._runtime.reconcile_keys(GATE_WORKERS)

    async def _reconcile(self, namespace: str) -> float | None:
        gated = self._cache.gated(namespace)
        templates = {
            name: self._cache.template(namespace, name)
            for name in dict.fromkeys(name for pod in gated for name in pod.templates)
        }
        channels = dict.fromkeys(channel_template(pod, templates) for pod in gated)
        groups = {name: await self._group(namespace, name) for name in channels if name is not None}
        refusals = [await self._execute(namespace, step) for step in gate_steps(gated, templates, groups)]
        for refusal in refusals:
            if refusal is not None:
                raise refusal
        return None

    async def _execute(self, namespace: str, step: GateStep) -> KubeError | None:
        """Execute a step. Returns the error of a pod that cannot be changed: it must not delay others."""
        if isinstance(step, CreatedTooEarly):
            await self._report_too_early(namespace, step)
            return None
        try:
            await self._runtime.execute(namespace, [step.patch(namespace)])
        except (Conflict, Rejected) as refusal:
            log.warning("gatekeeper.refused", pod=step.pod.metadata.name, why=refusal.message)
            return refusal
        return None

    async def _report_too_early(self, namespace: str, step: CreatedTooEarly) -> None:
        pod = self._cache.at(POD, namespace, step.pod.metadata.name)
        known = None if pod is None else condition_of(pod, CHANNEL_CONDITION)
        if pod is None or (known is not None and known.message == step.message):
            return
        await self._recorder.record(pod, EventNotice(True, TOO_EARLY_REASON, step.message))
        condition = {
            "type": CHANNEL_CONDITION,
            "status": "False",
            "reason": TOO_EARLY_REASON,
            "message": step.message,
        }
        meta = identity_of(pod, "name", "namespace", "uid")
        status = {"metadata": meta, "status": {"conditions": [condition]}}
        with suppress(NotFound):
            written = await self._api.apply(
                POD, status, manager=WEBHOOK_NAME, force=True, subresource="status"
            )
            self._runtime.expect(namespace, POD, written)

    async def _group(self, namespace: str, template: str) -> DomainPods:
        pods = self._cache.group(namespace, template).pods
        # Their clique is that of the first pod that is in one: a node without a clique is in none.
        for node in dict.fromkeys(pod.node for pod in pods if pod.is_bound):
            with suppress(NotFound):
                labels = labels_of(await self._api.get(NODE, node))
                if clique := node_clique(labels, GPU_CLIQUE_LABEL):
                    return DomainPods(pods, clique)
        return DomainPods(pods)
