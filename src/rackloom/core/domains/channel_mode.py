"""Channel mode: cliques that offer single IMEX channels instead of whole IMEX domains.

A node holds one IMEX session, so all nodes of a clique must be in the same mode. In channel mode one
IMEX domain per clique is kept warm, as a ComputeDomain of the controller's own in the daemons'
namespace. A node whose daemon is ready carries a label, and one ResourceSlice offers the clique's
channels on the nodes with that label. Channel 0 is not among them: it is what a claim in domain mode
injects.

A clique leaves channel mode in this order: nodes stop offering, the slice is deleted once no claim
holds a channel, and the warm domain last. A clique whose nodes disagree is left as it is, and reported.
"""

import uuid
from collections.abc import Iterable

import msgspec

from rackloom.core.domains import names
from rackloom.core.domains.clique import Readiness
from rackloom.core.domains.compute_domain import ComputeDomain, ComputeDomainNode, read_compute_domain
from rackloom.core.domains.names import ImexIsolation, ImexMode, isolation_of
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import OwnedObject, delete_object, remove_label
from rackloom.core.kubernetes.objects import (
    COMPUTE_DOMAIN,
    RESOURCE_SLICE,
    CreateObject,
    EventNotice,
    Object,
    ObjectWrite,
    PatchObject,
)

# The objects of a clique in channel mode.


_NAME_SPACE = uuid.UUID("5f0b6bb6-9d0a-5c58-8d0c-6b6f0f4f6f11")
"""Namespace of the names below: clique ids may hold capitals, object names may not."""


def channel_mode_object_name(clique_id: str) -> str:
    """Name of the warm ComputeDomain and of the ResourceSlice of a clique."""
    return f"channels-{uuid.uuid5(_NAME_SPACE, clique_id)}"


def warm_domain_manifest(clique_id: str, settings: ControllerSettings) -> Object:
    """The ComputeDomain that keeps a clique's IMEX domain up."""
    name = channel_mode_object_name(clique_id)
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ComputeDomain",
        "metadata": {
            "name": name,
            "namespace": settings.daemon_namespace,
            "labels": {names.WARM_CLIQUE_LABEL: clique_id},
        },
        "spec": {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": name}}},
    }


def channel_slice_manifest(clique_id: str) -> Object:
    """The one slice of a clique's channels, on the nodes whose IMEX daemon is ready."""
    ready = {"key": names.CHANNELS_READY_LABEL, "operator": "In", "values": [clique_id]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {
            "name": channel_mode_object_name(clique_id),
            "labels": {names.WARM_CLIQUE_LABEL: clique_id},
        },
        "spec": {
            "driver": names.IMEX_DRIVER,
            "pool": {"name": names.channel_pool_name(clique_id), "generation": 1, "resourceSliceCount": 1},
            "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [ready]}]},
            "devices": [
                _channel_device(number, clique_id) for number in range(1, names.CHANNELS_PER_CLIQUE + 1)
            ],
        },
    }


def _channel_device(number: int, clique_id: str) -> Object:
    attributes = {
        "type": {"string": names.ISOLATED_CHANNEL_TYPE},
        "id": {"int": number},
        "clique": {"string": clique_id},
    }
    return {"name": names.channel_device_name(number), "attributes": attributes}


# What a clique needs, from what is there.


class CliqueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One clique and what is there of channel mode in it."""

    clique_id: str
    said: frozenset[ImexIsolation]
    """What its nodes are set to; empty when it has no node."""
    nodes: tuple[OwnedObject, ...]
    warm: ComputeDomain | None
    warm_thing: OwnedObject | None
    members: tuple[ComputeDomainNode, ...] = ()
    """Nodes of the warm domain, as its daemons say."""
    marked: tuple[OwnedObject, ...] = ()
    """Nodes on which the warm domain's daemon runs or shall run."""
    labelled: tuple[OwnedObject, ...] = ()
    """Nodes on which the clique's channels are offered now."""
    pool: OwnedObject | None = None
    """The ResourceSlice."""
    in_use: bool = False
    """Whether a claim has one of its channels."""


def warm_domain(found: Iterable[Object], settings: ControllerSettings) -> ComputeDomain | None:
    """The controller's own ComputeDomain among those that carry a clique's label."""
    ours = (obj for obj in found if obj["metadata"]["namespace"] in settings.namespaces)
    return next((read_compute_domain(obj) for obj in ours), None)


