"""What the members of a gang ask for: device claims, and the number of GPUs of each member.

All members of a group must claim the same, since the placement search counts one kind of claim per
group. Two members cannot name one ResourceClaim for devices, because its devices are on one node. IMEX
channels are not counted as devices: a node has one, so a member with a channel takes a whole tray.
Requests with adminAccess take no device.

The number of GPUs is read from the text of the pods alone (container limits of `nvidia.com/gpu`, and
claims by the class `gpu.nvidia.com`), so that it does not change while drivers publish more or less. A
placed gang whose pods ask for something else is placed anew. How many members a tray can serve is
counted by the allocator (`core.gangs.trays`).
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from rackloom.core.allocate.objects import ObjectMeta, ResourceClaim, ResourceClaimSpec
from rackloom.core.domains import names
from rackloom.core.gangs.members import GangMember
from rackloom.core.gangs.snapshot import NamespaceClaims
from rackloom.core.gangs.trays import MemberClaims
from rackloom.core.kubernetes.objects import Object
from rackloom.core.place.placement_values import PlacementTray
from rackloom.errors import Refused

# Device claims of members.


_CHANNELS = (names.CHANNEL_CLASS, names.ISOLATED_CHANNEL_CLASS)
_READ_FIX = "use the fields of resource.k8s.io/v1 that this version of rackloom knows"
_OWN_GROUP_FIX = "give those that differ a group of their own (label rackloom.dev/gang-group)"


class GroupClaims(msgspec.Struct, frozen=True, kw_only=True):
    """What each member of a group claims."""

    kind: str
    """The names of the templates and claims: what the planner calls it."""
    claims: MemberClaims


def group_claims(group: Iterable[GangMember], known: NamespaceClaims) -> GroupClaims | None:
    """What the members of a group claim; those that claim nothing are served by any tray.

    Raises Refused where they differ, where two name one claim, or for a claim that cannot be read.
    """
    members = tuple(group)
    _check_not_shared(members, known)
    found = [one for one in (_member_claims(member, known) for member in members) if one is not None]
    if not found:
        return None
    first = found[0]
    other = next((one for one in found if _claim_specs(one) != _claim_specs(first)), None)
    if other is not None:
        raise Refused(f"members of one group claim {first.kind} and {other.kind}", nearest_fix=_OWN_GROUP_FIX)
    return first


def _check_not_shared(members: tuple[GangMember, ...], known: NamespaceClaims) -> None:
    """The devices of a claim are on one node, and pods that share it would all have to go there."""
    seen: set[str] = set()
    for member in members:
        for name in member.pod.named_claims:
            if name in seen and claims_devices(known.claim(name)):
                fix = "use resourceClaimTemplateName, which makes a claim for each pod"
                raise Refused(f"claim {name} is named by several members", nearest_fix=fix)
            seen.add(name)


def _member_claims(member: GangMember, known: NamespaceClaims) -> GroupClaims | None:
    specs = {name: known.template(name) for name in member.pod.templates}
    specs |= {f"claim {name}": known.claim(name) for name in member.pod.named_claims}
    claims = {name: _read_claim(name, spec) for name, spec in specs.items() if claims_devices(spec)}
    return GroupClaims(kind="+".join(claims), claims=tuple(claims.values())) if claims else None


def claims_devices(spec: Object) -> bool:
    """Channels are counted with the tray; administrators look at devices without taking them."""
    requests = (spec.get("devices") or {}).get("requests") or ()
    return any(request_takes_device(requested_device(request)) for request in requests)


def request_takes_device(asked: Object) -> bool:
    """The same of what one request asks for."""
    return asked.get("deviceClassName") not in _CHANNELS and not asked.get("adminAccess")


def requested_device(request: Object) -> Object:
    """What a request asks for; of alternatives, the first."""
    alternatives: Sequence[Object] = request.get("firstAvailable") or ({},)
    asked: Object = request.get("exactly") or alternatives[0]
    return asked


def _read_claim(name: str, spec: Object) -> ResourceClaim:
    try:
        read = msgspec.convert(spec, ResourceClaimSpec)
    except msgspec.ValidationError as error:
        raise Refused(f"what {name} claims cannot be read: {error}", nearest_fix=_READ_FIX) from error
    return ResourceClaim(metadata=ObjectMeta(name=name), spec=read)


def _claim_specs(one: GroupClaims) -> list[ResourceClaimSpec]:
    return [claim.spec for claim in one.claims]


# GPUs of members, and the size of a tray that a member takes whole.


class GpuDemand(msgspec.Struct, frozen=True):
    """Of a pod, or of one claim."""

    gpus: int = 0
    whole: bool = False
    """A tray of its own: all of its GPUs, or a channel, of which a node has one (`channel-0`)."""

    def __add__(self, other: "GpuDemand") -> "GpuDemand":
        return GpuDemand(self.gpus + other.gpus, self.whole or other.whole)


def claim_demand(spec: Object) -> GpuDemand:
    """What the spec of a ResourceClaim asks for by the class `gpu.nvidia.com`, and by that of channels."""
    requests = (spec.get("devices") or {}).get("requests") or ()
    return sum((_request_demand(request) for request in requests), GpuDemand())


def member_demand(member: GangMember, known: NamespaceClaims) -> GpuDemand:
    """What a pod asks for. Raises Refused for a claim or a template that does not exist.

    Channels that it shares with other pods (in channel mode) are not its own, and are not counted.
    """
    if member.uncounted:
        fix = "name a ResourceClaimTemplate in spec.resourceClaims instead"
        reason = f"pod {member.name} asks for {member.uncounted[0]}, which is not counted for gangs"
        raise Refused(reason, nearest_fix=fix)
    templates = (known.template(name) for name in member.pod.templates)
    claims = (known.claim(name) for name in member.pod.named_claims)
    claimed = (*templates, *(claim for claim in claims if claims_devices(claim)))
    return sum(map(claim_demand, claimed), GpuDemand(member.gpus))


def group_demand(members: Iterable[GangMember], known: NamespaceClaims) -> GpuDemand:
    """What each member of a group asks for, the hungriest one's. Raises Refused."""
    asked = [member_demand(member, known) for member in members]
    return GpuDemand(max((one.gpus for one in asked), default=0), any(one.whole for one in asked))


