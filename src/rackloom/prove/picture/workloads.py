"""Pods with claims, their claims and templates: what the workloads of a cluster ask for and have."""

from collections.abc import Mapping

import msgspec


class TemplateSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A ResourceClaimTemplate."""

    namespace: str
    name: str
    domain: str
    """UID of the ComputeDomain that it was made for; empty for a template of somebody else."""


class ClaimSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A ResourceClaim."""

    namespace: str
    name: str
    domain: str
    """UID of the ComputeDomain whose channel it asks for; empty where it asks for none."""
    allocated: bool
    reserved_for: tuple[str, ...]
    """UIDs of pods."""
    since: float | None = None
    """When it was made, seconds since the epoch."""


class PodSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of a workload that has not ended."""

    namespace: str
    name: str
    uid: str
    node: str
    """Empty until it is bound."""
    templates: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Claim templates that it names, by the name of the claim in the pod."""
    claims: Mapping[str, str] = msgspec.field(default_factory=dict)
    """ResourceClaims that it has, named or made for it, by the name of the claim in the pod."""
    owner: str = ""
    """Who makes it anew when it goes, as `Job team/train`; empty: nobody."""
    since: float | None = None
    """When it was made, seconds since the epoch."""
    gated: bool = False
    """Whether it has scheduling gates: it waits for whoever put them there."""
