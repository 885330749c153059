"""Settings of the ComputeDomain controller: namespaces, IMEX daemons, isolation mode.

IMEX daemons run in a dedicated namespace, so that rights over their pods and Secrets are no rights
over Rackloom's programs. Objects of earlier installations in additional namespaces are found and
deleted there, and new ones are never created there.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from rackloom.core.cluster.names import MAX_NODES_PER_IMEX_DOMAIN, ImexIsolation, ImexMode
from rackloom.core.domains.imex_settings import ImexSettings

DEFAULT_NAMESPACE = "rackloom-system"
"""Rackloom's own programs run here."""
DEFAULT_DAEMON_NAMESPACE = "rackloom-imex"
"""IMEX daemons run here: rights over their pods and Secrets are no rights over Rackloom's programs."""


class QuotaMode(StrEnum):
    """Which ComputeDomains need quota of Kueue."""

    NONE = "none"
    LABELLED = "labelled"
    """Those with the label of a queue."""
    ALL = "all"
    """All of users: one without the label waits."""


class ImexDaemonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the pods of IMEX daemons are made."""

    image: str
    pull_secrets: tuple[str, ...] = ()
    log_verbosity: int = 4
    max_nodes: int = MAX_NODES_PER_IMEX_DOMAIN
    """Size of the index space of one IMEX domain, in nodes."""
    authentication: bool = True
    """Mutual TLS between the daemons of one ComputeDomain, with certificates that the controller issues."""
    imex_settings: ImexSettings = {}
    """Settings of nvidia-imex that differ from Rackloom's defaults, for daemons made from now on."""
    priority_class: str | None = None
    """A daemon that is evicted takes a whole job's memory sharing with it."""
    resources: Mapping[str, Mapping[str, str]] = msgspec.field(
        default_factory=lambda: {"requests": {"cpu": "50m", "memory": "128Mi"}}
    )
    """`requests` and `limits` of the container. Equal ones give the pod guaranteed quality of service."""


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one controller."""

    daemon: ImexDaemonSettings
    daemon_namespace: str = DEFAULT_DAEMON_NAMESPACE
    """Daemons run here, and clique objects, certificates and warm ComputeDomains are here, too."""
    additional_namespaces: tuple[str, ...] = ()
    """Earlier installations may have left daemons here: they are found and deleted, never created."""
    imex_mode: ImexMode = ImexMode.DRIVER_MANAGED
    isolation: ImexIsolation = ImexIsolation.DOMAIN
    """Of nodes and ComputeDomains that do not carry the isolation label."""
    lost_after: float = 300.0
    """Seconds after which a node that is not ready counts as lost. Gangs use the same time."""

    quota: QuotaMode = QuotaMode.NONE

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces in which daemons may be."""
        return (self.daemon_namespace, *self.additional_namespaces)
