"""The claims of a pod, as kubelet knows them."""

from typing import Any

import msgspec

from rackloom.claim.node.values import ClaimRef


class PodClaim(msgspec.Struct, frozen=True, kw_only=True):
    """An allocated claim, and the drivers whose devices it got."""

    ref: ClaimRef
    drivers: frozenset[str]

    @property
    def uid(self) -> str:
        """UID of the claim."""
        return self.ref.uid


def pod_claim(obj: dict[str, Any]) -> PodClaim:
    """Read an allocated ResourceClaim."""
    meta = obj["metadata"]
    results = obj["status"]["allocation"]["devices"]["results"]
    return PodClaim(
        ref=ClaimRef(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"]),
        drivers=frozenset(one["driver"] for one in results),
    )
