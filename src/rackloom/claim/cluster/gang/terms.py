"""What the members of each group ask of their trays beside devices, as the planner takes it. Pure."""

from collections.abc import Mapping, Sequence

from rackloom.claim.cluster.gang.honoured import check_honoured
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.neighbours import apart_groups
from rackloom.claim.cluster.gang.where import Where, where_of
from rackloom.claim.place.values import Terms
from rackloom.errors import Refused

_READ = ("nodeSelector", "affinity", "tolerations")
_APART_FIX = "give those that differ a group of their own (label rackloom.dev/gang-group)"


def terms_of(groups: Mapping[str, Sequence[Member]]) -> dict[str, Terms | None]:
    """The terms of each group; None for one that asks for nothing. Raises Refused where members differ."""
    apart = apart_groups(groups)
    return {name: _terms(name, _shared_where(members), apart[name]) for name, members in groups.items()}


def own_terms(member: Member) -> Terms:
    """What a pod asks of its node by itself, its pin included where it was let go."""
    return Terms(where=where_of(member.obj["spec"]).text)


def check(members: Sequence[Member], clique_label: str, *, is_together: bool) -> None:
    """Raise Refused for rules that a gang is not placed by, and where members of a group differ in theirs."""
    check_honoured(members, clique_label, is_together=is_together)
    for group in dict.fromkeys(one.group for one in members):
        _shared_where([one for one in members if one.group == group])


def _shared_where(group: Sequence[Member]) -> Where:
    """Where all members of a group may go. Raises Refused where they differ, and for rules without sense."""
    first = group[0].obj["spec"] if group else {}
    where = where_of(first)
    asked = [first.get(key) for key in _READ]
    for member in group[1:]:
        spec = member.obj["spec"]
        if [spec.get(key) for key in _READ] != asked and where_of(spec) != where:
            reason = f"{group[0].name} and {member.name} of one group may not go to the same nodes"
            raise Refused(f"{reason} (nodeSelector, node affinity, tolerations)", nearest_fix=_APART_FIX)
    return where


def _terms(name: str, where: Where, apart: tuple[str, ...]) -> Terms | None:
    if not where.text and not apart:
        return None
    return Terms(where=where.text, likeness=name if apart else "", apart=apart)
