"""What a claim template means for the pods that refer to it."""

import msgspec

from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import Isolation, isolation_of
from rackloom.claim.domain.objects import AllocationMode, ComputeDomain
from rackloom.claim.kube.api import Object


class Channel(msgspec.Struct, frozen=True):
    """A template for IMEX channels of one ComputeDomain."""

    domain_uid: str
    is_shared: bool = False
    """Whether all pods of the ComputeDomain use one claim (channel mode)."""


class Template(msgspec.Struct, frozen=True):
    """A template by its name in a pod's namespace."""

    exists: bool = False
    channel: Channel | None = None
    """Known before the template is, where its ComputeDomain exists; None also for a template of others."""


def template_of(obj: Object) -> Template:
    """What a ResourceClaimTemplate is; labels and class are those that the controller gave it."""
    labels = obj["metadata"].get("labels") or {}
    uid = labels.get(names.COMPUTE_DOMAIN_LABEL)
    if uid is None or labels.get(names.TARGET_LABEL) != names.TARGET_WORKLOAD:
        return Template(exists=True)
    devices = obj["spec"]["spec"].get("devices", {})
    return Template(True, Channel(uid, _is_isolated(devices) and not _wants_all(devices)))


def _is_isolated(devices: Object) -> bool:
    asked = (one.get("exactly") or {} for one in devices.get("requests") or ())
    return any(one.get("deviceClassName") == names.ISOLATED_CHANNEL_CLASS for one in asked)


def _wants_all(devices: Object) -> bool:
    opaque = (one.get("opaque") or {} for one in devices.get("config") or ())
    return any((one.get("parameters") or {}).get("allocationMode") == AllocationMode.ALL for one in opaque)


def promised_by(domain: ComputeDomain, default: Isolation) -> Template:
    """What the controller will make for a ComputeDomain."""
    isolated = isolation_of(domain.labels, default) is Isolation.CHANNEL
    return Template(False, Channel(domain.uid, isolated and domain.allocation_mode is AllocationMode.SINGLE))
