"""What admission and the gate controller know of the cluster.

Pods are followed by a label that admission gives them, so that a cluster's other pods cost nothing.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping

from rackloom.claim.cluster.admission.groups import Group
from rackloom.claim.cluster.admission.marks import CHANNEL_LABEL, WATCHED_LABEL, channel_label
from rackloom.claim.cluster.admission.pods import Surroundings
from rackloom.claim.cluster.admission.shapes import Pod, read
from rackloom.claim.cluster.admission.templates import Template, promised_by, template_of
from rackloom.claim.domain.isolation import Isolation
from rackloom.claim.domain.objects import ComputeDomain, compute_domain
from rackloom.claim.kube.api import Kind, KubeApi, NotFound, Object
from rackloom.claim.kube.informer import Informer
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN, POD, RESOURCE_CLAIM_TEMPLATE
from rackloom.errors import Refused

_BY_TEMPLATE, _BY_CHANNEL, _GATED_IN = "template", "channel", "gated"
_ENDED = ("Succeeded", "Failed")
PATIENCE = 1.0
"""Seconds for which a pod of a controller waits for the ComputeDomain that the same file may bring."""
_LOOK = 0.05


class Known:
    """Templates, ComputeDomains and pods with channels, as last seen.

    `default` is the isolation of ComputeDomains without a label, as the controller has it.
    """

    def __init__(self, api: KubeApi, default: Isolation, rng: random.Random) -> None:
        self._api = api
        self._default = default
        self._templates = Informer(api, RESOURCE_CLAIM_TEMPLATE, rng=rng)
        self._domains = Informer(api, COMPUTE_DOMAIN, indexers={_BY_TEMPLATE: _promised}, rng=rng)
        indexers = {_BY_CHANNEL: _channels, _GATED_IN: _gated_in}
        self._pods = Informer(api, POD, labels=WATCHED_LABEL, indexers=indexers, rng=rng)

    @property
    def informers(self) -> tuple[Informer, ...]:
        """All of them, to be run."""
        return (self._templates, self._domains, self._pods)

    @property
    def is_synced(self) -> bool:
        """Whether everything was seen once."""
        return all(one.is_synced for one in self.informers)

    async def synced(self) -> None:
        """Wait for that."""
        for one in self.informers:
            await one.synced()

    def on_change(self, handler: Callable[[Object], None]) -> None:
        """Call `handler` for every template or pod that changes."""
        self._templates.on_change(handler)
        self._pods.on_change(handler)

    def at(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        kinds = {POD: self._pods, RESOURCE_CLAIM_TEMPLATE: self._templates, COMPUTE_DOMAIN: self._domains}
        return kinds[kind].cache.get(name, namespace)

    def template(self, namespace: str, name: str) -> Template:
        """A template, as far as it was seen."""
        found = self._templates.cache.get(name, namespace)
        if found is not None:
            return template_of(found)
        domains = self._domains.cache.find(_BY_TEMPLATE, f"{namespace}/{name}")
        return _promise(domains, name, self._default)

    def group(self, namespace: str, template: str) -> Group:
        """The live pods with channels of a template; where they are is not looked up."""
        found = self._pods.cache.find(_BY_CHANNEL, f"{namespace}/{channel_label(template)}")
        return Group(tuple(read(pod, Pod) for pod in found if _is_live(pod)))

    def gated(self, namespace: str) -> tuple[Pod, ...]:
        """The live pods of a namespace that have our gate."""
        found = self._pods.cache.find(_GATED_IN, namespace)
        return tuple(read(pod, Pod) for pod in found if _is_live(pod))

    async def around(self, namespace: str, pod: Pod) -> Surroundings:
        """What a new pod comes into; what was not seen yet is asked for. Raises KubeError."""
        templates: Mapping[str, Template] = {name: await self._ask(namespace, name) for name in pod.templates}
        if pod.owner is not None and self._default is Isolation.CHANNEL:
            templates = await self._waited_for(namespace, templates)
        groups = {
            name: self.group(namespace, name) for name, one in templates.items() if one.channel is not None
        }
        return Surroundings(templates, groups)

    async def _waited_for(self, namespace: str, asked: Mapping[str, Template]) -> Mapping[str, Template]:
        """What of the unknown turns up in a moment: in channel mode, a pod that is let in earlier is lost."""
        unknown = [name for name, one in asked.items() if one == Template()]
        until = asyncio.get_running_loop().time() + PATIENCE
        found = dict(asked)
        while (
            any(found[name] == Template() for name in unknown) and asyncio.get_running_loop().time() < until
        ):
            await asyncio.sleep(_LOOK)
            found |= {name: self.template(namespace, name) for name in unknown}
        return found

    async def _ask(self, namespace: str, name: str) -> Template:
        seen = self.template(namespace, name)
        if seen.exists or seen.channel is not None:
            return seen
        try:
            return template_of(await self._api.get(RESOURCE_CLAIM_TEMPLATE, name, namespace))
        except NotFound:
            domains = (await self._api.list(COMPUTE_DOMAIN, namespace)).items
            return _promise(domains, name, self._default)


def _promise(domains: Iterable[Object], template: str, default: Isolation) -> Template:
    found = (_readable(obj) for obj in domains)
    wanted = (one for one in found if one and one.template == template and not one.deleting)
    return next((promised_by(one, default) for one in wanted), Template())


def _readable(obj: Object) -> ComputeDomain | None:
    try:
        return compute_domain(obj)
    except Refused:
        return None


def _promised(obj: Object) -> Iterable[str]:
    domain = _readable(obj)
    return () if domain is None else (f"{domain.namespace}/{domain.template}",)


def _channels(obj: Object) -> Iterable[str]:
    pod, namespace = read(obj, Pod), obj["metadata"]["namespace"]
    labels = {channel_label(name) for name in pod.templates} | {pod.labels.get(CHANNEL_LABEL, "")}
    return [f"{namespace}/{label}" for label in sorted(labels) if label]


def _gated_in(obj: Object) -> Iterable[str]:
    return () if read(obj, Pod).gate_index is None else (obj["metadata"]["namespace"],)


def _is_live(pod: Object) -> bool:
    ended = (pod.get("status") or {}).get("phase") in _ENDED
    return not ended and not pod["metadata"].get("deletionTimestamp")
