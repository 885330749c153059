"""Reading the claims that kubelet names: from the API server, and only what concerns one driver."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Object, Rejected
from rackloom.claim.kube.kinds import RESOURCE_CLAIM
from rackloom.claim.node.values import Claim, ClaimRef, Config, Consumer, Result
from rackloom.errors import Refused, Retry

POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"
"""Annotation that the control plane puts on a claim which it made from a template."""
API_RETRY_SECONDS = 0.25


class Obsolete(Refused):
    """Nobody waits for this claim any more: it is gone, or another has its name, or kubelet gave it back."""


async def fetch_claim(api: KubeApi, ref: ClaimRef, driver: str) -> Claim:
    """The claim of `ref` as the API server has it now.

    Raises `Obsolete` when it is gone or is another one of that name, `Refused` when it is not allocated, and
    `Retry` when the API server gives no answer.
    """
    try:
        found = await api.get(RESOURCE_CLAIM, ref.name, ref.namespace)
    except NotFound as error:
        raise Obsolete(f"claim {ref.namespace}/{ref.name} does not exist any more") from error
    except KubeError as error:
        raise api_trouble(f"cannot read claim {ref.namespace}/{ref.name}", error) from error
    if found["metadata"]["uid"] != ref.uid:
        raise Obsolete(
            f"claim {ref.namespace}/{ref.name} got replaced: its UID is {found['metadata']['uid']},"
            f" the pod's claim was {ref.uid}",
            nearest_fix="delete the pod, so that it is scheduled with the new claim",
        )
    return read_claim(found, ref, driver)


def read_claim(obj: Object, ref: ClaimRef, driver: str) -> Claim:
    """What `driver` has to know of a ResourceClaim. Raises `Refused` when it is not allocated."""
    status = obj.get("status", {})
    devices = status.get("allocation", {}).get("devices")
    if devices is None:
        raise Refused(
            f"claim {ref.namespace}/{ref.name} is not allocated",
            nearest_fix="let the scheduler place the pod: spec.nodeName must not be set by hand",
        )
    return Claim(
        ref=ref,
        results=tuple(_result(one) for one in devices.get("results", ()) if one["driver"] == driver),
        configs=_configs(devices.get("config", ()), driver),
        fingerprint=_fingerprint(status),
        of_pod=_pod_of(obj["metadata"]),
        consumers=tuple(
            Consumer(resource=one["resource"], name=one["name"], uid=one["uid"])
            for one in status.get("reservedFor", ())
        ),
    )


def api_trouble(doing: str, error: KubeError) -> Exception:
    """`Retry` for an answer of the API server that may change, `Refused` for one that will not."""
    if isinstance(error, Rejected):
        return Refused(f"{doing}: {error.message}", nearest_fix="give the plugin's service account its role")
    return Retry(f"{doing}: {error.message}", after=error.retry_after or API_RETRY_SECONDS)


def _result(one: Mapping[str, Any]) -> Result:
    return Result(
        request=one["request"],
        pool=one["pool"],
        device=one["device"],
        admin_access=one.get("adminAccess") or False,
        share_id=one.get("shareID"),
    )


def _configs(entries: list[Mapping[str, Any]], driver: str) -> tuple[Config, ...]:
    """Those of the class before those of the claim, each in their own order."""
    ours = [
        Config(
            source=one["source"],
            requests=tuple(one.get("requests", ())),
            parameters=one["opaque"]["parameters"],
        )
        for one in entries
        if one.get("opaque", {}).get("driver") == driver
    ]
    return tuple(sorted(ours, key=lambda config: config.source == "FromClaim"))


def _fingerprint(status: Mapping[str, Any]) -> str:
    """Of the allocation and its consumers: `devices` is left out, which drivers write while they prepare."""
    kept = {part: status.get(part) for part in ("allocation", "reservedFor")}
    return hashlib.sha256(msgspec.json.encode(kept, order="sorted")).hexdigest()


def _pod_of(metadata: Mapping[str, Any]) -> str | None:
    """A template's claim carries the annotation and is owned by its pod; either is enough."""
    owners = [one["name"] for one in metadata.get("ownerReferences", ()) if one["kind"] == "Pod"]
    if owners:
        return str(owners[0])
    return "unknown" if POD_CLAIM_NAME in metadata.get("annotations", {}) else None
