"""Reading an allocated ResourceClaim for one driver. Pure.

`read_claim` keeps the allocation results and opaque configurations of the driver. Configurations of the
device class come before those of the claim, so a later one wins. The fingerprint covers the allocation and
`reservedFor`, but not `status.devices`, which drivers write while they prepare.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.claim.node.plugin import AllocatedClaim, AllocatedDevice, ClaimConsumer, ClaimRef, OpaqueConfig
from rackloom.core.cluster.objects import Object
from rackloom.errors import Refused

POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"
"""Annotation that the control plane puts on a claim which it made from a template."""


def read_claim(obj: Object, ref: ClaimRef, driver: str) -> AllocatedClaim:
    """The part of a ResourceClaim that concerns `driver`. Raises `Refused` when it is not allocated."""
    status = obj.get("status", {})
    devices = status.get("allocation", {}).get("devices")
    if devices is None:
        raise Refused(
            f"claim {ref} is not allocated",
            nearest_fix="let the scheduler place the pod: spec.nodeName must not be set by hand",
        )
    return AllocatedClaim(
        ref=ref,
        results=tuple(_result(result) for result in devices.get("results", ()) if result["driver"] == driver),
        configs=_configs(devices.get("config", ()), driver),
        fingerprint=_fingerprint(status),
        of_pod=_pod_of(obj["metadata"]),
        consumers=msgspec.convert(status.get("reservedFor", ()), tuple[ClaimConsumer, ...]),
    )


def _result(result: Mapping[str, Any]) -> AllocatedDevice:
    return AllocatedDevice(
        request=result["request"],
        pool=result["pool"],
        device=result["device"],
        admin_access=result.get("adminAccess") or False,
        share_id=result.get("shareID"),
    )


def _configs(entries: list[Mapping[str, Any]], driver: str) -> tuple[OpaqueConfig, ...]:
    """Those of the class before those of the claim, each in their own order."""
    ours = [
        OpaqueConfig(
            source=entry["source"],
            requests=tuple(entry.get("requests", ())),
            parameters=entry["opaque"]["parameters"],
        )
        for entry in entries
        if entry.get("opaque", {}).get("driver") == driver
    ]
    return tuple(sorted(ours, key=lambda config: config.source == "FromClaim"))


def _fingerprint(status: Mapping[str, Any]) -> str:
    """Of the allocation and its consumers: `devices` is left out, which drivers write while they prepare."""
    kept = {part: status.get(part) for part in ("allocation", "reservedFor")}
    return hashlib.sha256(msgspec.json.encode(kept, order="sorted")).hexdigest()


def _pod_of(metadata: Mapping[str, Any]) -> str | None:
    """A template's claim carries the annotation and is owned by its pod; either is enough."""
    owners = [
        reference["name"] for reference in metadata.get("ownerReferences", ()) if reference["kind"] == "Pod"
    ]
    if owners:
        return str(owners[0])
    return "unknown" if POD_CLAIM_NAME in metadata.get("annotations", {}) else None