def isolation_of_nodes(
    nodes: Iterable[OwnedObject], settings: ControllerSettings
) -> frozenset[ImexIsolation]:
    """What the nodes of a clique are set to: all the same, if all is well."""
    return frozenset(isolation_of(node.labels, settings.isolation) for node in nodes)


def reconcile_clique(view: CliqueSnapshot, settings: ControllerSettings) -> tuple[ObjectWrite, ...]:
    """What to do so that a clique offers channels, or no longer does. A mixed one is left as it is."""
    if len(view.said) > 1:
        return ()
    managed = settings.imex_mode is ImexMode.DRIVER_MANAGED
    if managed and view.said == {ImexIsolation.CHANNEL}:
        return (
            *_create_warm_domain(view, settings),
            *_mark_nodes(view),
            *_label_ready_nodes(view),
            *_create_slice(view),
        )
    return _leave_channel_mode(view)


def mixed_isolation_event(view: CliqueSnapshot) -> EventNotice | None:
    """What to tell about a clique whose nodes disagree."""
    if len(view.said) < 2:
        return None
    said = f"the nodes of clique {view.clique_id} disagree about isolation ({', '.join(sorted(view.said))})"
    return EventNotice(True, "IsolationMixed", f"{said}; give all of them the same {names.ISOLATION_LABEL}")


def _create_warm_domain(view: CliqueSnapshot, settings: ControllerSettings) -> tuple[ObjectWrite, ...]:
    if view.warm is not None:
        return ()
    return (CreateObject(kind=COMPUTE_DOMAIN, obj=warm_domain_manifest(view.clique_id, settings)),)


def _mark_nodes(view: CliqueSnapshot) -> tuple[ObjectWrite, ...]:
    # A label of our own decides where the daemon runs: whoever writes the clique's label may take it off for
    # a moment, and the daemons of running jobs must not end with it.
    marked, members = {node.name for node in view.marked}, {node.name for node in view.nodes}
    on = (
        _add_label(node, names.WARM_CLIQUE_LABEL, view.clique_id)
        for node in view.nodes
        if node.name not in marked
    )
    off = (
        remove_label(node, names.WARM_CLIQUE_LABEL, view.clique_id)
        for node in view.marked
        if node.name not in members
    )
    return (*on, *off)


def _create_slice(view: CliqueSnapshot) -> tuple[ObjectWrite, ...]:
    if view.pool is not None or not view.members:
        return ()
    return (CreateObject(kind=RESOURCE_SLICE, obj=channel_slice_manifest(view.clique_id)),)


def _label_ready_nodes(view: CliqueSnapshot) -> tuple[ObjectWrite, ...]:
    # A warm domain that is being deleted waits for the jobs that use it, and takes no new ones.
    stays = view.warm is not None and not view.warm.deleting
    ready = {node.name for node in view.members if stays and node.status is Readiness.READY}
    offered = {node.name for node in view.labelled}
    on = (
        _add_label(node, names.CHANNELS_READY_LABEL, view.clique_id)
        for node in view.nodes
        if node.name in ready - offered
    )
    off = (
        remove_label(node, names.CHANNELS_READY_LABEL, view.clique_id)
        for node in view.labelled
        if node.name not in ready
    )
    return (*on, *off)


def _leave_channel_mode(view: CliqueSnapshot) -> tuple[ObjectWrite, ...]:
    """First nothing new is offered; the IMEX domain stays while a job still has a channel of it."""
    off = tuple(remove_label(node, names.CHANNELS_READY_LABEL, view.clique_id) for node in view.labelled)
    if off or view.in_use:
        return off
    if view.pool is not None:
        return (delete_object(view.pool),)
    marks = tuple(remove_label(node, names.WARM_CLIQUE_LABEL, view.clique_id) for node in view.marked)
    if view.warm_thing is None or view.warm_thing.deleting:
        return marks
    return (*marks, delete_object(view.warm_thing))


def _add_label(node: OwnedObject, label: str, value: str) -> PatchObject:
    patch = {"metadata": {"labels": {label: value}}}
    return PatchObject(kind=node.kind, namespace=None, name=node.name, patch=patch)
