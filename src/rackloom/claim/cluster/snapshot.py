"""All that a decision about one ComputeDomain rests on, read from the cluster at about one moment."""

from collections.abc import Mapping

import msgspec

from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.claim.cluster.things import ChannelClaim, DaemonPod, Thing
from rackloom.claim.domain import names
from rackloom.claim.domain.objects import Clique, ComputeDomain, NodeStatus
from rackloom.claim.kube.api import Kind
from rackloom.claim.kube.kinds import (
    DAEMON_SET,
    NETWORK_POLICY,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    SECRET,
)


class CliqueObject(msgspec.Struct, frozen=True, kw_only=True):
    """A clique object with what is needed to change it."""

    thing: Thing
    clique: Clique


class WarmState(msgspec.Struct, frozen=True, kw_only=True):
    """What the warm IMEX domain of the clique in which a shared claim was allocated looks like."""

    clique_id: str
    nodes: tuple[NodeStatus, ...]
    pods: tuple[DaemonPod, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One ComputeDomain and what belongs to it. `domain` is None for things that outlived theirs."""

    uid: str
    now: str
    """RFC 3339, for the conditions."""
    domain: ComputeDomain | None
    domain_thing: Thing | None
    held: tuple[Thing, ...] = ()
    """Templates, DaemonSets and claims that carry this UID, in any namespace we look at; the certificates
    too where the ComputeDomain is going or gone."""
    home: str = DEFAULT_DAEMON_NAMESPACE
    """Namespace of its daemons."""
    named: tuple[Thing, ...] = ()
    """Whatever has the names that this ComputeDomain's objects need."""
    nodes: tuple[Thing, ...] = ()
    """Nodes labelled with this UID: a channel of it was prepared there."""
    unready: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Nodes with its label, a daemon or an entry of it that are not ready: since when, in seconds since the
    epoch; 0 for one that is gone."""
    clique_labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique that each node with its label or a channel of it is labelled with, where it is."""
    pods: tuple[DaemonPod, ...] = ()
    cliques: tuple[CliqueObject, ...] = ()
    claims: tuple[ChannelClaim, ...] = ()
    """Claims that use it: for a warm ComputeDomain those of all jobs in its clique."""
    warm: WarmState | None = None
    mixed_nodes: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Cliques of this ComputeDomain whose nodes disagree about isolation, with what is said."""
    invalid: str = ""
    """Why the spec cannot be read; empty when it can."""
    failures: tuple[str, ...] = ()
    """What the API server did not accept of the last decision."""

    def held_of(self, kind: Kind, target: str | None = None) -> tuple[Thing, ...]:
        """Our objects of a kind, of one target where templates have two."""
        return tuple(
            one
            for one in self.held
            if one.kind == kind and (target is None or one.labels.get(names.TARGET_LABEL) == target)
        )

    @property
    def workload_templates(self) -> tuple[Thing, ...]:
        """Templates for the user's pods; one, if all is well."""
        return self.held_of(RESOURCE_CLAIM_TEMPLATE, names.TARGET_WORKLOAD)

    @property
    def daemon_objects(self) -> tuple[Thing, ...]:
        """The DaemonSet of the IMEX daemons and what they have, in the order in which it goes.

        Nothing but the DaemonSet leads to the certificates of a ComputeDomain that is gone, so it goes last.
        """
        return (
            *self.held_of(RESOURCE_CLAIM_TEMPLATE, names.TARGET_DAEMON),
            *self.held_of(SECRET),
            *self.held_of(NETWORK_POLICY),
            *self.held_of(DAEMON_SET),
        )

    @property
    def shared_claims(self) -> tuple[Thing, ...]:
        """The claim of channel mode."""
        return self.held_of(RESOURCE_CLAIM)

    @property
    def channel_nodes(self) -> frozenset[str]:
        """Nodes on which a pod holds a channel of it, in domain mode: there a node's channels are its pool.

        Claims of other namespaces are never prepared.
        """
        space = None if self.domain is None else self.domain.namespace
        held = (claim for claim in self.claims if claim.thing.namespace == space and claim.reserved_for)
        pools = (claim.device[0] for claim in held if claim.device is not None)
        return frozenset(pool for pool in pools if names.clique_of_pool(pool) is None)
