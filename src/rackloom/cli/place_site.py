"""Where `rackloom place` takes its nodes from: a profile, files, or a cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rackloom.claim.allocate.objects import Node, ResourceSlice
from rackloom.claim.allocate.slices import device_classes, slices_of
from rackloom.claim.manifests.documents import Document, read_documents
from rackloom.claim.manifests.read import Manifests, gathered
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading import shapes
from rackloom.claim.place.reading.devices import Devices
from rackloom.errors import Refused
from rackloom.topology import profiles
from rackloom.topology.build import build_site
from rackloom.topology.rack import RackProfile

_KINDS = (
    "nodes,pods,resourceslices.resource.k8s.io,deviceclasses.resource.k8s.io,resourceclaims.resource.k8s.io"
)
_MADE_FOR_JOBS = ("resourceclaimtemplates.resource.k8s.io", "computedomains.resource.nvidia.com")
_DEFAULT_PARTITION = 32766
"""The clique id of a domain that nobody partitioned."""


TEMPLATES = ("ResourceClaimTemplate", "ComputeDomain")
"""Kinds that make claims for the pods of jobs."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line names."""

    profile: str | None = None
    racks: int = 1
    files: tuple[Path, ...] = ()
    cluster: bool = False
    context: str | None = None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes and pods as objects, and what the allocator takes."""

    nodes: tuple[dict[str, Any], ...]
    pods: tuple[dict[str, Any], ...]
    devices: Devices


class Told(msgspec.Struct, frozen=True):
    """The objects of a saved or a live cluster."""

    documents: tuple[Document, ...] = ()
    has_classes: bool = False
    """A cluster was asked for its priority classes and told them."""


def told_by(source: Source, *, templates: bool) -> Told:
    """What the source tells; nothing of a profile. `templates`: a job names some that its file lacks.

    Raises Refused for a file, or a cluster, that cannot be read.
    """
    documents = [one for path in source.files for one in read_documents(path)]
    if not source.cluster:
        return Told(tuple(documents))
    from rackloom.claim.manifests.cluster import ask_cluster

    documents += ask_cluster(_KINDS, source.context)
    classes = _if_told("priorityclasses.scheduling.k8s.io", "PriorityClass", source)
    documents += classes or ()
    if templates:
        for resource, kind in zip(_MADE_FOR_JOBS, TEMPLATES, strict=True):
            documents += _if_told(resource, kind, source) or ()
    return Told(tuple(documents), classes is not None)


def _if_told(resource: str, kind: str, source: Source) -> list[Document] | None:
    """None where the cluster does not have the resource, or does not let us see it."""
    from rackloom.claim.manifests.cluster import ask_cluster

    try:
        return [one for one in ask_cluster(resource, source.context) if one.value.get("kind") == kind]
    except Refused:
        return None


def found_in(source: Source, documents: Sequence[Document], labels: Labels, *, with_devices: bool) -> Found:
    """The site of a profile, else of the documents, the jobs' own too. Raises Refused where there is none.

    `with_devices`: what the machines of a profile publish is looked at, not only how many GPUs they have.
    """
    if source.profile is not None and (source.files or source.cluster):
        raise Refused(
            f"a site has the nodes of a profile ({source.profile}) or those of a cluster, not both",
            nearest_fix="leave --profile out, or --site, --cluster and --context",
        )
    if source.profile is not None:
        return _of_profile(source.profile, source.racks, labels, with_devices)
    nodes = tuple(one.value for one in documents if one.value.get("kind") == "Node")
    if not nodes:
        fix = "name a --profile and --racks, files of a --site, or ask with --cluster"
        raise Refused("there is no node to place on", nearest_fix=fix)
    pods = tuple(one.value for one in documents if one.value.get("kind") == "Pod")
    for shape, objects in ((shapes.Node, nodes), (shapes.Pod, pods)):
        for one in objects:
            shapes.check_shape(one, shape, shapes.called(one))
    return Found(nodes=nodes, pods=pods, devices=_devices(gathered(documents), pods))


def _devices(found: Manifests, pods: tuple[dict[str, Any], ...]) -> Devices:
    named = {one.metadata.name for one in found.classes}
    built_in = [one for one in device_classes() if one.metadata.name not in named]
    held = tuple(claim for claim in found.claims if claim.status.allocation is not None)
    classes = (*found.classes, *built_in)
    return Devices(nodes=found.nodes, classes=classes, slices=found.slices, claims=held, pods=pods)


def _of_profile(name: str, racks: int, labels: Labels, with_devices: bool) -> Found:
    profile = profiles.load(name)
    if isinstance(profile, RackProfile):
        cliques, gpus = _cliques(profile, racks), profile.gpus_per_tray
        publishes = profile.tray_machine is not None
    else:
        cliques = [(f"node-{number}", None) for number in range(racks)]
        gpus, publishes = len(profile.gpus), True
    nodes = tuple(_node(node, clique, gpus, labels) for node, clique in cliques)
    slices = _published(name, [node for node, _ in cliques]) if publishes and with_devices else ()
    kept = msgspec.convert([{"metadata": node["metadata"]} for node in nodes], tuple[Node, ...])
    return Found(nodes=nodes, pods=(), devices=Devices(nodes=kept, classes=device_classes(), slices=slices))


def _published(profile: str, nodes: Sequence[str]) -> tuple[ResourceSlice, ...]:
    from rackloom.cli.claim_template import machine_of

    machine = machine_of(profile)
    return tuple(one for node in nodes for one in slices_of(machine, node))


def _cliques(profile: RackProfile, racks: int) -> list[tuple[str, str | None]]:
    return [
        (f"{tray.rack}-tray-{tray.slot}", f"{domain.uuid}.{_DEFAULT_PARTITION}")
        for domain in build_site(profile, racks, _Numbers()).domains
        for tray in domain.trays
    ]


def _node(name: str, clique: str | None, gpus: int, labels: Labels) -> dict[str, Any]:
    marks = {labels.host: name} | ({labels.clique: clique} if clique else {})
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": marks},
        "status": {"allocatable": {labels.gpu: str(gpus)}},
    }


class _Numbers:
    """Names for a site that does not exist."""

    def site(self) -> str:
        return "planned"

    def rack(self, index: int) -> str:
        return f"rack-{index}"

    def chassis_serial(self, rack: int) -> str:
        return f"chassis-{rack}"

    def domain_uuid(self, index: int) -> str:
        return f"domain-{index}"
