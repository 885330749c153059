"""Evidence that the ComputeDomain checks and the host checks read, as values made by collectors.

`ClusterEvidence` is everything in a cluster that concerns ComputeDomains: domains,
ResourceClaimTemplates, claims, pods, IMEX daemons and clique labels, with lookups by name, by namespace
and by ComputeDomain. `HostEvidence` is one host as its own files show it: driver version, CDI setting of
the container runtime, IMEX, busy TCP ports.

None means that something could not be read. That is never the same as zero or empty.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

import msgspec

from rackloom.core.diagnosis.snapshot import ClaimRecord, PodRecord, TemplateRecord
from rackloom.core.domains.compute_domain import ComputeDomain

T = TypeVar("T")
IMEX_CONFIG_FILE = "/etc/nvidia-imex/config.cfg"
"""What an nvidia-imex of the host itself is told; that of a pod has a file of its own."""


class ImexDaemonRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of an IMEX daemon."""

    domain: str
    node: str
    clique: str | None
    """None until the daemon has said it; empty on a node without a fabric."""
    meshed: bool | None
    """Whether it reaches all its peers; None until it has said."""
    missing: tuple[str, ...] = ()
    """The connections that it has not."""


class ClusterEvidence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All of a cluster that has to do with ComputeDomains, read at about one moment."""

    domains: tuple[ComputeDomain, ...] = ()
    templates: tuple[TemplateRecord, ...] = ()
    claims: tuple[ClaimRecord, ...] = ()
    pods: tuple[PodRecord, ...] = ()
    daemons: tuple[ImexDaemonRecord, ...] = ()
    daemons_in: str = ""
    """The namespace in which daemons were looked for."""
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique label of each node that has one."""

    def claim(self, namespace: str, name: str) -> ClaimRecord | None:
        """The claim of a name."""
        return self._claims.get((namespace, name))

    def users(self, uid: str) -> tuple[PodRecord, ...]:
        """The pods with a channel of a ComputeDomain."""
        return tuple(self._users.get(uid, ()))

    def templates_in(self, namespace: str) -> set[str]:
        """Names of a namespace's claim templates."""
        return self._templates.get(namespace, set())

    def domains_in(self, namespace: str) -> list[ComputeDomain]:
        """A namespace's ComputeDomains."""
        return self._domains.get(namespace, [])

    @cached_property
    def nodes_of_daemons(self) -> frozenset[str]:
        """Nodes of which any daemon was read: where cliques are kept warm, one serves many ComputeDomains."""
        return frozenset(daemon.node for daemon in self.daemons)

    def daemons_of(self, uid: str) -> list[ImexDaemonRecord]:
        """The daemons of a ComputeDomain."""
        return self._daemons.get(uid, [])

    @cached_property
    def _claims(self) -> Mapping[tuple[str, str], ClaimRecord]:
        return {(claim.namespace, claim.name): claim for claim in self.claims}

    @cached_property
    def _templates(self) -> Mapping[str, set[str]]:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for template in self.templates:
            found[template.namespace].add(template.name)
        return found

    @cached_property
    def _domains(self) -> Mapping[str, list[ComputeDomain]]:
        return _group_by(self.domains, lambda one: one.namespace)

    @cached_property
    def _daemons(self) -> Mapping[str, list[ImexDaemonRecord]]:
        return _group_by(self.daemons, lambda one: one.domain)

    @cached_property
    def _users(self) -> Mapping[str, list[PodRecord]]:
        found: defaultdict[str, list[PodRecord]] = defaultdict(list)
        for pod in self.pods:
            claims = (self.claim(pod.namespace, name) for name in pod.claims.values())
            for uid in {claim.domain for claim in claims if claim is not None}:
                found[uid].append(pod)
        return found


def _group_by(values: Iterable[T], name: Callable[[T], str]) -> Mapping[str, list[T]]:
    found: defaultdict[str, list[T]] = defaultdict(list)
    for value in values:
        found[name(value)].append(value)
    return found


class CdiSetting(StrEnum):
    """What containerd's configuration says of CDI."""

    ON = "on"
    OFF = "off"
    UNSAID = "unsaid"
    """It leaves it to what containerd does by default, or is not known to be what this host runs with."""
    UNREADABLE = "unreadable"
    """There is one, and what it says is not understood."""


class ImexEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """IMEX on one node, as its files show it. None: that could not be read."""

    running: tuple[int, ...] | None
    """Processes called nvidia-imex."""
    in_pods: tuple[int, ...] = ()
    """Those of them that are seen to be in a pod."""
    outside: tuple[int, ...] | None
    """Those of them that are in no pod; None also where there is none, and of some it is not known."""
    enabled: bool | None
    """Whether the host starts nvidia-imex when it boots."""
    offered: bool | None
    """Whether the loaded driver has device numbers for IMEX channels."""
    channels: tuple[int, ...] = ()
    """Channels whose devices are on the host itself; a plugin makes them in containers only."""
    named: tuple[str, ...] | None = None
    """The nodes that the host's own configuration leads to; None without it or the file that it names."""
    connected: int | None = None
    """With how many addresses of others the processes have connections at the server's port."""


class HostEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One host as its own files show it. None: that could not be read."""

    here: str
    """What findings call it: `node n1` where its cluster is known, else `host n1`."""
    driver_version: str | None
    runtime: str | None
    """What runs containers and its version, as in a node's status: `containerd://2.0.1`."""
    cdi_setting: CdiSetting
    """What the configuration of containerd says; of another runtime it says nothing."""
    imex: ImexEvidence
    meshed: bool = False
    """Whether the node's own IMEX daemon has told somebody else of its mesh: a cluster that was asked too."""
    busy_ports: frozenset[int] | None
    """TCP ports on which the host itself listens."""
