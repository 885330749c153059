"""A rack with all that its drawing depends on, and nothing else: equal frames are drawn equal.

Times are no part of a frame, and what was read of other racks is not either; that a layer or a domain is not
known any more is.
"""

from collections.abc import Mapping

import msgspec

from rackloom.prove.picture.values import DomainSeen, Layer
from rackloom.web.scene import RackSeats, Scene

Laid = tuple[str, str]
"""UID and name of a ComputeDomain."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One rack."""

    rack: RackSeats
    known: frozenset[Layer]
    """Layers of which what they say is current."""
    paused: Mapping[str, bool]
    """Of each of its domains whose controllers answer, whether it is paused."""
    silent: bool
    """Whether the controllers of a domain of it do not answer."""
    tenants: Mapping[str, str]
    """Organisations of the tenants that hold something in it, by their ids."""
    over: Mapping[str, Laid]
    """The ComputeDomain of each of its nodes that is a member of one."""

    def answers(self, domain: str) -> bool:
        """Whether the controllers of a domain answer."""
        return domain in self.paused


def frames(whole: Scene) -> dict[str, Frame]:
    """Every rack of a scene, by name and in order."""
    known = frozenset(layer for layer in Layer if whole.known(layer))
    over = {node.name: (one.uid, one.key) for one in whole.compute_domains for node in one.status.nodes}
    return {rack.name: _frame(whole, known, over, rack) for rack in whole.racks}


def _frame(whole: Scene, known: frozenset[Layer], over: Mapping[str, Laid], rack: RackSeats) -> Frame:
    domains = rack.domains
    answering = [seen for uuid in domains if (seen := whole.domains.get(uuid)) is not None and _answers(seen)]
    return Frame(
        rack=rack,
        known=known,
        paused={one.uuid: one.paused for one in answering},
        silent=len(answering) < len(domains),
        tenants={id_: whole.tenants[id_] for id_ in rack.tenants if id_ in whole.tenants},
        over={name: over[name] for name in rack.nodes if name in over},
    )


def _answers(seen: DomainSeen) -> bool:
    return seen.observed_at is not None and seen.unknown_since is None
