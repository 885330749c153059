"""The cache of admission: claim templates, ComputeDomains, and pods with channels.

Pods are followed by a label that admission gives them, so a cluster's other pods cost nothing. What the
cache does not have yet is read from the API server. In channel mode a pod that is admitted before its
ComputeDomain is lost, so a pod of a controller waits a moment for the ComputeDomain that the same
manifest may create.
"""

import asyncio
import random
from collections.abc import Iterable

from rackloom.claim.cluster.admission.channel_pods import (
    ClaimTemplateState,
    DomainPods,
    PodContext,
    promised_template,
    template_state,
)
from rackloom.claim.cluster.controller_runtime import CacheSet
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.informer import Informer
from rackloom.core.domains.compute_domain import ComputeDomain, read_compute_domain
from rackloom.core.domains.names import ImexIsolation
from rackloom.core.kubernetes.objects import (
    COMPUTE_DOMAIN,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    Object,
    has_pod_ended,
)
from rackloom.core.kubernetes.pods import (
    CHANNEL_LABEL,
    WATCHED_LABEL,
    PodObject,
    channel_label,
    decode_object,
)
from rackloom.errors import Refused

_BY_TEMPLATE, _BY_CHANNEL, _GATED_IN = "template", "channel", "gated"
TEMPLATE_WAIT_SECONDS = 1.0
"""Seconds that a pod of a controller waits for the ComputeDomain that the same manifest may create."""
_POLL_SECONDS = 0.05


class AdmissionCache(CacheSet):
    """Informers of claim templates, ComputeDomains and pods with channels.

    `default` is the isolation of ComputeDomains without a label, the same as the controller's.
    """

    def __init__(self, api: KubeApi, default: ImexIsolation, rng: random.Random) -> None:
        self._api = api
        self._default = default
        indexers = {_BY_CHANNEL: _channel_keys, _GATED_IN: _gated_namespaces}
        super().__init__(
            {
                RESOURCE_CLAIM_TEMPLATE: (Informer(api, RESOURCE_CLAIM_TEMPLATE, rng=rng),),
                COMPUTE_DOMAIN: (
                    Informer(api, COMPUTE_DOMAIN, indexers={_BY_TEMPLATE: _promised_templates}, rng=rng),
                ),
                POD: (Informer(api, POD, labels=WATCHED_LABEL, indexers=indexers, rng=rng),),
            }
        )

    def template(self, namespace: str, name: str) -> ClaimTemplateState:
        """A template, as far as the cache has it."""
        template = self.at(RESOURCE_CLAIM_TEMPLATE, namespace, name)
        if template is not None:
            return template_state(template)
        domains = self.by(COMPUTE_DOMAIN, _BY_TEMPLATE, f"{namespace}/{name}")
        return _promised_state(domains, name, self._default)

    def group(self, namespace: str, template: str) -> DomainPods:
        """The live pods with channels of a template, without their clique."""
        return DomainPods(self._live_pods(_BY_CHANNEL, f"{namespace}/{channel_label(template)}"))

    def gated(self, namespace: str) -> tuple[PodObject, ...]:
        """The live pods of a namespace that have the gate for claim templates."""
        return self._live_pods(_GATED_IN, namespace)

    def _live_pods(self, index: str, value: str) -> tuple[PodObject, ...]:
        return tuple(
            decode_object(pod, PodObject)
            for pod in self.by(POD, index, value)
            if not has_pod_ended(pod) and not pod["metadata"].get("deletionTimestamp")
        )

    async def context_of(self, namespace: str, pod: PodObject) -> PodContext:
        """The templates and groups of a new pod; what the cache lacks is read. Raises KubeError."""
        templates = {name: await self._read_template(namespace, name) for name in pod.templates}
        if pod.owner is not None and self._default is ImexIsolation.CHANNEL:
            await self._await_unknown(namespace, templates)
        groups = {
            name: self.group(namespace, name)
            for name, template in templates.items()
            if template.channel is not None
        }
        return PodContext(templates, groups)

    async def _await_unknown(self, namespace: str, templates: dict[str, ClaimTemplateState]) -> None:
        """Wait a moment for unknown templates: in channel mode, a pod that is admitted earlier is lost."""
        until = asyncio.get_running_loop().time() + TEMPLATE_WAIT_SECONDS
        unknown = [name for name, template in templates.items() if template == ClaimTemplateState()]
        while (
            any(templates[name] == ClaimTemplateState() for name in unknown)
            and asyncio.get_running_loop().time() < until
        ):
            await asyncio.sleep(_POLL_SECONDS)
            templates |= {name: self.template(namespace, name) for name in unknown}

    async def _read_template(self, namespace: str, name: str) -> ClaimTemplateState:
        cached = self.template(namespace, name)
        if cached.exists or cached.channel is not None:
            return cached
        try:
            return template_state(await self._api.get(RESOURCE_CLAIM_TEMPLATE, name, namespace))
        except NotFound:
            domains = (await self._api.list(COMPUTE_DOMAIN, namespace)).items
            return _promised_state(domains, name, self._default)


def _promised_state(domains: Iterable[Object], template: str, default: ImexIsolation) -> ClaimTemplateState:
    for domain in map(_readable_domain, domains):
        if domain is not None and domain.template == template and not domain.deleting:
            return promised_template(domain, default)
    return ClaimTemplateState()


def _readable_domain(obj: Object) -> ComputeDomain | None:
    try:
        return read_compute_domain(obj)
    except Refused:
        return None


def _promised_templates(obj: Object) -> Iterable[str]:
    domain = _readable_domain(obj)
    return () if domain is None else (f"{domain.namespace}/{domain.template}",)


def _channel_keys(obj: Object) -> Iterable[str]:
    pod, namespace = decode_object(obj, PodObject), obj["metadata"]["namespace"]
    labels = {channel_label(name) for name in pod.templates} | {pod.labels.get(CHANNEL_LABEL, "")}
    return [f"{namespace}/{label}" for label in sorted(labels) if label]


def _gated_namespaces(obj: Object) -> Iterable[str]:
    return () if decode_object(obj, PodObject).gate_index is None else (obj["metadata"]["namespace"],)
