"""Channel mode: cliques that offer single IMEX channels instead of whole IMEX domains.

A node holds one IMEX session, so all nodes of a clique must be in the same mode. In channel mode one
IMEX domain per clique is kept warm, as a ComputeDomain that the controller makes in the daemons'
namespace. A node whose daemon is ready carries a label, and one ResourceSlice offers the clique's
channels on the nodes with that label. Channel 0 is not among them: claims in domain mode inject it.

A clique leaves channel mode in this order: nodes stop offering, the slice is deleted once no claim
holds a channel, and the warm domain last. If the nodes of a clique disagree, nothing of it changes, and
this is reported.
"""

import uuid
from collections.abc import Collection

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomain,
    ComputeDomainNode,
    Readiness,
)
from rackloom.core.cluster.names import ImexIsolation, ImexMode
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    RESOURCE_SLICE,
    CreateObject,
    EventNotice,
    Object,
    ObjectWrite,
)
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import OwnedObject, delete_object, patch_object, remove_label

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
                {
                    "name": names.channel_device_name(number),
                    "attributes": {
                        "type": {"string": names.ISOLATED_CHANNEL_TYPE},
                        "id": {"int": number},
                        "clique": {"string": clique_id},
                    },
                }
                for number in range(1, names.CHANNELS_PER_CLIQUE + 1)
            ],
        },
    }


# The needs of a clique, from its objects.


class CliqueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One clique and the objects of channel mode in it."""

    clique_id: str
    isolations: frozenset[ImexIsolation]
    """The isolation modes of its nodes: one if all is well, none if it has no node."""
    nodes: tuple[OwnedObject, ...]
    warm: ComputeDomain | None
    warm_object: OwnedObject | None
    members: tuple[ComputeDomainNode, ...] = ()
    """Nodes of the warm domain, as its daemons report."""
    marked: tuple[OwnedObject, ...] = ()
    """Nodes on which the warm domain's daemon runs or is to run."""
    labelled: tuple[OwnedObject, ...] = ()
    """Nodes on which the clique's channels are offered now."""
    pool: OwnedObject | None = None
    """The ResourceSlice."""
    in_use: bool = False
    """Whether a claim has one of its channels."""


def reconcile_clique(snapshot: CliqueSnapshot, settings: ControllerSettings) -> tuple[ObjectWrite, ...]:
    """The writes after which a clique offers channels, or no longer does. A mixed clique is left as it is."""
    if len(snapshot.isolations) > 1:
        return ()
    managed = settings.imex_mode is ImexMode.DRIVER_MANAGED
    if not managed or snapshot.isolations != {ImexIsolation.CHANNEL}:
        return _leave_channel_mode(snapshot)
    clique_id, warm = snapshot.clique_id, snapshot.warm
    writes: list[ObjectWrite] = []
    if warm is None:
        writes.append(CreateObject(kind=COMPUTE_DOMAIN, obj=warm_domain_manifest(clique_id, settings)))
    # Our own label decides where the daemon runs. Another program may remove the clique's label for a moment,
    # and the daemons of running jobs must not end with it.
    members = {node.name for node in snapshot.nodes}
    writes += _set_label(names.WARM_CLIQUE_LABEL, snapshot, members, snapshot.marked)
    # A warm domain that is being deleted waits for the jobs that use it, and takes no new ones.
    stays = warm is not None and not warm.deleting
    ready = {node.name for node in snapshot.members if stays and node.status is Readiness.READY}
    writes += _set_label(names.CHANNELS_READY_LABEL, snapshot, ready, snapshot.labelled)
    if snapshot.pool is None and snapshot.members:
        writes.append(CreateObject(kind=RESOURCE_SLICE, obj=channel_slice_manifest(clique_id)))
    return tuple(writes)


def mixed_isolation_event(snapshot: CliqueSnapshot) -> EventNotice | None:
    """The event about a clique whose nodes disagree."""
    if len(snapshot.isolations) < 2:
        return None
    modes = ", ".join(sorted(snapshot.isolations))
    mixed = f"the nodes of clique {snapshot.clique_id} disagree about isolation ({modes})"
    return EventNotice(True, "IsolationMixed", f"{mixed}; give all of them the same {names.ISOLATION_LABEL}")


def _set_label(
    label: str, snapshot: CliqueSnapshot, wanted: Collection[str], labelled: tuple[OwnedObject, ...]
) -> tuple[ObjectWrite, ...]:
    """Writes after which, of the nodes of the clique, exactly the `wanted` ones carry a label."""
    have = {node.name for node in labelled}
    missing = (node for node in snapshot.nodes if node.name in wanted and node.name not in have)
    surplus = (node for node in labelled if node.name not in wanted)
    patch = {"metadata": {"labels": {label: snapshot.clique_id}}}
    return (
        *(patch_object(node, patch) for node in missing),
        *(remove_label(node, label, snapshot.clique_id) for node in surplus),
    )


def _leave_channel_mode(snapshot: CliqueSnapshot) -> tuple[ObjectWrite, ...]:
    """Stop offering channels, then delete the slice, then the warm domain.

    The warm domain stays while a job has a channel of it: its daemons carry the job's memory sharing.
    """
    off = tuple(
        remove_label(node, names.CHANNELS_READY_LABEL, snapshot.clique_id) for node in snapshot.labelled
    )
    if off or snapshot.in_use:
        return off
    if snapshot.pool is not None:
        return (delete_object(snapshot.pool),)
    marks = tuple(remove_label(node, names.WARM_CLIQUE_LABEL, snapshot.clique_id) for node in snapshot.marked)
    if snapshot.warm_object is None or snapshot.warm_object.deleting:
        return marks
    return (*marks, delete_object(snapshot.warm_object))
