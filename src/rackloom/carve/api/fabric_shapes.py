"""Domains, endpoints, partitions, operations and drains as the wire shows them."""

from collections.abc import Sequence
from typing import Any

from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row, times
from rackloom.carve.plan.values import PartitionHealth
from rackloom.carve.site.capacity import DomainRoomView
from rackloom.carve.site.knowledge import moment
from rackloom.carve.site.physical_partitions import PhysicalPartition


def domain(view: DomainRoomView, now: float, blocked: Sequence[Row] | None) -> Json:
    """A domain as its viewer may see it.

    What is blocked, why the domain is paused, and what its controllers said, is for its operator; `blocked`
    is None for anybody else.
    """
    seen = view.known.observation
    doubt = view.known.doubt if blocked is None else view.known.operators_doubt
    return {
        "id": view.domain,
        "siteId": view.site_id,
        "status": "Unknown" if seen is None else "Observed",
        "observedAt": None if seen is None else moment(seen.observed_at),
        "observationAgeSeconds": None if seen is None else max(0.0, now - seen.observed_at),
        "unknownSince": _moment(view.known.unknown_since),
        "statusMessage": doubt or None,
        "isPaused": view.pause_reason is not None,
        "pauseReason": None if blocked is None else view.pause_reason,
        "totalTrays": view.trays,
        "freeTrays": view.free,
        "unhealthyTrays": view.unhealthy,
        "closedTrays": view.closed,
        "largestBatch": view.largest_batch,
        "fragmentation": view.fragmentation,
        "blockedGpus": None if blocked is None else [_blocked(row) for row in blocked],
        "instanceTypes": [
            {
                "instanceTypeId": one.instance_type_id,
                "freeTrays": one.free,
                "largestBatch": one.largest_batch,
            }
            for one in view.types
        ],
        "ownInstances": view.own_instances,
        "ownGpus": sum(view.own_gpus.values()),
        "ownLogicalPartitions": [{"id": name, "gpus": gpus} for name, gpus in view.own_gpus.items()],
    }


def _blocked(row: Row) -> Json:
    return {"gpuGuid": row.guid, "reason": row.reason, "fix": row.fix, "since": moment(row.since)}


def endpoint(row: Row) -> Json:
    """The switch controller of a chassis."""
    return {
        "chassisSerial": row.chassis_serial,
        "endpoint": row.url,
        "nvLinkDomainId": row.domain,
        "observedAt": _moment(row.observed_at),
        "unknownSince": _moment(row.unknown_since),
        "statusMessage": row.unknown_reason,
        **times(row),
    }


def partition(one: PhysicalPartition) -> Json:
    """A partition as the switch controller shows it."""
    return {
        "id": one.seen.id,
        "name": one.seen.name,
        "nvLinkDomainId": one.domain,
        "owner": one.owner,
        "nvLinkLogicalPartitionId": one.logical_partition,
        "gpuGuids": [str(guid) for guid in sorted(one.seen.members)],
        "health": PartitionHealth(one.seen.health).name.lower(),
        "isGuidBased": one.seen.guid_based,
        "multicastGroups": one.seen.multicast_groups,
        "observedAt": moment(one.observed_at),
    }


def operation(row: Row) -> Json:
    """Something that was asked of a switch controller; operations of one plan have one plan id."""
    detail: dict[str, Any] = row.detail
    return {
        "id": row.id,
        "nvLinkDomainId": row.domain,
        "planId": f"{row.endpoint_id}@{moment(row.observed_at)}",
        "kind": row.kind,
        "partitionName": row.partition_name,
        "askedBy": row.asked_by,
        "reason": row.reason,
        "detail": detail,
        "state": row.state,
        "code": row.code,
        "message": row.message,
        "observedAt": moment(row.observed_at),
        "started": moment(row.started),
        "finished": _moment(row.finished),
        "observedAfter": _moment(row.observed_after),
    }


def step(row: Row) -> Json:
    """Something that an operator did."""
    return {
        "id": row.id,
        "step": row.step,
        "subject": row.subject,
        "nvLinkDomainId": row.domain,
        "askedBy": row.asked_by,
        "reason": row.reason,
        "created": moment(row.created),
    }


def drain(row: Row) -> Json:
    """The drain of a tray."""
    status = "Ended" if row.ended is not None else "Draining" if row.drained is None else "Drained"
    return {
        "id": row.id,
        "machineId": row.machine_id,
        "instanceId": row.instance_id,
        "status": status,
        "message": row.message,
        "reason": row.reason,
        "askedBy": row.asked_by,
        "started": moment(row.started),
        "drained": _moment(row.drained),
        "ended": _moment(row.ended),
    }


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else moment(seconds)
