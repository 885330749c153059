"""The cache of admission: claim templates, ComputeDomains, and pods with channels.

Pods are followed by a label that admission gives them, so a cluster's other pods cost nothing. What the
cache has not seen yet is asked of the API server. In channel mode a pod that is admitted before its
ComputeDomain is lost, so a pod of a controller waits a moment for the ComputeDomain that the same
manifest may create.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping

from rackloom.claim.cluster.admission.channel_pods import (
    ClaimTemplateState,
    DomainPods,
    PodContext,
    promised_template,
    template_state,
)
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.informer import Informer
from rackloom.core.domains.compute_domain import ComputeDomain, read_compute_domain
from rackloom.core.domains.names import ImexIsolation
from rackloom.core.kubernetes.objects import (
    COMPUTE_DOMAIN,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    Object,
    ResourceKind,
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
_ENDED = ("Succeeded", "Failed")
TEMPLATE_WAIT_SECONDS = 1.0
"""Seconds for which a pod of a controller waits for the ComputeDomain that the same file may bring."""
_POLL_SECONDS = 0.05


class AdmissionCache:
    """Templates, ComputeDomains and pods with channels, as last seen.

    `default` is the isolation of ComputeDomains without a label, as the controller has it.
    """

    def __init__(self, api: KubeApi, default: ImexIsolation, rng: random.Random) -> None:
        self._api = api
        self._default = default
        self._templates = Informer(api, RESOURCE_CLAIM_TEMPLATE, rng=rng)
        self._domains = Informer(api, COMPUTE_DOMAIN, indexers={_BY_TEMPLATE: _promised_templates}, rng=rng)
        indexers = {_BY_CHANNEL: _channel_keys, _GATED_IN: _gated_namespaces}
        self._pods = Informer(api, POD, labels=WATCHED_LABEL, indexers=indexers, rng=rng)

    @property
    def informers(self) -> tuple[Informer, ...]:
        """All of them, to be run."""
        return (self._templates, self._domains, self._pods)

    @property
    def is_synced(self) -> bool:
        """Whether everything was seen once."""
        return all(informer.is_synced for informer in self.informers)

    async def synced(self) -> None:
        """Wait for that."""
        for informer in self.informers:
            await informer.synced()

    def on_change(self, handler: Callable[[Object], None]) -> None:
        """Call `handler` for every template or pod that changes."""
        self._templates.on_change(handler)
        self._pods.on_change(handler)

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        kinds = {POD: self._pods, RESOURCE_CLAIM_TEMPLATE: self._templates, COMPUTE_DOMAIN: self._domains}
        return kinds[kind].cache.get(name, namespace)

    def template(self, namespace: str, name: str) -> ClaimTemplateState:
        """A template, as far as it was seen."""
        found = self._templates.cache.get(name, namespace)
        if found is not None:
            return template_state(found)
        domains = self._domains.cache.find(_BY_TEMPLATE, f"{namespace}/{name}")
        return _promised_state(domains, name, self._default)

    def group(self, namespace: str, template: str) -> DomainPods:
        """The live pods with channels of a template; where they are is not looked up."""
        found = self._pods.cache.find(_BY_CHANNEL, f"{namespace}/{channel_label(template)}")
        return DomainPods(tuple(decode_object(pod, PodObject) for pod in found if _is_live_pod(pod)))

    def gated(self, namespace: str) -> tuple[PodObject, ...]:
        """The live pods of a namespace that have our gate."""
        found = self._pods.cache.find(_GATED_IN, namespace)
        return tuple(decode_object(pod, PodObject) for pod in found if _is_live_pod(pod))

    async def around(self, namespace: str, pod: PodObject) -> PodContext:
        """What a new pod comes into; what was not seen yet is asked for. Raises KubeError."""
        templates: Mapping[str, ClaimTemplateState] = {
            name: await self._ask(namespace, name) for name in pod.templates
        }
        if pod.owner is not None and self._default is ImexIsolation.CHANNEL:
            templates = await self._waited_for(namespace, templates)
        groups = {
            name: self.group(namespace, name)
            for name, template in templates.items()
            if template.channel is not None
        }
        return PodContext(templates, groups)

    async def _waited_for(
        self, namespace: str, asked: Mapping[str, ClaimTemplateState]
    ) -> Mapping[str, ClaimTemplateState]:
        """What of the unknown turns up in a moment: in channel mode, a pod that is let in earlier is lost."""
        unknown = [name for name, one in asked.items() if one == ClaimTemplateState()]
        until = asyncio.get_running_loop().time() + TEMPLATE_WAIT_SECONDS
        found = dict(asked)
        while (
            any(found[name] == ClaimTemplateState() for name in unknown)
            and asyncio.get_running_loop().time() < until
        ):
            await asyncio.sleep(_POLL_SECONDS)
            found |= {name: self.template(namespace, name) for name in unknown}
        return found

    async def _ask(self, namespace: str, name: str) -> ClaimTemplateState:
        seen = self.template(namespace, name)
        if seen.exists or seen.channel is not None:
            return seen
        try:
            return template_state(await self._api.get(RESOURCE_CLAIM_TEMPLATE, name, namespace))
        except NotFound:
            domains = (await self._api.list(COMPUTE_DOMAIN, namespace)).items
            return _promised_state(domains, name, self._default)


def _promised_state(domains: Iterable[Object], template: str, default: ImexIsolation) -> ClaimTemplateState:
    found = (_readable_domain(obj) for obj in domains)
    wanted = (one for one in found if one and one.template == template and not one.deleting)
    return next((promised_template(one, default) for one in wanted), ClaimTemplateState())


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


def _is_live_pod(pod: Object) -> bool:
    ended = (pod.get("status") or {}).get("phase") in _ENDED
    return not ended and not pod["metadata"].get("deletionTimestamp")
