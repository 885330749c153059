"""Strict validation of the opaque configs in claims and templates, at the time when a person still looks.

Without it a wrong config is found when a pod's devices are prepared, long after `kubectl apply`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rackloom.claim.cluster.admission.modes import Mode, judged
from rackloom.claim.cluster.admission.reviews import Request, Verdict
from rackloom.claim.cluster.admission.shapes import Claim, ClaimSpec, ClaimTemplate, read
from rackloom.claim.domain import names
from rackloom.claim.domain.configs import decode_strict
from rackloom.claim.opaque.gpu import decode_gpu_config
from rackloom.claim.opaque.network_rules import decode_network_config
from rackloom.errors import Refused

NETWORK_DRIVER = "dra.net"
_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    names.GPU_DRIVER: decode_gpu_config,
    names.IMEX_DRIVER: decode_strict,
    NETWORK_DRIVER: decode_network_config,
}


def review_claim(request: Request, mode: Mode) -> Verdict:
    """Judge a claim or a template. Raises Refused for a request about anything else."""
    if request.operation not in ("CREATE", "UPDATE") or _is_old_news(request):
        return Verdict()
    spec, path = _spec(request)
    problems = tuple(_problems(spec, path))
    return judged(problems, mode, f"{len(problems)} configs failed to validate", "device-config")


def _is_old_news(request: Request) -> bool:
    """A spec never changes: an object that was let in must be able to lose its finalizers."""
    new, old = request.object, request.old_object
    both = isinstance(new, dict) and isinstance(old, dict)
    return request.operation == "UPDATE" and both and new.get("spec") == old.get("spec")


def _spec(request: Request) -> tuple[ClaimSpec, str]:
    match request.resource.resource:
        case "resourceclaims":
            return read(request.object, Claim).spec, "spec"
        case "resourceclaimtemplates":
            return read(request.object, ClaimTemplate).spec.spec, "spec.spec"
        case other:
            raise Refused(f"asked about {other!r}, not resourceclaims or resourceclaimtemplates")


def _problems(spec: ClaimSpec, path: str) -> Iterator[str]:
    for number, config in enumerate(spec.configs):
        decode = _DECODERS.get(config.opaque.driver) if config.opaque else None
        if decode is None or config.opaque is None:
            continue
        try:
            decode(_mapping(config.opaque.parameters))
        except Refused as refused:
            where = f"{path}.devices.config[{number}].opaque.parameters"
            yield f"object at {where} is invalid: {refused}"


def _mapping(parameters: object) -> Mapping[str, Any]:
    if not isinstance(parameters, dict):
        raise Refused("it is no object", nearest_fix="give it apiVersion, kind and the fields of that kind")
    return parameters
