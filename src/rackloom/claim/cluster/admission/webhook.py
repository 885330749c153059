"""The admission webhook: one method for each path that the API server calls.

- Claims and claim templates: opaque device configs are validated strictly, while a person still looks.
  Without that, a wrong config is found when a pod's devices are prepared. An unchanged spec is never
  judged again.
- Pods, validating: a claim that no container uses is reported.
- Pods, mutating: pods of a gang are gated, then the rules of `channel_pods` apply. A pod that could
  never be placed in a gang is denied.

The cache follows pods by a label that admission gives them, so a cluster's other pods cost nothing. Objects
that it lacks are read from the API server. In channel mode a pod that is admitted before its
ComputeDomain is lost, so a pod of a controller waits a moment for the ComputeDomain that the same manifest
may create.

Nothing is changed or refused in our own namespaces and in kube-system. If the API server does not answer,
the mutating path denies with 503: the client tries again.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import structlog

from rackloom.claim.cluster.admission.channel_pods import (
    ClaimTemplateState,
    DomainPods,
    PodContext,
    mutate_pod,
    promised_template,
    review_claim_uses,
    template_state,
)
from rackloom.claim.cluster.admission.reviews import (
    AdmissionMode,
    AdmissionVerdict,
    ReviewRequest,
    verdict_on,
)
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.claim.kube.informer import CacheSet, Informer
from rackloom.core.cluster import names
from rackloom.core.cluster.device_configs import decode_gpu_config, decode_imex_config
from rackloom.core.cluster.domain_objects import readable_compute_domains
from rackloom.core.cluster.gang_objects import (
    GANG_GATE,
    GROUP_LABEL,
    SIZE_EXAMPLE,
    check_gang_name,
    gang_group_of,
    read_gang_spec,
)
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    Object,
    full_name,
    has_pod_ended,
    has_same_spec,
    is_being_deleted,
    labels_of,
    namespace_of,
)
from rackloom.core.cluster.pods import (
    CHANNEL_LABEL,
    GANG_LABEL,
    SIZE_ANNOTATION,
    TEMPLATE_GATE,
    WATCHED_LABEL,
    ClaimObject,
    ClaimTemplateObject,
    NameReference,
    PodObject,
    add_gate,
    channel_label,
    claim_templates,
    decode_object,
    gates_of,
)
from rackloom.core.domains.network_config import decode_network_config
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE, DEFAULT_NAMESPACE
from rackloom.errors import Refused

log = structlog.get_logger(__name__)

# Strict validation of opaque device configs.


NETWORK_DRIVER = "dra.net"
_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    names.GPU_DRIVER: decode_gpu_config,
    names.IMEX_DRIVER: decode_imex_config,
    NETWORK_DRIVER: decode_network_config,
}


def review_claim(request: ReviewRequest, mode: AdmissionMode) -> AdmissionVerdict:
    """Review a claim or a template. Raises Refused for a request about anything else."""
    new, old = request.object, request.old_object
    is_update = request.operation == "UPDATE" and isinstance(new, dict) and isinstance(old, dict)
    # An update that keeps the spec passes: an admitted object must be able to lose its finalizers.
    if request.operation not in ("CREATE", "UPDATE") or (is_update and has_same_spec(new, old)):
        return AdmissionVerdict()
    match request.resource.resource:
        case "resourceclaims":
            spec, path = decode_object(new, ClaimObject).spec, "spec"
        case "resourceclaimtemplates":
            spec, path = decode_object(new, ClaimTemplateObject).spec.spec, "spec.spec"
        case other:
            raise Refused(f"asked about {other!r}, not resourceclaims or resourceclaimtemplates")
    problems = []
    for number, config in enumerate(spec.configs):
        if config.opaque is None or (decode := _DECODERS.get(config.opaque.driver)) is None:
            continue
        at, parameters = f"{path}.devices.config[{number}].opaque.parameters", config.opaque.parameters
        try:
            if not isinstance(parameters, dict):
                fix = "give it apiVersion, kind and the fields of that kind"
                raise Refused("it is no object", nearest_fix=fix)
            decode(parameters)
        except Refused as refused:
            problems.append(f"object at {at} is invalid: {refused}")
    return verdict_on(tuple(problems), mode, f"{len(problems)} configs failed to validate", "device-config")


# Gating of gang pods.


def hold_gang_pod(pod: PodObject) -> tuple[PodObject, AdmissionVerdict]:
    """The pod with the gang's gate, and the verdict. Idempotent.

    A pod that could never be placed is denied. A pod without a size belongs to another gang scheduler.
    """
    if not pod.is_of_a_gang or pod.is_bound:
        return pod, AdmissionVerdict()
    if SIZE_ANNOTATION not in pod.annotations:
        return pod, AdmissionVerdict(
            warnings=(f"the pod's gang has no size, so nobody waits for it: {SIZE_EXAMPLE}",),
            rules=(("gang", "warned"),),
        )
    try:
        _check_gang_pod(pod)
    except Refused as refused:
        return pod, AdmissionVerdict(
            allowed=False, message=f"the pod can be in no gang: {refused}", rules=(("gang", "denied"),)
        )
    gates = pod.spec.scheduling_gates or ()
    if any(gate.name == GANG_GATE for gate in gates):
        return pod, AdmissionVerdict()
    gated = msgspec.structs.replace(pod.spec, scheduling_gates=(*gates, NameReference(name=GANG_GATE)))
    verdict = AdmissionVerdict(patch=(add_gate(pod, GANG_GATE),), rules=(("gang", "changed"),))
    return msgspec.structs.replace(pod, spec=gated), verdict


def _check_gang_pod(pod: PodObject) -> None:
    check_gang_name(pod.labels[GANG_LABEL])
    declared, group = read_gang_spec(pod.annotations), gang_group_of(pod.labels)
    if group not in dict(declared.sizes):
        groups = " or ".join(name for name, _ in declared.sizes)
        raise Refused(
            f"its group is {group!r}, and {SIZE_ANNOTATION} has none of that name",
            nearest_fix=f"set label {GROUP_LABEL} to {groups}",
        )


# The cache.


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
        live = []
        for pod in self.by(POD, index, value):
            if has_pod_ended(pod) or is_being_deleted(pod):
                continue
            try:
                live.append(decode_object(pod, PodObject))
            except Refused as refused:
                log.warning("webhook.unreadable", pod=full_name(pod), why=refused.reason)
        return tuple(live)

    async def context_of(self, namespace: str, pod: PodObject) -> PodContext:
        """The templates and groups of a new pod, also those that the cache lacks. Raises KubeError."""
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
    for domain in readable_compute_domains(domains):
        if domain.template == template and not domain.deleting:
            return promised_template(domain, default)
    return ClaimTemplateState()


def _promised_templates(obj: Object) -> Iterable[str]:
    return [f"{domain.namespace}/{domain.template}" for domain in readable_compute_domains((obj,))]


def _channel_keys(obj: Object) -> Iterable[str]:
    labels = {*map(channel_label, claim_templates(obj).values()), labels_of(obj).get(CHANNEL_LABEL, "")}
    return [f"{namespace_of(obj)}/{label}" for label in sorted(labels) if label]


def _gated_namespaces(obj: Object) -> Iterable[str]:
    return (namespace_of(obj) or "",) if TEMPLATE_GATE in gates_of(obj) else ()


# The paths.


_SYSTEM_NAMESPACE = "kube-system"


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator chooses for admission."""

    namespace: str = DEFAULT_NAMESPACE
    """Namespace of our programs and of the certificate."""
    daemon_namespace: str = DEFAULT_DAEMON_NAMESPACE
    """Namespace of IMEX daemons. Nothing in these two namespaces or kube-system is reviewed."""
    mode: AdmissionMode = AdmissionMode.WARN
    isolation: ImexIsolation = ImexIsolation.DOMAIN
    """Of ComputeDomains without the isolation label; the same as the controller's setting."""


