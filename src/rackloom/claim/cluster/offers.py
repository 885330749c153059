"""The objects of a clique in channel mode: its warm IMEX domain, and the slice that offers its channels."""

import uuid

from rackloom.claim.cluster.settings import Settings
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Object

_NAMES = uuid.UUID("5f0b6bb6-9d0a-5c58-8d0c-6b6f0f4f6f11")
"""Namespace of the names below: clique ids may hold capitals, object names may not."""


def warm_name(clique_id: str) -> str:
    """Name of the warm ComputeDomain and of the ResourceSlice of a clique."""
    return f"channels-{uuid.uuid5(_NAMES, clique_id)}"


def warm_manifest(clique_id: str, settings: Settings) -> Object:
    """The ComputeDomain that keeps a clique's IMEX domain up."""
    name = warm_name(clique_id)
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


def pool_manifest(clique_id: str) -> Object:
    """The one slice of a clique's channels, on the nodes whose IMEX daemon is ready."""
    ready = {"key": names.CHANNELS_READY_LABEL, "operator": "In", "values": [clique_id]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {
            "name": warm_name(clique_id),
            "labels": {names.WARM_CLIQUE_LABEL: clique_id},
        },
        "spec": {
            "driver": names.IMEX_DRIVER,
            "pool": {"name": names.channel_pool_name(clique_id), "generation": 1, "resourceSliceCount": 1},
            "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [ready]}]},
            "devices": [_channel(number, clique_id) for number in range(1, names.CHANNELS_PER_CLIQUE + 1)],
        },
    }


def _channel(number: int, clique_id: str) -> Object:
    attributes = {
        "type": {"string": names.ISOLATED_CHANNEL_TYPE},
        "id": {"int": number},
        "clique": {"string": clique_id},
    }
    return {"name": names.channel_device_name(number), "attributes": attributes}
