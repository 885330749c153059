"""Reads the objects that the checks of ComputeDomains need from a Kubernetes API server.

`collect_cluster` turns six lists (ComputeDomains, ResourceClaimTemplates, ResourceClaims, GangPlans, pods,
nodes) into `ClusterEvidence` and changes nothing. The caller passes in the function that reads a list. Its
errors pass through, because half a reading would show faults that are not there. Objects that cannot be
parsed are left out, as are pods without claims and pods that have ended.

IMEX daemons are recognised by the name of their container and by the label with the ComputeDomain's UID,
and only in the one namespace given: in other namespaces a tenant may set labels and name containers.
The state of a mesh comes from the annotation that each daemon writes on its pod.
"""

from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Protocol, TypeVar

from rackloom.core.cluster import names
from rackloom.core.cluster.claims import claim_consumers, is_allocated, unready_devices
from rackloom.core.cluster.domain_objects import claimed_domain_uid, daemon_mesh, readable_compute_domains
from rackloom.core.cluster.gang_objects import WARNING_REASONS
from rackloom.core.cluster.nodes import node_clique
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    Condition,
    Object,
    ResourceKind,
    condition_of,
    conditions_of,
    controller_of,
    created_at,
    has_pod_ended,
    labels_of,
    name_of,
    named_pod_claims,
    namespace_of,
    uid_of,
)
from rackloom.core.cluster.pods import (
    CHANNEL_CONDITION,
    claim_templates,
    gates_of,
    node_of,
    refers_to_claims,
    runs_imex_daemon,
)
from rackloom.core.diagnosis.evidence import ClusterEvidence
from rackloom.core.diagnosis.snapshot import (
    ClaimRecord,
    ImexMeshRecord,
    PodRecord,
    ReportedCondition,
    TemplateRecord,
)

V = TypeVar("V")
ListReader = Callable[[ResourceKind], Awaitable[list[Object]]]
"""Lists all objects of a kind, in all namespaces. Raises if the API server does not answer or refuses."""


class ObjectMapper(Protocol):
    """Applies a function to objects, as `map` does. An implementation may cache results."""

    def __call__(self, decode: Callable[[Object], V], objects: Iterable[Object], /) -> Iterable[V]:
        """`decode` of each object, in order."""
        ...


async def collect_cluster(read: ListReader, namespace: str, each: ObjectMapper = map) -> ClusterEvidence:
    """Read everything that the checks need. IMEX daemons only from `namespace`, which has no pods of tenants.

    Errors of `read` pass through: a partial reading would show faults that do not exist.
    """
    daemons, users = list[Object](), list[Object]()
    for pod in await read(POD):
        # Anybody may name a container and set labels, but only the controller creates pods in this namespace.
        is_labelled = namespace_of(pod) == namespace and labels_of(pod).get(names.COMPUTE_DOMAIN_LABEL)
        if is_labelled and runs_imex_daemon(pod):
            daemons.append(pod)
        elif refers_to_claims(pod) and not has_pod_ended(pod):
            users.append(pod)
    claims = await read(RESOURCE_CLAIM)
    reported = (
        each(_gang_conditions, await read(GANG_PLAN)),
        each(_pod_conditions, users),
        each(_device_conditions, claims),
    )
    return ClusterEvidence(
        domains=tuple(readable_compute_domains(await read(COMPUTE_DOMAIN))),
        templates=tuple(each(_template, await read(RESOURCE_CLAIM_TEMPLATE))),
        claims=tuple(each(_claim, claims)),
        pods=tuple(each(_pod, users)),
        reported=tuple(condition for found in chain(*reported) for condition in found),
        daemons=tuple(each(_daemon, daemons)),
        daemons_in=namespace,
        cliques={
            name_of(node): clique
            for node in await read(NODE)
            if (clique := node_clique(labels_of(node), names.GPU_CLIQUE_LABEL))
        },
    )


def _template(obj: Object) -> TemplateRecord:
    return TemplateRecord(
        namespace=namespace_of(obj) or "",
        name=name_of(obj),
        domain=labels_of(obj).get(names.COMPUTE_DOMAIN_LABEL, ""),
    )


def _claim(obj: Object) -> ClaimRecord:
    return ClaimRecord(
        namespace=namespace_of(obj) or "",
        name=name_of(obj),
        domain=claimed_domain_uid(obj) or "",
        allocated=is_allocated(obj),
        reserved_for=tuple(user.uid for user in claim_consumers(obj)),
        since=created_at(obj),
    )


def _pod(obj: Object) -> PodRecord:
    return PodRecord(
        namespace=namespace_of(obj) or "",
        name=name_of(obj),
        uid=uid_of(obj),
        node=node_of(obj),
        owner=controller_title(obj),
        since=created_at(obj),
        gated=bool(gates_of(obj)),
        templates=claim_templates(obj),
        claims=named_pod_claims(obj),
    )


def _gang_conditions(plan: Object) -> list[ReportedCondition]:
    found = (condition for condition in conditions_of(plan) if condition.reason in WARNING_REASONS)
    return [_reported(GANG_PLAN, plan, condition) for condition in found]


def _pod_conditions(pod: Object) -> list[ReportedCondition]:
    condition = condition_of(pod, CHANNEL_CONDITION)
    return [_reported(POD, pod, condition)] if condition and condition.status == "False" else []


def _device_conditions(claim: Object) -> list[ReportedCondition]:
    pods = tuple(f"{namespace_of(claim)}/{user.name}" for user in claim_consumers(claim))
    return [
        _reported(RESOURCE_CLAIM, claim, condition, device, pods)
        for device, condition in unready_devices(claim)
    ]


def _reported(
    kind: ResourceKind, obj: Object, condition: Condition, device: str = "", pods: tuple[str, ...] = ()
) -> ReportedCondition:
    return ReportedCondition(
        kind=kind,
        namespace=namespace_of(obj) or "",
        name=name_of(obj),
        condition=condition,
        device=device,
        pods=pods,
    )


def controller_title(pod: Object) -> str:
    """The controller that recreates a pod, as `Job team/train`. It is empty if a person made the pod."""
    owner = controller_of(pod)
    return f"{owner.kind} {namespace_of(pod)}/{owner.name}" if owner else ""


def _daemon(pod: Object) -> ImexMeshRecord:
    mesh = daemon_mesh(pod)
    return ImexMeshRecord(
        domain=labels_of(pod).get(names.COMPUTE_DOMAIN_LABEL, ""),
        node=node_of(pod),
        clique=labels_of(pod).get(names.CLIQUE_ID_LABEL),
        complete=None if mesh is None else mesh.complete,
        missing=() if mesh is None else mesh.missing,
    )