class AdmissionReviewer:
    """One method per path. All raise Refused for a request that the API server would not send there."""

    def __init__(self, cache: AdmissionCache, settings: AdmissionSettings) -> None:
        self._cache = cache
        self._settings = settings

    async def validate_claims(self, request: ReviewRequest) -> AdmissionVerdict:
        """Review the opaque configs of a claim or a template."""
        return (
            review_claim(request, self._settings.mode) if self._is_in_scope(request) else AdmissionVerdict()
        )

    async def validate_pods(self, request: ReviewRequest) -> AdmissionVerdict:
        """Review whether a new pod uses what it claims."""
        pod = self._new_pod(request)
        return AdmissionVerdict() if pod is None else review_claim_uses(pod, self._settings.mode)

    async def mutate_pods(self, request: ReviewRequest) -> AdmissionVerdict:
        """Gate a new pod of a gang, and fit the claims of a pod to those of its ComputeDomain."""
        pod = self._new_pod(request)
        if pod is None:
            return AdmissionVerdict()
        pod, held = hold_gang_pod(pod)
        if not held.allowed or not pod.templates:
            return held
        try:
            return held.and_then(mutate_pod(pod, await self._cache.context_of(request.namespace, pod)))
        except KubeError as error:
            why = f"whether the pod claims an IMEX channel could not be found out: {error.message}; try again"
            return AdmissionVerdict(allowed=False, code=503, message=why)

    def _new_pod(self, request: ReviewRequest) -> PodObject | None:
        if request.resource.resource != "pods":
            raise Refused(f"asked about {request.resource.resource!r}, not pods")
        if request.operation != "CREATE" or not self._is_in_scope(request):
            return None
        return decode_object(request.object, PodObject)

    def _is_in_scope(self, request: ReviewRequest) -> bool:
        return request.namespace not in (
            _SYSTEM_NAMESPACE,
            self._settings.namespace,
            self._settings.daemon_namespace,
        )
