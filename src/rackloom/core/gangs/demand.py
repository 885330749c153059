"""What the members of a gang claim, and how many GPUs that is.

What the members of a group claim must be the same, since the search counts one kind of claim per group. Two
members cannot name one ResourceClaim for devices, because its devices are on one node. IMEX channels are not
counted as devices: a node has one, so a member with a channel takes a whole tray. Requests with adminAccess
take no device. The number of GPUs is read from the text of the pods alone (container limits of
`nvidia.com/gpu`, and claims by the class `gpu.nvidia.com`), so that it does not change while drivers publish
more or less.

Members that take a tray whole get the GPU count of the trays that fit (`whole_tray_gpus`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from rackloom.core.allocate.objects import ObjectMeta, ResourceClaim, ResourceClaimSpec
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import Object
from rackloom.core.cluster.trays import PlacementTray
from rackloom.core.gangs.snapshot import ClusterLists
from rackloom.core.gangs.spec import GangMember
from rackloom.core.gangs.terms import SPLIT_GROUP_FIX
from rackloom.core.gangs.trays import MemberClaims
from rackloom.errors import Refused

# Device claims of members.


_CHANNELS = (names.CHANNEL_CLASS, names.ISOLATED_CHANNEL_CLASS)
_READ_FIX = "use the fields of resource.k8s.io/v1 that this version of rackloom knows"
ClaimSpecs = Mapping[tuple[str, str], Object]
"""Claims by (`claim`, name) and claim templates by (`claim template`, name)."""


def claim_specs(cluster: ClusterLists, namespace: str) -> ClaimSpecs:
    """All claims and claim templates that a pod of the namespace can name."""
    return {
        (kind, obj["metadata"]["name"]): obj
        for kind, objects in (("claim", cluster.claims), ("claim template", cluster.templates))
        for obj in objects
        if obj["metadata"].get("namespace") == namespace
    }


def _claim_spec(specs: ClaimSpecs, kind: str, name: str) -> Object:
    if (kind, name) not in specs:
        raise Refused(f"{kind} {name} does not exist", nearest_fix="create it")
    spec: Object = specs[kind, name]["spec"]
    return spec if kind == "claim" else spec["spec"]


class GroupClaims(msgspec.Struct, frozen=True, kw_only=True):
    """What each member of a group claims."""

    kind: str
    """The names of the templates and claims, which identify it in the placement request."""
    claims: MemberClaims


def group_claims(group: Iterable[GangMember], specs: ClaimSpecs) -> GroupClaims | None:
    """What the members of a group claim; None where they claim nothing, so that any tray serves them.

    Raises Refused where they differ, where two name one claim, or for a claim that cannot be read.
    """
    members = tuple(group)
    # The devices of a claim are on one node, so all pods that share it would have to go there.
    seen: set[str] = set()
    for name in (name for member in members for name in member.pod.named_claims):
        if name in seen and claims_devices(_claim_spec(specs, "claim", name)):
            fix = "use resourceClaimTemplateName, which makes a claim for each pod"
            raise Refused(f"claim {name} is named by several members", nearest_fix=fix)
        seen.add(name)
    found: list[GroupClaims] = []
    for member in members:
        named = {name: _claim_spec(specs, "claim template", name) for name in member.pod.templates}
        named |= {f"claim {name}": _claim_spec(specs, "claim", name) for name in member.pod.named_claims}
        claims = {name: _read_claim(name, spec) for name, spec in named.items() if claims_devices(spec)}
        if claims:
            found.append(GroupClaims(kind="+".join(claims), claims=tuple(claims.values())))
    # Claims of other names may ask for the same, so it is their specs that are compared.
    for claimed in found[1:]:
        if [claim.spec for claim in claimed.claims] != [claim.spec for claim in found[0].claims]:
            reason = f"members of one group claim {found[0].kind} and {claimed.kind}"
            raise Refused(reason, nearest_fix=SPLIT_GROUP_FIX)
    return found[0] if found else None


def claims_devices(spec: Object) -> bool:
    """Channels count with the tray, and requests with adminAccess take no device."""
    requests = (spec.get("devices") or {}).get("requests") or ()
    return any(request_takes_device(requested_device(request)) for request in requests)


def request_takes_device(requested: Object) -> bool:
    """Whether a request takes a device; `requested` comes from `requested_device`."""
    return requested.get("deviceClassName") not in _CHANNELS and not requested.get("adminAccess")


def requested_device(request: Object) -> Object:
    """What a request asks for; of several alternatives, the first."""
    alternatives: Sequence[Object] = request.get("firstAvailable") or ({},)
    requested: Object = request.get("exactly") or alternatives[0]
    return requested


def _read_claim(name: str, spec: Object) -> ResourceClaim:
    try:
        claim_spec = msgspec.convert(spec, ResourceClaimSpec)
    except msgspec.ValidationError as error:
        raise Refused(f"what {name} claims cannot be read: {error}", nearest_fix=_READ_FIX) from error
    return ResourceClaim(metadata=ObjectMeta(name=name), spec=claim_spec)


def claim_gpus(kinds: Mapping[str, MemberClaims]) -> bool:
    """Whether members claim GPUs, by the class `gpu.nvidia.com`. The GPUs of others count by limits."""
    requests = (
        request for claims in kinds.values() for claim in claims for request in claim.spec.devices.requests
    )
    wanted = (request.exactly or next(iter(request.first_available), None) for request in requests)
    return any(request is not None and request.device_class_name == names.GPU_DRIVER for request in wanted)


# GPUs of members, and the size of a tray that a member takes whole.


class GpuDemand(msgspec.Struct, frozen=True):
    """The demand of a pod, or of one claim."""

    gpus: int = 0
    whole: bool = False
    """A dedicated tray: all of its GPUs, or its IMEX channel, of which a node has one (`channel-0`)."""

    def __add__(self, other: "GpuDemand") -> "GpuDemand":
        return GpuDemand(self.gpus + other.gpus, self.whole or other.whole)


def claim_demand(spec: Object) -> GpuDemand:
    """What the spec of a ResourceClaim asks for by the class `gpu.nvidia.com`, and by that of channels."""
    requests = (spec.get("devices") or {}).get("requests") or ()
    return sum((_request_demand(request) for request in requests), GpuDemand())


def member_demand(member: GangMember, specs: ClaimSpecs) -> GpuDemand:
    """What a pod asks for. Raises Refused for a claim or a template that does not exist.

    Channels that it shares with other pods (in channel mode) do not count.
    """
    if member.class_resources:
        fix = "name a ResourceClaimTemplate in spec.resourceClaims instead"
        reason = f"pod {member.name} asks for {member.class_resources[0]}, which is not counted for gangs"
        raise Refused(reason, nearest_fix=fix)
    templates = (_claim_spec(specs, "claim template", name) for name in member.pod.templates)
    claims = (_claim_spec(specs, "claim", name) for name in member.pod.named_claims)
    claimed = (*templates, *(claim for claim in claims if claims_devices(claim)))
    return sum(map(claim_demand, claimed), GpuDemand(member.gpus))


def group_demand(members: Iterable[GangMember], specs: ClaimSpecs) -> GpuDemand:
    """What each member of a group asks for: the largest demand of any. Raises Refused."""
    demands = [member_demand(member, specs) for member in members]
    return GpuDemand(
        max((demand.gpus for demand in demands), default=0), any(demand.whole for demand in demands)
    )


def whole_tray_gpus(
    trays: Sequence[PlacementTray], members: int, gpus: int, taken: Collection[str] = ()
) -> int:
    """GPUs of the tray that a member takes whole: `members` share a clique, and each counts `gpus`.

    The result is the GPU count of the largest trays of one clique, as many as there are members. The clique
    is chosen in this order: its trays have at least `gpus`; it has enough trays; they are of equal size;
    they are small. A larger tray elsewhere therefore never keeps a gang from a clique where it fits. Trays
    `taken` by others are left out where enough remain. Nodes without a clique (no NVLink fabric) have no
    channels, and count only where no open tray has a clique.
    """
    opened = [tray for tray in trays if tray.shut is None]
    candidates = [tray for tray in opened if tray.clique is not None] or opened or trays
    free = _best_clique([tray for tray in candidates if tray.name not in taken], members, gpus)
    is_enough = len(free) == members and free[-1] >= gpus
    return min(free if is_enough else _best_clique(candidates, members, gpus), default=0)


def _best_clique(trays: Iterable[PlacementTray], members: int, gpus: int) -> list[int]:
    """The GPU counts of the largest trays of the best clique, as many as there are members, largest first."""
    sizes_by_clique: dict[str, list[int]] = {}
    for tray in trays:
        sizes_by_clique.setdefault(tray.clique or tray.name, []).append(tray.gpus)
    largest = (sorted(sizes, reverse=True)[:members] for sizes in sizes_by_clique.values())
    # In order: enough GPUs, enough trays, equal trays, small trays.
    return min(
        largest,
        key=lambda sizes: (sizes[-1] < gpus, -len(sizes), sizes[0] != sizes[-1], sizes[-1]),
        default=[],
    )


def _request_demand(request: Object) -> GpuDemand:
    requested = requested_device(request)
    if requested.get("deviceClassName") == names.CHANNEL_CLASS:
        return GpuDemand(whole=True)
    if requested.get("deviceClassName") != names.GPU_DRIVER or not request_takes_device(requested):
        return GpuDemand()
    return (
        GpuDemand(whole=True)
        if requested.get("allocationMode") == "All"
        else GpuDemand(int(requested.get("count", 1)))
    )
