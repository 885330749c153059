"""How many GPUs one member needs: counted by its containers, and claimed through templates."""

from collections.abc import Iterable, Sequence

import msgspec

from rackloom.claim.cluster.gang.claimed import Known, takes_devices
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Object
from rackloom.errors import Refused


class Demand(msgspec.Struct, frozen=True):
    """Of a pod, or of one claim."""

    gpus: int = 0
    whole: bool = False
    """A tray of its own: all of its GPUs, or a channel, of which a node has one (`channel-0`)."""

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(self.gpus + other.gpus, self.whole or other.whole)


def claim_demand(spec: Object) -> Demand:
    """What the spec of a ResourceClaim asks for; of alternatives, the first."""
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


def group_gpus(members: Iterable[Member], known: Known, tray_gpus: int) -> int:
    """GPUs of each member of a group, the hungriest one's; `tray_gpus` are those of a whole tray."""
    asked = [member_demand(one, known) for one in members]
    return max((tray_gpus if one.whole else one.gpus for one in asked), default=0)


def _request(request: Object) -> Demand:
    alternatives: Sequence[Object] = request.get("firstAvailable") or ({},)
    asked: Object = request.get("exactly") or alternatives[0]
    if asked.get("deviceClassName") == names.CHANNEL_CLASS:
        return Demand(whole=True)
    if asked.get("deviceClassName") != names.GPU_DRIVER:
        return Demand()
    return Demand(whole=True) if asked.get("allocationMode") == "All" else Demand(int(asked.get("count", 1)))
