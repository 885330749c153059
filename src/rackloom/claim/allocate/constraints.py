"""Constraints of a claim: attributes that its devices must share, or must not.

A set of devices that breaks a constraint stays broken whatever is added, so each device is checked as it is
chosen. What a constraint remembers is a stack: undoing a choice restores exactly what was known before it.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping

from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.objects import DeviceAttribute, DeviceConstraint, ResourceClaim
from rackloom.claim.allocate.outcome import Stop
from rackloom.claim.allocate.requests import title

Values = frozenset[tuple[str, Hashable]]
"""Values of an attribute with their type; empty where no value of a known type is set."""


def values_of(attribute: DeviceAttribute, *, lists: bool) -> Values:
    """Values of an attribute. Lists count only where list attributes are on; a scalar is a list of one."""
    if lists:
        for kind, several in (
            ("int", attribute.ints),
            ("bool", attribute.bools),
            ("string", attribute.strings),
            ("version", attribute.versions),
        ):
            if several:
                return frozenset((kind, value) for value in several)
    for kind, one in (
        ("string", attribute.string),
        ("int", attribute.int_),
        ("bool", attribute.bool_),
        ("version", attribute.version),
    ):
        if one is not None:
            return frozenset([(kind, one)])
    return frozenset()


class Constraint:
    """One constraint, while devices are chosen.

    Matching devices all have one value in common (one that all of them have, not one per pair); distinct ones
    have none in common, pair by pair. A device without the attribute breaks both.
    """

    def __init__(
        self,
        attribute: str,
        requests: tuple[str, ...],
        *,
        distinct: bool,
        lists: bool,
        known: dict[Candidate, Values | None] | None = None,
    ) -> None:
        """`known` is shared by constraints of one attribute: N pairs have N of them."""
        self.attribute = attribute
        self.requests = requests
        self.distinct = distinct
        self._lists = lists
        self._seen: list[Values] = []
        self._known = {} if known is None else known

    def __str__(self) -> str:
        kind = "distinctAttribute" if self.distinct else "matchAttribute"
        scope = f" over {', '.join(self.requests)}" if self.requests else ""
        return f"{kind} {self.attribute}{scope}"

    def values(self, candidate: Candidate) -> Values | None:
        """What the constraint compares; None when the device lacks the attribute."""
        if candidate not in self._known:
            found = candidate.attribute(self.attribute)
            self._known[candidate] = None if found is None else values_of(found, lists=self._lists)
        return self._known[candidate]

    def allows(self, values: Values | None) -> bool:
        """Whether a device of these values could be taken in now."""
        if values is None:
            return False
        if not self._seen:
            # Upstream compares a first device with nothing, so that even a value of a type it cannot compare
            # passes; only matching with list attributes looks at it.
            return bool(values) or self.distinct or not self._lists
        if self.distinct:
            return bool(values) and all(values.isdisjoint(seen) for seen in self._seen)
        return bool(self._seen[-1] & values)

    def add(self, values: Values) -> None:
        """Take in a device of these values, which `allows` let through."""
        together = values if self.distinct or not self._seen else self._seen[-1] & values
        self._seen.append(together)

    def undo(self) -> None:
        """Forget the device that was taken in last."""
        self._seen.pop()

    def seen(self) -> Values:
        """All that the future depends on: the values still possible, or (distinct) those that are gone."""
        return frozenset().union(*self._seen) if self.distinct else frozenset(*self._seen[-1:])

    @property
    def started(self) -> bool:
        """Whether a device was taken in."""
        return bool(self._seen)


def constraints_of(claim: ResourceClaim, features: Features) -> tuple[Constraint, ...]:
    """The constraints of a claim. Raises Stop for one of an unknown kind."""
    known: defaultdict[str, dict[Candidate, Values | None]] = defaultdict(dict)
    return tuple(
        _constraint(claim, number, one, features, known)
        for number, one in enumerate(claim.spec.devices.constraints)
    )


def _constraint(
    claim: ResourceClaim,
    number: int,
    one: DeviceConstraint,
    features: Features,
    known: Mapping[str, dict[Candidate, Values | None]],
) -> Constraint:
    attribute = one.match_attribute if one.match_attribute is not None else one.distinct_attribute
    if attribute is None:
        raise Stop(
            f"claim {title(claim)}, constraint #{number}: empty constraint (unsupported constraint type?)"
        )
    return Constraint(
        attribute,
        one.requests,
        distinct=one.match_attribute is None,
        lists=features.list_type_attributes,
        known=known[attribute],
    )
