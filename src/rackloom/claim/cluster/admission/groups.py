"""The pods of a namespace that claim channels of one ComputeDomain, as a whole."""

import msgspec

from rackloom.claim.cluster.admission.affinity import has_clique_rule
from rackloom.claim.cluster.admission.shapes import Owner, Pod


class Group(msgspec.Struct, frozen=True):
    """Live pods with a channel of one ComputeDomain."""

    pods: tuple[Pod, ...] = ()
    clique: str | None = None
    """Where they are: that of a node to which one of them is bound. None: none is in a clique yet."""

    @property
    def owners(self) -> tuple[Owner | None, ...]:
        """The controllers that made them, each once; None stands for all that people made."""
        return tuple({one.owner.uid if one.owner else "": one.owner for one in self.pods}.values())

    @property
    def waiting(self) -> tuple[Pod, ...]:
        """Those without a node, less those of gangs, to which somebody else sees."""
        return tuple(one for one in self.pods if not one.is_bound and not one.is_of_a_gang)

    @property
    def is_settling(self) -> bool:
        """Whether their clique is not known yet, and not all have a rule that would lead them to it."""
        if any(one.is_bound for one in self.pods):
            return False
        return any(not has_clique_rule(one.spec) for one in self.waiting)
