"""How many GPUs one member asks for: counted by its containers, and read from what it claims.

It is read from the text alone, so that it stays the same while drivers publish more or less: a placed gang
whose pods ask for something else is placed anew. What claims get where is the allocator's word, by which the
planner counts the members that a tray can serve, whatever their classes are called (`place/reading/rooms`).
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from rackloom.claim.cluster.gang.claimed import Known, asked_by, takes, takes_devices
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Object
from rackloom.claim.place.values import Tray
from rackloom.errors import Refused


class Demand(msgspec.Struct, frozen=True):
    """Of a pod, or of one claim."""

    gpus: int = 0
    whole: bool = False
    """A tray of its own: all of its GPUs, or a channel, of which a node has one (`channel-0`)."""

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(self.gpus + other.gpus, self.whole or other.whole)


def claim_demand(spec: Object) -> Demand:
    """What the spec of a ResourceClaim asks for by the class `gpu.nvidia.com`, and by that of channels."""
    requests = (spec.get("devices") or {}).get("requests") or ()
    return sum((_request(one) for one in requests), Demand())


def member_demand(member: Member, known: Known) -> Demand:
    """What a pod asks for. Raises Refused for a claim or a template that does not exist.

    Channels that it shares with other pods (in channel mode) are not its own, and are not counted.
    """
    if member.uncounted:
        fix = "name a ResourceClaimTemplate in spec.resourceClaims instead"
        reason = f"pod {member.name} asks for {member.uncounted[0]}, which is not counted for gangs"
        raise Refused(reason, nearest_fix=fix)
    templates = (known.template(name) for name in member.pod.templates)
    claims = (known.claim(name) for name in member.pod.named_claims)
    claimed = (*templates, *(one for one in claims if takes_devices(one)))
    return sum(map(claim_demand, claimed), Demand(member.gpus))


def group_demand(members: Iterable[Member], known: Known) -> Demand:
    """What each member of a group asks for, the hungriest one's. Raises Refused."""
    asked = [member_demand(one, known) for one in members]
    return Demand(max((one.gpus for one in asked), default=0), any(one.whole for one in asked))


class _Trays(msgspec.Struct, frozen=True):
    """The largest trays of a clique, as many as there are members to share it."""

    gpus: int
    """What each of them has, or more."""
    count: int
    are_mixed: bool


def whole_tray(trays: Sequence[Tray], members: int, gpus: int, taken: Collection[str] = ()) -> int:
    """GPUs of the tray that a member takes whole: `members` share a clique, and one counts `gpus`.

    It is what each of the largest trays has of the clique where they fit; without the trays that are `taken`
    by others, as far as there are enough. A clique of like trays is before a mixed one, and one of smaller
    trays before one of larger: what other cliques have must not keep a gang from the one where it fits.
    Channels are where cliques are, and not on a larger node without one (no NVLink fabric).
    """
    candidates = _candidates(trays)
    free = _best([one for one in candidates if one.name not in taken], members, gpus)
    return (free if _fits(free, members, gpus) else _best(candidates, members, gpus)).gpus


def _best(trays: Sequence[Tray], members: int, gpus: int) -> _Trays:
    cliques: dict[str, list[int]] = {}
    for tray in trays:
        cliques.setdefault(tray.clique or tray.name, []).append(tray.gpus)
    found = [_largest(sizes, members) for sizes in cliques.values()]
    return min(
        found,
        key=lambda one: (one.gpus < gpus, -one.count, one.are_mixed, one.gpus),
        default=_Trays(0, 0, are_mixed=False),
    )


def _largest(sizes: list[int], members: int) -> _Trays:
    chosen = sorted(sizes, reverse=True)[:members]
    return _Trays(chosen[-1], len(chosen), are_mixed=chosen[0] != chosen[-1])


def _fits(found: _Trays, members: int, gpus: int) -> bool:
    return found.count == members and found.gpus >= gpus


def _candidates(trays: Sequence[Tray]) -> Sequence[Tray]:
    """Those that are open and in a clique, as far as there are any."""
    opened = [tray for tray in trays if tray.shut is None]
    return [tray for tray in opened if tray.clique is not None] or opened or trays


def _request(request: Object) -> Demand:
    asked = asked_by(request)
    if asked.get("deviceClassName") == names.CHANNEL_CLASS:
        return Demand(whole=True)
    if asked.get("deviceClassName") != names.GPU_DRIVER or not takes(asked):
        return Demand()
    return Demand(whole=True) if asked.get("allocationMode") == "All" else Demand(int(asked.get("count", 1)))
