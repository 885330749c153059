"""The admission webhook: one method for each path that the API server calls.

- Claims and claim templates: opaque device configs are validated strictly, while a person still looks.
  Without that, a wrong config is found when a pod's devices are prepared. An unchanged spec is never
  judged again.
- Pods, validating: a claim that no container uses is reported.
- Pods, mutating: pods of a gang are gated, then the rules of `channel_pods` apply. A pod that could
  never be placed in a gang is denied.

Nothing is changed or refused in our own namespaces and in kube-system. If the API server cannot be
asked, the mutating path denies with 503: the client tries again.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rackloom.claim.cluster.admission.cache import AdmissionCache
from rackloom.claim.cluster.admission.channel_pods import add_gate, mutate_pod, review_claim_uses
from rackloom.claim.cluster.admission.reviews import (
    AdmissionMode,
    AdmissionVerdict,
    ReviewRequest,
    verdict_on,
)
from rackloom.claim.kube.api import KubeError
from rackloom.core.domains import names
from rackloom.core.domains.device_configs import decode_gpu_config, decode_imex_config
from rackloom.core.domains.names import ImexIsolation
from rackloom.core.domains.network_config import decode_network_config
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE, DEFAULT_NAMESPACE
from rackloom.core.gangs import spec
from rackloom.core.gangs.spec import SIZE_EXAMPLE, check_gang_name, gang_group_of, read_gang_spec
from rackloom.core.kubernetes.pods import (
    GANG_LABEL,
    ClaimObject,
    ClaimSpec,
    ClaimTemplateObject,
    NameReference,
    PodObject,
    decode_object,
)
from rackloom.errors import Refused

# Strict validation of opaque device configs.


NETWORK_DRIVER = "dra.net"
_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    names.GPU_DRIVER: decode_gpu_config,
    names.IMEX_DRIVER: decode_imex_config,
    NETWORK_DRIVER: decode_network_config,
}


def review_claim(request: ReviewRequest, mode: AdmissionMode) -> AdmissionVerdict:
    """Review a claim or a template. Raises Refused for a request about anything else."""
    if request.operation not in ("CREATE", "UPDATE") or _is_unchanged_spec(request):
        return AdmissionVerdict()
    spec, path = _claim_spec(request)
    problems = tuple(_config_problems(spec, path))
    return verdict_on(problems, mode, f"{len(problems)} configs failed to validate", "device-config")


def _is_unchanged_spec(request: ReviewRequest) -> bool:
    """Whether an update keeps the spec: an admitted object must be able to lose its finalizers."""
    new, old = request.object, request.old_object
    both = isinstance(new, dict) and isinstance(old, dict)
    return request.operation == "UPDATE" and both and new.get("spec") == old.get("spec")


def _claim_spec(request: ReviewRequest) -> tuple[ClaimSpec, str]:
    match request.resource.resource:
        case "resourceclaims":
            return decode_object(request.object, ClaimObject).spec, "spec"
        case "resourceclaimtemplates":
            return decode_object(request.object, ClaimTemplateObject).spec.spec, "spec.spec"
        case other:
            raise Refused(f"asked about {other!r}, not resourceclaims or resourceclaimtemplates")


def _config_problems(spec: ClaimSpec, path: str) -> Iterator[str]:
    for number, config in enumerate(spec.configs):
        decode = _DECODERS.get(config.opaque.driver) if config.opaque else None
        if decode is None or config.opaque is None:
            continue
        try:
            decode(_as_mapping(config.opaque.parameters))
        except Refused as refused:
            where = f"{path}.devices.config[{number}].opaque.parameters"
            yield f"object at {where} is invalid: {refused}"


def _as_mapping(parameters: object) -> Mapping[str, Any]:
    if not isinstance(parameters, dict):
        raise Refused("it is no object", nearest_fix="give it apiVersion, kind and the fields of that kind")
    return parameters


# Gating of gang pods.


def hold_gang_pod(pod: PodObject) -> tuple[PodObject, AdmissionVerdict]:
    """The pod with the gang's gate, and the verdict; idempotent.

    A pod that could never be placed is denied. A pod without a size belongs to another gang scheduler.
    """
    if not pod.is_of_a_gang or pod.is_bound:
        return pod, AdmissionVerdict()
    if spec.SIZE_ANNOTATION not in pod.annotations:
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
    if any(gate.name == spec.GANG_GATE for gate in gates):
        return pod, AdmissionVerdict()
    gated = msgspec.structs.replace(pod.spec, scheduling_gates=(*gates, NameReference(name=spec.GANG_GATE)))
    verdict = AdmissionVerdict(patch=(add_gate(pod, spec.GANG_GATE),), rules=(("gang", "changed"),))
    return msgspec.structs.replace(pod, spec=gated), verdict


def _check_gang_pod(pod: PodObject) -> None:
    check_gang_name(pod.labels[GANG_LABEL])
    declared, group = read_gang_spec(pod.annotations), gang_group_of(pod.labels)
    if not declared.has(group):
        groups = " or ".join(name for name, _ in declared.sizes)
        raise Refused(
            f"its group is {group!r}, and {spec.SIZE_ANNOTATION} has none of that name",
            nearest_fix=f"set label {spec.GROUP_LABEL} to {groups}",
        )


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
