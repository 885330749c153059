"""Evidence that the ComputeDomain checks and the host checks read, as values made by collectors.

`ClusterEvidence` is everything in a cluster that concerns ComputeDomains: domains,
ResourceClaimTemplates, claims, pods, IMEX daemons and clique labels, with lookups by name, by namespace
and by ComputeDomain. `HostEvidence` is one host as its own files show it: driver version, CDI setting of
the container runtime, IMEX, busy TCP ports.

None means that something could not be read. That is never the same as zero or empty.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property

import msgspec

from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.diagnosis.snapshot import (
    ClaimRecord,
    ImexMeshRecord,
    PodRecord,
    ReportedCondition,
    TemplateRecord,
    grouped,
)

IMEX_CONFIG_FILE = "/etc/nvidia-imex/config.cfg"
"""Read by an nvidia-imex that the host runs. A daemon in a pod has its own file."""


class ClusterEvidence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything in a cluster that concerns ComputeDomains, read at about one moment."""

    domains: tuple[ComputeDomain, ...] = ()
    templates: tuple[TemplateRecord, ...] = ()
    claims: tuple[ClaimRecord, ...] = ()
    pods: tuple[PodRecord, ...] = ()
    reported: tuple[ReportedCondition, ...] = ()
    daemons: tuple[ImexMeshRecord, ...] = ()
    daemons_in: str = ""
    """The namespace in which daemons were searched."""
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique label of each node that has one."""

    def claim(self, namespace: str, name: str) -> ClaimRecord | None:
        """The claim of a name."""
        return self._claims.get((namespace, name))

    def users(self, uid: str) -> tuple[PodRecord, ...]:
        """The pods with a channel of a ComputeDomain."""
        return tuple(self._users.get(uid, ()))

    def templates_in(self, namespace: str) -> frozenset[str]:
        """Names of a namespace's claim templates."""
        return self._templates.get(namespace, frozenset())

    def domains_in(self, namespace: str) -> list[ComputeDomain]:
        """A namespace's ComputeDomains."""
        return self._domains.get(namespace, [])

    @cached_property
    def nodes_of_daemons(self) -> frozenset[str]:
        """Nodes with any daemon: one daemon per clique may serve many ComputeDomains."""
        return frozenset(daemon.node for daemon in self.daemons)

    def daemons_of(self, uid: str) -> list[ImexMeshRecord]:
        """The daemons of a ComputeDomain."""
        return self._daemons.get(uid, [])

    @cached_property
    def _claims(self) -> Mapping[tuple[str, str], ClaimRecord]:
        return {(claim.namespace, claim.name): claim for claim in self.claims}

    @cached_property
    def _templates(self) -> Mapping[str, frozenset[str]]:
        by_namespace = grouped((template.namespace, template.name) for template in self.templates)
        return {namespace: frozenset(templates) for namespace, templates in by_namespace.items()}

    @cached_property
    def _domains(self) -> Mapping[str, list[ComputeDomain]]:
        return grouped((domain.namespace, domain) for domain in self.domains)

    @cached_property
    def _daemons(self) -> Mapping[str, list[ImexMeshRecord]]:
        return grouped((daemon.domain, daemon) for daemon in self.daemons)

    @cached_property
    def _users(self) -> Mapping[str, list[PodRecord]]:
        users: dict[str, list[PodRecord]] = {}
        for pod in self.pods:
            # A pod with several claims of one ComputeDomain is one user of it.
            claims = (self.claim(pod.namespace, name) for name in pod.claims.values())
            for uid in {claim.domain for claim in claims if claim is not None}:
                users.setdefault(uid, []).append(pod)
        return users


class CdiSetting(StrEnum):
    """Whether containerd's configuration enables CDI."""

    ON = "on"
    OFF = "off"
    UNSAID = "unsaid"
    """Not set, so containerd's default counts, or the host may use another configuration."""
    UNREADABLE = "unreadable"
    """A configuration exists and cannot be parsed."""


class ImexEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """IMEX on one node, as its files show it. None: that could not be read."""

    running: tuple[int, ...] | None
    """Processes called nvidia-imex."""
    in_pods: tuple[int, ...] = ()
    """Those of them that are known to run in a pod."""
    outside: tuple[int, ...] | None
    """Those of them that run in no pod. None if none is known to, and some are unknown."""
    enabled: bool | None
    """Whether the host starts nvidia-imex when it boots."""
    offered: bool | None
    """Whether the loaded driver has device numbers for IMEX channels."""
    channels: tuple[int, ...] = ()
    """Channels with device files on the host itself. A plugin creates them in containers only."""
    named: tuple[str, ...] | None = None
    """The nodes in the host's own configuration, or None if it, or the file that it names, is missing."""
    connected: int | None = None
    """Number of peer addresses with a server port that the processes are connected to."""


class HostEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One host as its own files show it. None: that could not be read."""

    here: str
    """Its name in findings: `node n1` if its cluster is known, else `host n1`."""
    driver_version: str | None
    runtime: str | None
    """Container runtime and version, as in a node's status: `containerd://2.0.1`."""
    cdi_setting: CdiSetting
    """From the configuration of containerd. Other runtimes are not read."""
    imex: ImexEvidence
    meshed: bool = False
    """Whether the cluster, if it was read, has the mesh state that the node's IMEX daemon reported."""
    busy_ports: frozenset[int] | None
    """TCP ports on which the host itself listens."""
