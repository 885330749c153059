"""Who runs the IMEX daemons, and what a ComputeDomain has for itself in a clique."""

from collections.abc import Mapping
from enum import StrEnum

from rackloom.claim.domain import names


class ImexMode(StrEnum):
    """Who runs nvidia-imex."""

    DRIVER_MANAGED = "driverManaged"
    HOST_MANAGED = "hostManaged"


class Isolation(StrEnum):
    """A ComputeDomain has the whole IMEX domain of its nodes, or one channel of a shared one."""

    DOMAIN = "domain"
    CHANNEL = "channel"


def isolation_of(labels: Mapping[str, str], default: Isolation) -> Isolation:
    """What the labels of a node or a ComputeDomain ask for; `default` without the label or a known value.

    The controller and the node plugins must be given the same default: a node in channel mode publishes no
    channel of its own, only `daemon-0`.
    """
    asked = labels.get(names.ISOLATION_LABEL)
    return Isolation(asked) if asked in set(Isolation) else default
