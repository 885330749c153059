"""Which members of a gang are on no tray together, and where pods of others keep them away. Pure.

It is so by required podAntiAffinity, by constraints that spread pods, and by ports of the host.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

import msgspec
from msgspec.structs import replace

from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.pods import has_ended
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.neighbours import (
    Apart,
    Known,
    Reaches,
    keys_of,
    known,
    known_there,
    required_terms,
)
from rackloom.claim.place.values import Site, Tray

HOST = Labels().host
"""The topology key by which a pod asks for a node of its own."""
_MOST = 1 << 16
"""Pairs of unlike members that are looked at; where there are more, no two are put on one tray."""
_WHY = "a pod there or near it and pods of the gang keep apart"


class _Neighbour(msgspec.Struct, frozen=True):
    """A pod, for those that may have to share a tray with it."""

    known: Known
    ports: frozenset[tuple[str, int]]
    """Of the host, by protocol: a node has each once."""

    def bars(self, other: "_Neighbour") -> bool:
        """Whether the two are never on one tray."""
        return any(True for _ in self.barred_by(other))

    def barred_by(self, other: "_Neighbour") -> Iterator[str]:
        """`Apart.by` of each reason why they are not."""
        if not self.ports.isdisjoint(other.ports):
            yield ""
        yield from self.known.barred_by(other.known)


def apart_groups(groups: Mapping[str, Sequence[Member]]) -> dict[str, tuple[str, ...]]:
    """By group: those, perhaps itself, of which no member is on a tray with one of it."""
    by_group = {name: [_member(one) for one in members] for name, members in groups.items()}
    everybody = [one for some in by_group.values() for one in some]
    read = set(_keys(everybody))
    likes = {name: _like(some, read) for name, some in by_group.items()}
    return {name: tuple(other for other in likes if _are_apart(likes, name, other)) for name in likes}


def kept_away(site: Site, members: Iterable[Member], pods: Iterable[Object], nodes: Iterable[Object]) -> Site:
    """The site without trays that a pod keeps members off, or they keep off for it; all are of others.

    `nodes`: all of the cluster, since a pod on any of them may want its clique or its zone without members.
    """
    mine = [_neighbour(one.obj, known(one.obj, HOST)) for one in members]
    choosy = any(one.known.apart or one.ports for one in mine)
    theirs = [
        (pod["spec"]["nodeName"], _neighbour(pod, known_there(pod, HOST)))
        for pod in pods
        if _is_there(pod) and (choosy or required_terms(pod["spec"], "podAntiAffinity"))
    ]
    alike = _like(mine, set(_keys([*mine, *(one for _, one in theirs)])))
    reaches = Reaches(nodes)
    barred = {
        name for node, other in theirs for one in alike for name in reaches.around(node, one.barred_by(other))
    }
    return Site(tuple(_shut(tray, barred) for tray in site.trays), site.holds) if barred else site


def spread_out(spec: Object) -> Iterator[Object]:
    """The constraints of a pod that keep it waiting where its like are not spread as it asks."""
    for one in spec.get("topologySpreadConstraints") or ():
        if one.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule":
            yield one


def _neighbour(pod: Object, seen: Known) -> _Neighbour:
    ports = (port for one in pod["spec"].get("containers") or () for port in one.get("ports") or ())
    taken = ((one.get("protocol", "TCP"), one["hostPort"]) for one in ports if one.get("hostPort"))
    return _Neighbour(seen, frozenset(taken))


def _member(member: Member) -> _Neighbour:
    """With the pods that it is spread from: one on a node is as even as it gets."""
    found = _neighbour(member.obj, known(member.obj, HOST))
    spread = (
        Apart(selector=one.get("labelSelector"), namespaces=(), everywhere=False)
        for one in spread_out(member.obj["spec"])
    )
    return replace(found, known=replace(found.known, apart=(*found.known.apart, *spread)))


def _keys(some: Iterable[_Neighbour]) -> Iterator[str]:
    return (key for one in some for term in one.known.apart for key in keys_of(term.selector))


def _like(some: Iterable[_Neighbour], read: Collection[str]) -> list[_Neighbour]:
    """At most two of those that are alike, by labels that anybody reads."""
    found: dict[bytes, list[_Neighbour]] = {}
    for one in some:
        labels = {key: value for key, value in one.known.labels.items() if key in read}
        bare = replace(one, known=replace(one.known, labels=labels))
        alike = found.setdefault(msgspec.json.encode(bare, order="deterministic"), [])
        if len(alike) < 2:
            alike.append(bare)
    return [one for alike in found.values() for one in alike]


def _are_apart(likes: Mapping[str, list[_Neighbour]], name: str, other: str) -> bool:
    pairs = combinations(likes[name], 2) if name == other else product(likes[name], likes[other])
    if len(likes[name]) * len(likes[other]) > _MOST:
        return True
    return any(one.bars(another) for one, another in pairs)


def _is_there(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName")) and not has_ended(pod)


def _shut(tray: Tray, barred: Collection[str]) -> Tray:
    if tray.name not in barred:
        return tray
    return replace(tray, shut=_WHY if tray.shut is None else f"{tray.shut}; {_WHY}")
