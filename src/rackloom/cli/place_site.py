"""The site that `rackloom place` plans for: nodes, pods, devices and priority classes.

A profile gives nodes that do not exist. If a job claims devices, they have the devices that their drivers
would publish. Otherwise nodes and pods come from saved manifests, or from the cluster that kubectl uses.
The shape of objects is checked first. An optional resource that the cluster does not have, or does not let
the user read, is treated as absent.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.claim.manifests.documents import SITE_KINDS, Document, read_documents
from rackloom.claim.manifests.read import Manifests, manifests_of
from rackloom.cli.common import note
from rackloom.cli.hardware import profile_slices, with_built_in_classes
from rackloom.cli.place_options import SiteParameters
from rackloom.core.allocate.driver_slices import device_classes
from rackloom.core.cluster.jobs import BUILT_IN_PRIORITIES, PriorityClass, PriorityClasses
from rackloom.core.cluster.names import POD_GROUP_VERSIONS, SchedulerLabels
from rackloom.core.cluster.objects import name_in_file
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.scheduling import PREEMPT_NEVER, allocator_node
from rackloom.core.cluster.state import ClusterState, owners_of_claims
from rackloom.core.cluster.trays import DraDevices
from rackloom.core.place.site_planner import SiteObjects
from rackloom.errors import Misuse, Refused
from rackloom.topology import profiles
from rackloom.topology.rack import RackProfile, build_site

# Nodes, pods and devices.


_CLUSTER_KINDS = (
    "nodes,pods,resourceslices.resource.k8s.io,deviceclasses.resource.k8s.io,resourceclaims.resource.k8s.io"
)
_TEMPLATE_RESOURCES = ("resourceclaimtemplates.resource.k8s.io", "computedomains.resource.nvidia.com")
_DEFAULT_PARTITION = 32766
"""The clique id of a domain that has only its default partition."""


TEMPLATE_KINDS = ("ResourceClaimTemplate", "ComputeDomain")
"""Kinds that make claims for the pods of jobs."""


class ClusterObjects(msgspec.Struct, frozen=True):
    """The objects of a saved or a live cluster."""

    documents: tuple[Document, ...] = ()
    has_classes: bool = False
    """True if a cluster has listed its priority classes."""


def require_one_site(source: SiteParameters) -> None:
    """Raise Misuse if the site is both a profile and a cluster."""
    if source.profile is not None and (source.site or source.is_live):
        raise Misuse(
            f"a site has the nodes of a profile ({source.profile}) or those of a cluster, not both",
            nearest_fix="leave --profile out, or --site, --cluster, --kubeconfig and --context",
        )


def read_cluster_objects(source: SiteParameters, *, templates: bool) -> ClusterObjects:
    """The objects of saved files or of a live cluster. Empty for a profile.

    `templates`: also read templates, because a job names some that its file lacks. Raises Refused if a file
    or the cluster cannot be read.
    """
    files = source.site or ()
    documents = [document for path in files for document in read_documents(path, SITE_KINDS)]
    if not source.is_live:
        return ClusterObjects(tuple(documents))
    from rackloom.claim.manifests.cluster import objects_from_cluster, taint_rules_from_cluster

    documents += objects_from_cluster(_CLUSTER_KINDS, source.kubeconfig, source.context)
    documents += taint_rules_from_cluster(source.kubeconfig, source.context)
    classes = _optional_objects("priorityclasses.scheduling.k8s.io", "PriorityClass", source)
    documents += classes or ()
    if templates:
        for resource, kind in zip(_TEMPLATE_RESOURCES, TEMPLATE_KINDS, strict=True):
            documents += _optional_objects(resource, kind, source) or ()
    return ClusterObjects(tuple(documents), classes is not None)


def _optional_objects(resource: str, kind: str, source: SiteParameters) -> list[Document] | None:
    """The objects, or None if the cluster does not have the resource or does not let us read it."""
    from rackloom.claim.manifests.cluster import objects_from_cluster

    try:
        return [
            obj
            for obj in objects_from_cluster(resource, source.kubeconfig, source.context)
            if obj.value.get("kind") == kind
        ]
    except Refused:
        return None


def labels_of_served_pod_groups(source: SiteParameters, labels: SchedulerLabels) -> SchedulerLabels:
    """The labels with the version of PodGroups that a live cluster serves, unless they name a version.

    Raises Refused if the cluster does not answer.
    """
    if labels.pod_group_version or not source.is_live:
        return labels
    from rackloom.claim.manifests.cluster import first_served_version

    served = first_served_version("PodGroup", POD_GROUP_VERSIONS, source.kubeconfig, source.context)
    if served is None:
        note(
            f"The cluster serves no PodGroup. {POD_GROUP_VERSIONS[0]} needs the feature gate GenericWorkload."
        )
    return replace(labels, pod_group_version=served or POD_GROUP_VERSIONS[0])


def site_objects(
    source: SiteParameters, documents: Sequence[Document], labels: SchedulerLabels, *, with_devices: bool
) -> SiteObjects:
    """The site of a profile, or else of the documents and the jobs' files. Raises Refused if there is none.

    `with_devices`: use the devices that a profile's machines publish, not only their number of GPUs.
    """
    if source.profile is not None:
        return _profile_objects(source.profile, source.racks, labels, with_devices)
    nodes, pods, claims, slices = (
        [found.decoded or found.value for found in documents if found.value.get("kind") == kind]
        for kind in ("Node", "Pod", "ResourceClaim", "ResourceSlice")
    )
    if not nodes:
        fix = "name a --profile and --racks, files of a --site, or ask with --cluster"
        raise Misuse("there is no node to place on", nearest_fix=fix)
    published = (each if isinstance(each, dict) else msgspec.to_builtins(each) for each in slices)
    state = read_state(nodes, pods, claims, published, labels)
    for unreadable in state.unreadable:
        note(str(unreadable))
    return SiteObjects(state=state, devices=_devices(manifests_of(documents), state))


def _devices(found: Manifests, state: ClusterState) -> DraDevices:
    return DraDevices(
        nodes=tuple(map(allocator_node, state.nodes)),
        classes=with_built_in_classes(found.classes),
        slices=found.slices,
        claims=tuple(claim for claim in found.claims if claim.status.allocation is not None),
        owners=owners_of_claims(state),
    )


def _profile_objects(name: str, racks: int, labels: SchedulerLabels, with_devices: bool) -> SiteObjects:
    profile = profiles.load_profile(name)
    if isinstance(profile, RackProfile):
        cliques, gpus = _profile_cliques(profile, racks), profile.gpus_per_tray
        publishes = profile.tray_machine is not None
    else:
        cliques = [(f"node-{number}", None) for number in range(racks)]
        gpus, publishes = len(profile.gpus), True
    nodes = tuple(_profile_node(node, clique, gpus, labels) for node, clique in cliques)
    slices = profile_slices(name, [node for node, _ in cliques]) if publishes and with_devices else ()
    state = read_state(nodes, slices=msgspec.to_builtins(slices), labels=labels)
    devices = DraDevices(
        nodes=tuple(map(allocator_node, state.nodes)), classes=device_classes(), slices=slices
    )
    return SiteObjects(state=state, devices=devices)


def _profile_cliques(profile: RackProfile, racks: int) -> list[tuple[str, str | None]]:
    return [
        (f"{tray.rack}-tray-{tray.slot}", f"{domain.uuid}.{_DEFAULT_PARTITION}")
        for domain in build_site(profile, racks, _PlannedNames()).domains
        for tray in domain.trays
    ]


def _profile_node(name: str, clique: str | None, gpus: int, labels: SchedulerLabels) -> dict[str, Any]:
    marks = {labels.host: name} | ({labels.clique: clique} if clique else {})
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": marks},
        "status": {
            "allocatable": {labels.gpu: str(gpus)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class _PlannedNames:
    """Names for a site that does not exist."""

    def site(self) -> str:
        return "planned"

    def rack(self, index: int) -> str:
        return f"rack-{index}"

    def chassis_serial(self, rack: int) -> str:
        return f"chassis-{rack}"

    def domain_uuid(self, index: int) -> str:
        return f"domain-{index}"


# Priority classes.


_PRIORITY_CLASS = "PriorityClass"
_LOWEST_PRIORITY, _HIGHEST_PRIORITY = -(2**31), 1_000_000_000
"""For classes that people create. Kubernetes' own classes are above (scheduling.k8s.io/v1)."""


