"""Which lists a strategic merge patch merges, and by which key of their elements.

The facts are those of the OpenAPI document of Kubernetes 1.36 (x-kubernetes-patch-strategy `merge` and its
x-kubernetes-patch-merge-key). They differ from what server-side apply merges by: ports go without protocol,
and a node's taints are replaced as a whole. Types that are not named here take no such patch, as custom
resources of a real server do not.
"""

from collections.abc import Mapping

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind

MergeKeys = Mapping[str, str]
"""The key by the path of the list; "" where the elements are plain values, merged as a set."""

_METADATA = {"finalizers": "", "ownerReferences": "uid"}
_CONTAINER = {
    "env": "name",
    "ports": "containerPort",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
}
_POD_SPEC = {
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumes": "name",
}
_CONDITIONS = {"status.conditions": "type"}


def _under(at: str, keys: MergeKeys) -> MergeKeys:
    return {f"{at}.{path}": key for path, key in keys.items()}


def _containers(at: str) -> MergeKeys:
    kept: dict[str, str] = {}
    for which in ("containers", "initContainers", "ephemeralContainers"):
        kept |= {f"{at}.{which}": "name", **_under(f"{at}.{which}", _CONTAINER)}
    return kept


def _pod_spec(at: str) -> MergeKeys:
    return {**_under(at, _POD_SPEC), **_containers(at)}


def _object(*more: MergeKeys) -> MergeKeys:
    keys = dict(_under("metadata", _METADATA))
    for one in more:
        keys |= one
    return keys


_OF_PODS = {"status.hostIPs": "ip", "status.podIPs": "ip", "status.resourceClaimStatuses": "name"}
_TEMPLATE = {**_under("spec.template.metadata", _METADATA), **_pod_spec("spec.template.spec")}
_WEBHOOKS = {"webhooks": "name", "webhooks.matchConditions": "name"}

MERGE_KEYS: Mapping[Kind, MergeKeys] = {
    kinds.POD: _object(_pod_spec("spec"), _CONDITIONS, _OF_PODS),
    kinds.NODE: _object({"spec.podCIDRs": "", "status.addresses": "type"}, _CONDITIONS),
    kinds.NAMESPACE: _object(_CONDITIONS),
    kinds.SECRET: _object(),
    kinds.CONFIG_MAP: _object(),
    kinds.SERVICE: _object({"spec.ports": "port"}, _CONDITIONS),
    kinds.SERVICE_ACCOUNT: _object({"secrets": "name"}),
    kinds.EVENT: _object(),
    kinds.DAEMON_SET: _object(_TEMPLATE, _CONDITIONS),
    kinds.JOB: _object(_TEMPLATE, _CONDITIONS),
    kinds.ENDPOINT_SLICE: _object(),
    kinds.NETWORK_POLICY: _object(),
    kinds.LEASE: _object(),
    kinds.RESOURCE_SLICE: _object(),
    kinds.RESOURCE_CLAIM: _object({"status.reservedFor": "uid"}),
    kinds.RESOURCE_CLAIM_TEMPLATE: _object(_under("spec.metadata", _METADATA)),
    kinds.DEVICE_CLASS: _object(),
    kinds.CRD: _object(),
    kinds.MUTATING_WEBHOOK: _object(_WEBHOOKS),
    kinds.VALIDATING_WEBHOOK: _object(_WEBHOOKS),
}
"""Every built-in type that is served."""
