"""What the members of a gang claim.

IMEX channels are not among it: a node has one, so a member with a channel takes a whole tray anyway.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rackloom.claim.allocate.objects import ObjectMeta, ResourceClaim, ResourceClaimSpec
from rackloom.claim.cluster.gang.counted import Claims
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.site import Objects
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Object
from rackloom.errors import Refused

_CHANNELS = (names.CHANNEL_CLASS, names.ISOLATED_CHANNEL_CLASS)
_READ_FIX = "use the fields of resource.k8s.io/v1 that this version of rackloom knows"
_APART_FIX = "give those that differ a group of their own (label rackloom.dev/gang-group)"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What each member of a group claims."""

    kind: str
    """The names of the templates and claims: what the planner calls it."""
    claims: Claims


class Known:
    """Claim templates and claims of one namespace, by name. Raises Refused for what is not there."""

    def __init__(self, objects: Objects, namespace: str) -> None:
        self._templates = _named(objects.templates, namespace)
        self._claims = _named(objects.claims, namespace)

    def template(self, name: str) -> Object:
        """The spec of the claims that are made from a template."""
        return _found(self._templates, "claim template", name)["spec"]["spec"]  # type: ignore[no-any-return]

    def claim(self, name: str) -> Object:
        """The spec of a claim."""
        return _found(self._claims, "claim", name)["spec"]  # type: ignore[no-any-return]


def wanted(group: Iterable[Member], known: Known) -> Wanted | None:
    """What the members of a group claim; those that claim nothing are served by any tray.

    Raises Refused where they differ, where two name one claim, or for a claim that cannot be read.
    """
    members = tuple(group)
    _check_apart(members, known)
    found = [one for one in (_wanted(member, known) for member in members) if one is not None]
    if not found:
        return None
    first = found[0]
    other = next((one for one in found if _specs(one) != _specs(first)), None)
    if other is not None:
        raise Refused(f"members of one group claim {first.kind} and {other.kind}", nearest_fix=_APART_FIX)
    return first


def _check_apart(members: tuple[Member, ...], known: Known) -> None:
    """The devices of a claim are on one node, and pods that share it would all have to go there."""
    seen: set[str] = set()
    for member in members:
        for name in member.pod.named_claims:
            if name in seen and takes_devices(known.claim(name)):
                fix = "use resourceClaimTemplateName, which makes a claim for each pod"
                raise Refused(f"claim {name} is named by several members", nearest_fix=fix)
            seen.add(name)


def _wanted(member: Member, known: Known) -> Wanted | None:
    specs = {name: known.template(name) for name in member.pod.templates}
    specs |= {f"claim {name}": known.claim(name) for name in member.pod.named_claims}
    claims = {name: _claim(name, spec) for name, spec in specs.items() if takes_devices(spec)}
    return Wanted(kind="+".join(claims), claims=tuple(claims.values())) if claims else None


def takes_devices(spec: Object) -> bool:
    """Channels are counted with the tray; administrators look at devices without taking them."""
    requests = (spec.get("devices") or {}).get("requests") or ()
    return any(takes(asked_by(one)) for one in requests)


def takes(asked: Object) -> bool:
    """The same of what one request asks for."""
    return asked.get("deviceClassName") not in _CHANNELS and not asked.get("adminAccess")


def asked_by(request: Object) -> Object:
    """What a request asks for; of alternatives, the first."""
    alternatives: Sequence[Object] = request.get("firstAvailable") or ({},)
    asked: Object = request.get("exactly") or alternatives[0]
    return asked


def _claim(name: str, spec: Object) -> ResourceClaim:
    try:
        read = msgspec.convert(spec, ResourceClaimSpec)
    except msgspec.ValidationError as error:
        raise Refused(f"what {name} claims cannot be read: {error}", nearest_fix=_READ_FIX) from error
    return ResourceClaim(metadata=ObjectMeta(name=name), spec=read)


def _specs(one: Wanted) -> list[ResourceClaimSpec]:
    return [claim.spec for claim in one.claims]


def _named(objects: Iterable[Object], namespace: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["metadata"].get("namespace") == namespace}


def _found(objects: Mapping[str, Object], what: str, name: str) -> Object:
    if name not in objects:
        raise Refused(f"{what} {name} does not exist", nearest_fix="create it")
    return objects[name]
