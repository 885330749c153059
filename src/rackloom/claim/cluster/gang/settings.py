"""What an operator chooses for the gang controller."""

import msgspec

from rackloom.claim.domain import names
from rackloom.errors import Refused


class GangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    settle: float = 2.0
    """Between the reservation of the last tray and a fresh look at all of them: kube-scheduler may still bind
    a pod that it decided on before it saw the taint."""
    lost_after: float = 300.0
    """A tray that is not ready for so long is lost: its members are deleted and go to a spare. As long as the
    node controller waits before it evicts pods."""
    bind_after: float = 120.0
    """A pod that was let go and cannot be bound for so long is looked after; and a plan of which no pod was
    let go is given up when some are missing for so long; and the last pods of a Job, for so long beyond its
    longest pause."""
    again: float = 15.0
    """Between two attempts to place a gang that does not fit: pods of others end without telling us. And, at
    least, between two looks at what the owners of its pods say."""
    max_spares: int = 8
    """Spare trays that all gangs of a namespace may keep together: no ResourceQuota counts them, since nobody
    runs on them."""
    clique_label: str = names.GPU_CLIQUE_LABEL
    """On nodes: which of them share memory over NVLink."""


def checked(settings: GangSettings) -> GangSettings:
    """The settings. Raises Refused for what nobody can mean."""
    for name in ("settle", "lost_after", "bind_after", "again"):
        if not 0 < getattr(settings, name) < float("inf"):
            raise Refused(f"{name} is {getattr(settings, name)}", nearest_fix="use seconds above 0")
    if settings.max_spares < 0:
        raise Refused(f"max_spares is {settings.max_spares}", nearest_fix="use 0 for none")
    if not settings.clique_label:
        raise Refused("clique_label is empty", nearest_fix=f"use {names.GPU_CLIQUE_LABEL}")
    return settings