class _LargestTrays(msgspec.Struct, frozen=True):
    """The largest trays of a clique, as many as there are members to share it."""

    gpus: int
    """What each of them has, or more."""
    count: int
    are_mixed: bool


def whole_tray_gpus(
    trays: Sequence[PlacementTray], members: int, gpus: int, taken: Collection[str] = ()
) -> int:
    """GPUs of the tray that a member takes whole: `members` share a clique, and one counts `gpus`.

    It is what each of the largest trays has of the clique where they fit; without the trays that are `taken`
    by others, as far as there are enough. A clique of like trays is before a mixed one, and one of smaller
    trays before one of larger: what other cliques have must not keep a gang from the one where it fits.
    Channels are where cliques are, and not on a larger node without one (no NVLink fabric).
    """
    candidates = _open_trays(trays)
    free = _best_clique([candidate for candidate in candidates if candidate.name not in taken], members, gpus)
    return (free if _fits_members(free, members, gpus) else _best_clique(candidates, members, gpus)).gpus


def _best_clique(trays: Sequence[PlacementTray], members: int, gpus: int) -> _LargestTrays:
    cliques: dict[str, list[int]] = {}
    for tray in trays:
        cliques.setdefault(tray.clique or tray.name, []).append(tray.gpus)
    found = [_largest_trays(sizes, members) for sizes in cliques.values()]
    return min(
        found,
        key=lambda one: (one.gpus < gpus, -one.count, one.are_mixed, one.gpus),
        default=_LargestTrays(0, 0, are_mixed=False),
    )


def _largest_trays(sizes: list[int], members: int) -> _LargestTrays:
    chosen = sorted(sizes, reverse=True)[:members]
    return _LargestTrays(chosen[-1], len(chosen), are_mixed=chosen[0] != chosen[-1])


def _fits_members(found: _LargestTrays, members: int, gpus: int) -> bool:
    return found.count == members and found.gpus >= gpus


def _open_trays(trays: Sequence[PlacementTray]) -> Sequence[PlacementTray]:
    """Those that are open and in a clique, as far as there are any."""
    opened = [tray for tray in trays if tray.shut is None]
    return [tray for tray in opened if tray.clique is not None] or opened or trays


def _request_demand(request: Object) -> GpuDemand:
    asked = requested_device(request)
    if asked.get("deviceClassName") == names.CHANNEL_CLASS:
        return GpuDemand(whole=True)
    if asked.get("deviceClassName") != names.GPU_DRIVER or not request_takes_device(asked):
        return GpuDemand()
    return (
        GpuDemand(whole=True)
        if asked.get("allocationMode") == "All"
        else GpuDemand(int(asked.get("count", 1)))
    )
