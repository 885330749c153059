"""What an API server knows of a type beyond its JSON: subresources, generations, and how its lists merge.

`lists` names, by path, the lists that server-side apply merges: by the keys given, or as a set where there
are none. Every list that is not named is atomic: one manager owns it as a whole. The same markers stand in
the OpenAPI documents of Kubernetes 1.36 (x-kubernetes-list-type, -list-map-keys, -map-type) and in our CRDs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind

Lists = dict[str, tuple[str, ...]]

_METADATA: Lists = {"metadata.ownerReferences": ("uid",), "metadata.finalizers": ()}
_CONDITIONS: Lists = {"status.conditions": ("type",)}

_OF_PODS = frozenset(
    {
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.podIPs",
        "status.nominatedNodeName",
    }
)
_ABOUT = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_OF_EVENTS = frozenset(
    {"reason", "reportingComponent", "source", "type", *(f"involvedObject.{one}" for one in _ABOUT)}
)


def _pod_spec(at: str) -> Lists:
    containers: Lists = {
        f"{at}.{which}{path}": keys
        for which in ("containers", "initContainers")
        for path, keys in (
            ("", ("name",)),
            (".env", ("name",)),
            (".ports", ("containerPort", "protocol")),
            (".volumeMounts", ("mountPath",)),
            (".resources.claims", ("name",)),
        )
    }
    own: Lists = {"volumes": ("name",), "resourceClaims": ("name",), "schedulingGates": ("name",)}
    return containers | {f"{at}.{name}": keys for name, keys in own.items()}


@dataclass(frozen=True, slots=True)
class Shape:
    """One type. `generation`: counted up when more than metadata and status change.

    `status`: a subresource, which a write of the object leaves as it was. `blind_writes`: a replace without
    resourceVersion is taken. `lists` and `atoms`: merging lists, and maps that are owned as a whole.
    `selectable`: what field selectors may name beside the name and the namespace.
    """

    status: bool = False
    generation: bool = False
    blind_writes: bool = False
    status_on_create: bool = False
    lists: Lists = field(default_factory=dict)
    atoms: frozenset[str] = frozenset()
    selectable: frozenset[str] = frozenset()

    def merging(self, path: str) -> tuple[str, ...] | None:
        """The keys that a list merges by, () for a set, None for an atomic list."""
        return self.lists.get(path, _METADATA.get(path))


SHAPES: Mapping[Kind, Shape] = {
    kinds.POD: Shape(
        status=True,
        generation=True,
        blind_writes=True,
        lists=_pod_spec("spec")
        | _CONDITIONS
        | {"status.resourceClaimStatuses": ("name",), "status.podIPs": ("ip",)},
        atoms=frozenset({"spec.nodeSelector"}),
        selectable=_OF_PODS,
    ),
    kinds.NODE: Shape(
        status=True,
        blind_writes=True,
        status_on_create=True,
        lists=_CONDITIONS | {"status.addresses": ("type",)},
        selectable=frozenset({"spec.unschedulable"}),
    ),
    kinds.NAMESPACE: Shape(
        status=True, blind_writes=True, lists=_CONDITIONS, selectable=frozenset({"status.phase"})
    ),
    kinds.SECRET: Shape(blind_writes=True, selectable=frozenset({"type"})),
    kinds.CONFIG_MAP: Shape(blind_writes=True),
    kinds.SERVICE: Shape(
        status=True,
        blind_writes=True,
        lists={"spec.ports": ("port", "protocol")},
        selectable=frozenset({"spec.clusterIP", "spec.type"}),
    ),
    kinds.SERVICE_ACCOUNT: Shape(blind_writes=True, lists={"secrets": ("name",)}),
    kinds.EVENT: Shape(blind_writes=True, selectable=_OF_EVENTS),
    kinds.DAEMON_SET: Shape(
        status=True,
        generation=True,
        blind_writes=True,
        lists=_pod_spec("spec.template.spec") | _CONDITIONS,
        atoms=frozenset({"spec.selector", "spec.template.spec.nodeSelector"}),
    ),
    kinds.JOB: Shape(
        status=True,
        generation=True,
        blind_writes=True,
        lists=_pod_spec("spec.template.spec"),
        atoms=frozenset({"spec.selector", "spec.template.spec.nodeSelector"}),
        selectable=frozenset({"status.successful"}),
    ),
    kinds.ENDPOINT_SLICE: Shape(generation=True, blind_writes=True),
    kinds.NETWORK_POLICY: Shape(generation=True, blind_writes=True, atoms=frozenset({"spec.podSelector"})),
    kinds.LEASE: Shape(),
    kinds.RESOURCE_SLICE: Shape(
        generation=True, blind_writes=True, selectable=frozenset({"spec.nodeName", "spec.driver"})
    ),
    kinds.RESOURCE_CLAIM: Shape(
        status=True,
        blind_writes=True,
        lists={"status.reservedFor": ("uid",), "status.devices": ("driver", "device", "pool", "shareID")},
        atoms=frozenset({"status.allocation.nodeSelector"}),
    ),
    kinds.RESOURCE_CLAIM_TEMPLATE: Shape(blind_writes=True),
    kinds.DEVICE_CLASS: Shape(generation=True, blind_writes=True),
    kinds.CRD: Shape(status=True, generation=True, lists=_CONDITIONS),
    kinds.MUTATING_WEBHOOK: Shape(generation=True, blind_writes=True, lists={"webhooks": ("name",)}),
    kinds.VALIDATING_WEBHOOK: Shape(generation=True, blind_writes=True, lists={"webhooks": ("name",)}),
    kinds.COMPUTE_DOMAIN: Shape(
        status=True, generation=True, lists=_CONDITIONS | {"status.nodes": ("name",)}
    ),
    kinds.GANG_PLAN: Shape(status=True, generation=True, lists=_CONDITIONS),
    kinds.COMPUTE_DOMAIN_CLIQUE: Shape(generation=True, lists={"daemons": ("nodeName",)}),
}
"""Every type that a fake server serves from the start."""
