"""Scheduling constraints of member pods, translated for the placement search, or refused.

kube-scheduler enforces a pod's rules on the tray to which it is pinned, so the search must know them
first:

- node rules (nodeSelector, node affinity, tolerations) close trays to the members of a group;
- required podAntiAffinity by host, hard topology spread by host, and host ports keep members of two
  groups, or members and pods of others, off one tray. Only two of each class of interchangeable pods
  are compared, and with too many unlike pairs no two members share a tray;
- everything else that member pods require (podAffinity other than by clique to the gang itself,
  anti-affinity by other keys than the host, spread with another skew) is refused, with what to change.
  Anti-affinity of other jobs' pods counts for any topology key, so all nodes of the cluster are looked
  at.

The node rules of a group are stored in the plan as canonical JSON text: equal rules have equal text.
All members of a group must have the same rules.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import NodeSelector, NodeSelectorRequirement, NodeSelectorTerm
from rackloom.core.allocate.pools import MalformedNodeSelector
from rackloom.core.gangs import spec
from rackloom.core.gangs import spec as gangs_spec
from rackloom.core.gangs.members import GangMember
from rackloom.core.kubernetes.objects import Object, has_pod_ended
from rackloom.core.kubernetes.pods import CHANNEL_LABEL, GANG_LABEL
from rackloom.core.place.observed_site import combine_sites
from rackloom.core.place.placement_values import PlacementSite, PlacementTerms, PlacementTray, SchedulerLabels
from rackloom.core.place.pod_constraints import (
    AntiAffinityTerm,
    JsonMapping,
    NodeRule,
    PodIdentity,
    Toleration,
    TopologyDomains,
    blocking_taints,
    bound_pod_identity,
    is_supported_term,
    pod_identity,
    read_node_rule,
    required_terms,
    selector_keys,
    selector_matches,
    unmet_requirements,
)
from rackloom.errors import Refused

# Node rules.


_CONDITION_TAINT_PREFIX = "node.kubernetes.io/"
"""Taints that repeat what is wrong with a node: the API server lets pods tolerate some for a while."""
_TOLERATES_RESERVATIONS = Toleration(key=spec.GANG_TAINT, operator="Exists")
"""Reservations are told by plans, and a pod that is let go tolerates its own."""


class NodeRequirements(msgspec.Struct, frozen=True, omit_defaults=True):
    """What members ask of a node."""

    rule: NodeRule = NodeRule()
    tolerations: tuple[Toleration, ...] = ()

    @property
    def text(self) -> str:
        """It as text, the same for what is the same; "" where nothing is asked."""
        return "" if self == NodeRequirements() else msgspec.json.encode(self, order="deterministic").decode()

    def closes(self, tray: PlacementTray, node: Object) -> PlacementTray:
        """The tray as members see it. Raises MalformedSelector."""
        taints = [
            f"taint {taint}" for taint in blocking_taints(node, (*self.tolerations, _TOLERATES_RESERVATIONS))
        ]
        unfit = list(unmet_requirements(self.rule, node))
        why = [*([] if tray.shut is None else [tray.shut]), *taints, *unfit]
        return replace(tray, shut="; ".join(why) or None, is_unfit=bool(unfit))


def node_requirements(spec: Object) -> NodeRequirements:
    """Read the spec of a pod that is held."""
    tolerations = msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...])
    kept = (
        toleration
        for toleration in tolerations
        if not toleration.key.startswith(_CONDITION_TAINT_PREFIX) and toleration.key != gangs_spec.GANG_TAINT
    )
    near = {str(term.get("topologyKey")) for term in required_terms(spec, "podAffinity")}
    return NodeRequirements(_require_labels(read_node_rule(spec), sorted(near)), tuple(dict.fromkeys(kept)))


def _require_labels(rule: NodeRule, keys: Sequence[str]) -> NodeRule:
    """The rule for nodes that have these labels: a node without one is near nobody."""
    if not keys:
        return rule
    has = tuple(NodeSelectorRequirement(key=key, operator="Exists") for key in keys)
    if rule.affinity is None:
        return replace(
            rule, affinity=NodeSelector(node_selector_terms=(NodeSelectorTerm(match_expressions=has),))
        )
    terms = tuple(
        # An empty term selects no node, and must stay empty.
        replace(term, match_expressions=(*term.match_expressions, *has))
        if term != NodeSelectorTerm()
        else term
        for term in rule.affinity.node_selector_terms
    )
    return replace(rule, affinity=NodeSelector(node_selector_terms=terms))


def site_for_terms(
    site: PlacementSite, terms: Iterable[PlacementTerms | None], nodes: Mapping[str, Object]
) -> PlacementSite:
    """The site as it is to members with these terms, who may not go everywhere. Raises Refused."""
    wheres = dict.fromkeys("" if term is None else term.where for term in terms)
    return combine_sites(
        {text: PlacementSite(tuple(_trays_for_terms(site, text, nodes)), site.holds) for text in wheres}
    )


def _trays_for_terms(site: PlacementSite, text: str, nodes: Mapping[str, Object]) -> Iterator[PlacementTray]:
    where = _read_requirements(text)
    for tray in site.trays:
        try:
            yield where.closes(tray, nodes[tray.name])
        except MalformedNodeSelector as error:
            fix = "correct it in the pod template"
            raise Refused(f"node affinity of the pods cannot be read: {error}", nearest_fix=fix) from error


def _read_requirements(text: str) -> NodeRequirements:
    try:
        return msgspec.json.decode(text, type=NodeRequirements) if text else NodeRequirements()
    except msgspec.DecodeError as error:
        fix = "end its pods: the GangPlan was changed by somebody else"
        raise Refused(f"the plan says of its pods what cannot be read: {error}", nearest_fix=fix) from error


# Anti-affinity, spread and host ports: which pods never share a tray.


HOST_KEY = SchedulerLabels().host
"""The topology key by which a pod asks for a node of its own."""
_MOST_PAIRS = 1 << 16
"""Pairs of unlike members that are looked at; where there are more, no two are put on one tray."""
_KEPT_AWAY = "a pod there or near it and pods of the gang keep apart"


class _PodConstraints(msgspec.Struct, frozen=True):
    """A pod, for those that may have to share a tray with it."""

    known: PodIdentity
    ports: frozenset[tuple[str, int]]
    """Of the host, by protocol: a node has each once."""

    def bars(self, other: "_PodConstraints") -> bool:
        """Whether the two are never on one tray."""
        return any(True for _ in self.barred_by(other))

    def barred_by(self, other: "_PodConstraints") -> Iterator[str]:
        """`Apart.by` of each reason why they are not."""
        if not self.ports.isdisjoint(other.ports):
            yield ""
        yield from self.known.barred_by(other.known)


def separated_groups(groups: Mapping[str, Sequence[GangMember]]) -> dict[str, tuple[str, ...]]:
    """By group: those, perhaps itself, of which no member is on a tray with one of it."""
    by_group = {name: [_member_constraints(member) for member in members] for name, members in groups.items()}
    everybody = [one for some in by_group.values() for one in some]
    read = set(_read_label_keys(everybody))
    likes = {name: _two_of_each_class(some, read) for name, some in by_group.items()}
    return {name: tuple(other for other in likes if _are_separated(likes, name, other)) for name in likes}


def without_conflicting_trays(
    site: PlacementSite, members: Iterable[GangMember], pods: Iterable[Object], nodes: Iterable[Object]
) -> PlacementSite:
    """The site without trays that a pod keeps members off, or they keep off for it; all are of others.

    `nodes`: all of the cluster, since a pod on any of them may want its clique or its zone without members.
    """
    mine = [_pod_constraints(member.obj, pod_identity(member.obj, HOST_KEY)) for member in members]
    choosy = any(one.known.apart or one.ports for one in mine)
    theirs = [
        (pod["spec"]["nodeName"], _pod_constraints(pod, bound_pod_identity(pod, HOST_KEY)))
        for pod in pods
        if _is_on_node(pod) and (choosy or required_terms(pod["spec"], "podAntiAffinity"))
    ]
    alike = _two_of_each_class(mine, set(_read_label_keys([*mine, *(one for _, one in theirs)])))
    reaches = TopologyDomains(nodes)
    barred = {
        name for node, other in theirs for one in alike for name in reaches.around(node, one.barred_by(other))
    }
    return (
        PlacementSite(tuple(_shut_tray(tray, barred) for tray in site.trays), site.holds) if barred else site
    )


def hard_spread_constraints(spec: Object) -> Iterator[Object]:
    """The constraints of a pod that keep it waiting where its like are not spread as it asks."""
    for constraint in spec.get("topologySpreadConstraints") or ():
        if constraint.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule":
            yield constraint


def _pod_constraints(pod: Object, seen: PodIdentity) -> _PodConstraints:
    ports = (
        port for container in pod["spec"].get("containers") or () for port in container.get("ports") or ()
    )
    taken = ((port.get("protocol", "TCP"), port["hostPort"]) for port in ports if port.get("hostPort"))
    return _PodConstraints(seen, frozenset(taken))


def _member_constraints(member: GangMember) -> _PodConstraints:
    """With the pods that it is spread from: one on a node is as even as it gets."""
    found = _pod_constraints(member.obj, pod_identity(member.obj, HOST_KEY))
    spread = (
        AntiAffinityTerm(selector=constraint.get("labelSelector"), namespaces=(), everywhere=False)
        for constraint in hard_spread_constraints(member.obj["spec"])
    )
    return replace(found, known=replace(found.known, apart=(*found.known.apart, *spread)))


def _read_label_keys(some: Iterable[_PodConstraints]) -> Iterator[str]:
    return (key for one in some for term in one.known.apart for key in selector_keys(term.selector))


def _two_of_each_class(some: Iterable[_PodConstraints], read: Collection[str]) -> list[_PodConstraints]:
    """At most two of those that are alike, by labels that anybody reads."""
    found: dict[bytes, list[_PodConstraints]] = {}
    for one in some:
        labels = {key: value for key, value in one.known.labels.items() if key in read}
        bare = replace(one, known=replace(one.known, labels=labels))
        alike = found.setdefault(msgspec.json.encode(bare, order="deterministic"), [])
        if len(alike) < 2:
            alike.append(bare)
    return [one for alike in found.values() for one in alike]


def _are_separated(likes: Mapping[str, list[_PodConstraints]], name: str, other: str) -> bool:
    pairs = combinations(likes[name], 2) if name == other else product(likes[name], likes[other])
    if len(likes[name]) * len(likes[other]) > _MOST_PAIRS:
        return True
    return any(one.bars(another) for one, another in pairs)


def _is_on_node(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName")) and not has_pod_ended(pod)


def _shut_tray(tray: PlacementTray, barred: Collection[str]) -> PlacementTray:
    if tray.name not in barred:
        return tray
    return replace(tray, shut=_KEPT_AWAY if tray.shut is None else f"{tray.shut}; {_KEPT_AWAY}")


# Constraints that a gang cannot be placed by.


_OWN_LABELS = (GANG_LABEL, CHANNEL_LABEL, "batch.kubernetes.io/job-name", "job-name")
"""Labels that only pods of one gang have: those of a ComputeDomain are one, and so are those of a Job."""


def check_supported(members: Sequence[GangMember], clique_label: str, *, is_together: bool) -> None:
    """Raise Refused, with what to change, for a rule that is not kept when the gang is placed.

    `is_together`: all of the gang is in one clique.
    """
    for member in _one_of_each_class(members):
        spec = member.obj["spec"]
        near = (
            _unsupported_affinity(spec, clique_label, members)
            if is_together
            else _unsupported_segment_affinity(spec)
        )
        for why, fix in (*near, *_unsupported_anti_affinity(spec), *_unsupported_spread(spec)):
            raise Refused(f"pod {member.name} requires {why}, which gangs are not placed by", nearest_fix=fix)


def _one_of_each_class(members: Iterable[GangMember]) -> Iterator[GangMember]:
    """One of those that say the same: most pods of a job do."""
    said: list[tuple[object, object]] = []
    for member in members:
        spec = member.obj["spec"]
        one = (spec.get("affinity"), spec.get("topologySpreadConstraints"))
        if any(one) and one not in said:
            said.append(one)
            yield member


def _unsupported_affinity(
    spec: Object, clique_label: str, members: Sequence[GangMember]
) -> Iterator[tuple[str, str]]:
    for term in required_terms(spec, "podAffinity"):
        key = term.get("topologyKey")
        if key != clique_label:
            yield f"podAffinity by {key}", "take the term out, or prefer it instead"
        elif not _selects_gang_only(term, members):
            fix = f"take the term out, as a gang is in one clique without it, or select by label {GANG_LABEL}"
            yield f"podAffinity by {key} to pods that are not of the gang alone", fix


def _unsupported_segment_affinity(spec: Object) -> Iterator[tuple[str, str]]:
    for term in required_terms(spec, "podAffinity"):
        fix = "take the term out: members of a segment share a clique without it"
        yield f"podAffinity by {term.get('topologyKey')}", fix


def _selects_gang_only(term: JsonMapping, members: Sequence[GangMember]) -> bool:
    """Whether it selects members, and no pod of others: else it depends on where those are."""
    selector, namespace = term.get("labelSelector") or {}, members[0].namespace
    labels = members[0].pod.labels
    named = selector.get("matchLabels") or {}
    owned = any(key in named and named[key] == labels.get(key) for key in _OWN_LABELS)
    inside = not term.get("namespaceSelector") and set(term.get("namespaces") or ()) <= {namespace}
    return owned and inside and any(selector_matches(selector, member.pod.labels) for member in members)


def _unsupported_anti_affinity(spec: Object) -> Iterator[tuple[str, str]]:
    for term in required_terms(spec, "podAntiAffinity"):
        if term.get("topologyKey") != HOST_KEY:
            fix = f"use topologyKey {HOST_KEY}, or prefer the term instead"
            yield f"podAntiAffinity by {term.get('topologyKey')}", fix
        elif not is_supported_term(term, HOST_KEY):
            fix = "use labelSelector and namespaces alone"
            yield "podAntiAffinity with namespaceSelector, matchLabelKeys or mismatchLabelKeys", fix


def _unsupported_spread(spec: Object) -> Iterator[tuple[str, str]]:
    for constraint in hard_spread_constraints(spec):
        key, skew = constraint.get("topologyKey"), constraint.get("maxSkew")
        if key != HOST_KEY or skew != 1:
            fix = f"use ScheduleAnyway, or {HOST_KEY} with maxSkew 1: one member on a tray"
            yield f"topologySpreadConstraints by {key} with maxSkew {skew}", fix


# The terms of each group.


_NODE_RULE_FIELDS = ("nodeSelector", "affinity", "tolerations")
_SPLIT_GROUP_FIX = "give those that differ a group of their own (label rackloom.dev/gang-group)"


def group_terms(groups: Mapping[str, Sequence[GangMember]]) -> dict[str, PlacementTerms | None]:
    """The terms of each group; None for one that asks for nothing. Raises Refused where members differ."""
    apart = separated_groups(groups)
    return {
        name: _terms_of_group(name, _shared_requirements(members), apart[name])
        for name, members in groups.items()
    }


def pod_terms(member: GangMember) -> PlacementTerms:
    """What a pod asks of its node by itself, its pin included where it was let go."""
    return PlacementTerms(where=node_requirements(member.obj["spec"]).text)


def check_terms(members: Sequence[GangMember], clique_label: str, *, is_together: bool) -> None:
    """Raise Refused for rules that a gang is not placed by, and where members of a group differ in theirs."""
    check_supported(members, clique_label, is_together=is_together)
    for group in dict.fromkeys(member.group for member in members):
        _shared_requirements([member for member in members if member.group == group])


def _shared_requirements(group: Sequence[GangMember]) -> NodeRequirements:
    """Where all members of a group may go. Raises Refused where they differ, and for rules without sense."""
    first = group[0].obj["spec"] if group else {}
    where = node_requirements(first)
    asked = [first.get(key) for key in _NODE_RULE_FIELDS]
    for member in group[1:]:
        spec = member.obj["spec"]
        if [spec.get(key) for key in _NODE_RULE_FIELDS] != asked and node_requirements(spec) != where:
            reason = f"{group[0].name} and {member.name} of one group may not go to the same nodes"
            raise Refused(
                f"{reason} (nodeSelector, node affinity, tolerations)", nearest_fix=_SPLIT_GROUP_FIX
            )
    return where


def _terms_of_group(name: str, where: NodeRequirements, apart: tuple[str, ...]) -> PlacementTerms | None:
    if not where.text and not apart:
        return None
    return PlacementTerms(where=where.text, likeness=name if apart else "", apart=apart)
