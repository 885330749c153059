"""What the checks of ComputeDomains rest on, as values; collectors make them."""

from collections.abc import Mapping

import msgspec

from rackloom.claim.domain.objects import ComputeDomain


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


class DaemonSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of an IMEX daemon."""

    domain: str
    node: str
    clique: str | None
    """None until the daemon has said it; empty on a node without a fabric."""
    meshed: bool | None
    """Whether it reaches all its peers; None until it has said."""
    missing: tuple[str, ...] = ()
    """The connections that it has not."""


class ClusterSeen(msgspec.Struct, frozen=True, kw_only=True):
    """All of a cluster that has to do with ComputeDomains, read at about one moment."""

    domains: tuple[ComputeDomain, ...] = ()
    templates: tuple[TemplateSeen, ...] = ()
    claims: tuple[ClaimSeen, ...] = ()
    pods: tuple[PodSeen, ...] = ()
    daemons: tuple[DaemonSeen, ...] = ()
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique label of each node that has one."""

    def domain(self, uid: str) -> ComputeDomain | None:
        """The ComputeDomain of a UID."""
        return next((one for one in self.domains if one.uid == uid), None)

    def claim(self, namespace: str, name: str) -> ClaimSeen | None:
        """The claim of a name."""
        return next((one for one in self.claims if (one.namespace, one.name) == (namespace, name)), None)

    def users(self, uid: str) -> tuple[PodSeen, ...]:
        """The pods with a channel of a ComputeDomain."""
        return tuple(pod for pod in self.pods if uid in self._domains_of(pod))

    def _domains_of(self, pod: PodSeen) -> set[str]:
        found = (self.claim(pod.namespace, name) for name in pod.claims.values())
        return {claim.domain for claim in found if claim is not None}


class HostSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One node as its own files show it. None: that could not be read."""

    node: str
    driver_version: str | None
    runtime: str | None
    """What runs containers and its version, as in a node's status: `containerd://2.0.1`."""
    cdi_setting: bool | None
    """Whether the runtime's configuration switches CDI on or off; None where it says nothing."""
    imex_processes: tuple[int, ...] | None
    """Processes called nvidia-imex that are in no pod."""
    imex_enabled: bool | None
    """Whether the host starts nvidia-imex when it boots."""
    busy_ports: frozenset[int] | None
    """TCP ports on which the host itself listens."""