def priority_classes(documents: Iterable[Document], *, from_cluster: bool) -> PriorityClasses:
    """The priority classes of the documents. `from_cluster`: a cluster has listed all its classes.

    Raises Refused for an impossible value.
    """
    classes = [
        _read_class(document) for document in documents if document.value.get("kind") == _PRIORITY_CLASS
    ]
    return PriorityClasses(classes, are_all_known=from_cluster or bool(classes))


def _read_class(document: Document) -> PriorityClass:
    name, value = name_in_file(document.value), document.value.get("value", 0)
    if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int):
        raise Refused(
            f"{document.where(('value',))}: a {_PRIORITY_CLASS} has the name {name!r} and"
            f" the value {value!r}",
            nearest_fix="give it a name, and a whole number as value",
        )
    if name not in BUILT_IN_PRIORITIES and not _LOWEST_PRIORITY <= value <= _HIGHEST_PRIORITY:
        raise Refused(
            f"{document.where(('value',))}: the {_PRIORITY_CLASS} {name} has the value {value}",
            nearest_fix=f"set it from {_LOWEST_PRIORITY} to {_HIGHEST_PRIORITY}"
            f": the API server takes no other",
        )
    return PriorityClass(
        name=name,
        value=value,
        is_default=document.value.get("globalDefault") is True,
        never_preempts=document.value.get("preemptionPolicy") == PREEMPT_NEVER,
    )
