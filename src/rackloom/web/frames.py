"""A rack with all that its drawing depends on, and nothing else: equal frames are drawn equal.

Times are no part of a frame, and what was read of other racks is not either; that a layer or a domain is not
known any more is.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from rackloom.prove.picture.values import DomainSeen, Layer
from rackloom.web.scene import RackSeats, Scene

Laid = tuple[str, str]
"""UID and name of a ComputeDomain."""


class Fabric(StrEnum):
    """What is known of the NVLink domains of a rack, the worst first."""

    DISPUTED = "in dispute"
    SILENT = "not read lately"
    PAUSED = "paused"
    READ = "as last read"


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One rack."""

    rack: RackSeats
    known: frozenset[Layer]
    """Layers of which what they say is current."""
    answering: frozenset[str]
    """Those of its domains of which what the controllers show is how things are."""
    named: tuple[str, ...]
    """UUIDs of its domains; none for a tenant, who is not told."""
    fabric: Fabric
    problems: tuple[str, ...]
    """Why the others are not known, in words; a tenant is not told."""
    tenants: Mapping[str, str]
    """Organisations of the tenants that hold something in it, by their ids."""
    over: Mapping[str, Laid]
    """The ComputeDomain of each of its nodes that is a member of one."""

    def answers(self, domain: str) -> bool:
        """Whether the controllers of a domain answer."""
        return domain in self.answering


def frames(whole: Scene) -> dict[str, Frame]:
    """Every rack of a scene, by name and in order."""
    known = frozenset(layer for layer in Layer if whole.known(layer))
    over = {node.name: (one.uid, one.key) for one in whole.compute_domains for node in one.status.nodes}
    return {rack.name: _frame(whole, known, over, rack) for rack in whole.racks}


def _frame(whole: Scene, known: frozenset[Layer], over: Mapping[str, Laid], rack: RackSeats) -> Frame:
    seen = [whole.domains[uuid] for uuid in sorted(rack.domains) if uuid in whole.domains]
    answering = [one for one in seen if one.answers]
    return Frame(
        rack=rack,
        known=known,
        answering=frozenset(one.uuid for one in answering),
        named=tuple(sorted(rack.domains - {""})) if whole.operator else (),
        fabric=_fabric(seen, all_answer=len(answering) == len(rack.domains)),
        problems=tuple(dict.fromkeys(one.problem for one in seen if one.problem)),
        tenants={id_: whole.tenants[id_] for id_ in rack.tenants if id_ in whole.tenants},
        over={name: over[name] for name in rack.nodes if name in over},
    )


def _fabric(seen: Sequence[DomainSeen], *, all_answer: bool) -> Fabric:
    if any(one.disputed for one in seen):
        return Fabric.DISPUTED
    if not all_answer:
        return Fabric.SILENT
    return Fabric.PAUSED if any(one.paused for one in seen) else Fabric.READ
