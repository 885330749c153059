"""Scheduling constraints of member pods, translated for the placement search, or refused.

kube-scheduler enforces a pod's rules on the tray to which it is pinned, so the search must know them
first:

- node rules (nodeSelector, node affinity, tolerations) close trays to the members of a group;
- required podAntiAffinity by host, hard topology spread by host, and host ports keep members of two
  groups, or members and pods of others, off one tray. Only two of each class of interchangeable pods
  are compared, and with too many unlike pairs no two members share a tray;
- everything else that member pods require (podAffinity other than by clique to the gang itself,
  anti-affinity by other keys than the host, spread with another skew) is refused, with what to change.
  Anti-affinity of other jobs' pods counts for any topology key, so all nodes of the cluster are read.

The node rules of a group are stored in the plan as canonical JSON text: equal rules have equal text.
All members of a group must have the same rules.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import NodeSelector, NodeSelectorRequirement, NodeSelectorTerm
from rackloom.core.allocate.pools import MalformedNodeSelector
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import JsonMapping, Object, has_pod_ended
from rackloom.core.cluster.pods import CHANNEL_LABEL, GANG_LABEL, Toleration
from rackloom.core.cluster.scheduling import (
    AntiAffinityTerm,
    NodeRule,
    PodIdentity,
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
from rackloom.core.cluster.trays import PlacementSite, PlacementTray, combine_sites
from rackloom.core.gangs.spec import GANG_TAINT, GangMember
from rackloom.core.place.placement_values import PlacementTerms
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json

# Node rules.


_CONDITION_TAINT_PREFIX = "node.kubernetes.io/"
"""Taints that repeat node conditions. The API server adds tolerations for some of them to each pod."""
_TOLERATES_RESERVATIONS = Toleration(key=GANG_TAINT, operator="Exists")
"""Reservations are read from plans instead, and an ungated pod tolerates that of its own plan."""


class NodeRequirements(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rules of members for their node."""

    rule: NodeRule = NodeRule()
    tolerations: tuple[Toleration, ...] = ()

    @property
    def text(self) -> str:
        """Canonical JSON, equal for equal rules; "" without any rule."""
        return "" if self == NodeRequirements() else msgspec.json.encode(self, order="deterministic").decode()

    def closes(self, tray: PlacementTray, node: Object) -> PlacementTray:
        """The tray with the reasons for which members may not go there. Raises MalformedNodeSelector."""
        taints = [
            f"taint {taint}" for taint in blocking_taints(node, (*self.tolerations, _TOLERATES_RESERVATIONS))
        ]
        unfit = list(unmet_requirements(self.rule, node))
        why = [*filter(None, [tray.shut]), *taints, *unfit]
        return replace(tray, shut="; ".join(why) or None, is_unfit=bool(unfit))


def node_requirements(spec: Object) -> NodeRequirements:
    """Read the rules from the spec of a gated pod."""
    tolerations = msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...])
    kept = (
        toleration
        for toleration in tolerations
        if not toleration.key.startswith(_CONDITION_TAINT_PREFIX) and toleration.key != GANG_TAINT
    )
    near = {str(term.get("topologyKey")) for term in required_terms(spec, "podAffinity")}
    return NodeRequirements(_require_labels(read_node_rule(spec), sorted(near)), tuple(dict.fromkeys(kept)))


def _require_labels(rule: NodeRule, keys: Sequence[str]) -> NodeRule:
    """The rule, for nodes that also have these labels: affinity holds on no node without the label."""
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
    """The site as members with these terms can use it. Raises Refused."""
    sites = {}
    # Groups with equal rules meet equal trays, so each set of rules is compared with the nodes once.
    for text in dict.fromkeys("" if term is None else term.where for term in terms):
        where = _read_requirements(text)
        try:
            trays = tuple([where.closes(tray, nodes[tray.name]) for tray in site.trays])
        except MalformedNodeSelector as error:
            fix = "correct it in the pod template"
            raise Refused(f"node affinity of the pods cannot be read: {error}", nearest_fix=fix) from error
        sites[text] = PlacementSite(trays, site.holds)
    return combine_sites(sites)


def _read_requirements(text: str) -> NodeRequirements:
    try:
        return decode_json(text, "GangPlan", NodeRequirements) if text else NodeRequirements()
    except Undecodable as error:
        fix = "end its pods: the GangPlan was changed by somebody else"
        raise Refused(
            f"the plan says of its pods what cannot be read: {error.reason}", nearest_fix=fix
        ) from error


# Anti-affinity, spread and host ports: which pods never share a tray.


HOST_KEY = SchedulerLabels().host
"""The topology key of the host, by which a pod asks for a node without certain others."""
_MOST_PAIRS = 1 << 16
"""Pairs of different members that are compared; with more, no two members share a tray."""
_KEPT_AWAY = "a pod there or near it and pods of the gang keep apart"


class _PodConstraints(msgspec.Struct, frozen=True):
    """What decides whether a pod may share a tray with another."""

    identity: PodIdentity
    ports: frozenset[tuple[str, int]]
    """Host ports by protocol; a node has each once."""

    def bars(self, other: "_PodConstraints") -> bool:
        """Whether the two are never on one tray."""
        return any(True for _ in self.barred_by(other))

    def barred_by(self, other: "_PodConstraints") -> Iterator[str]:
        """The topology key of each reason why they are not; "" for the node itself."""
        if not self.ports.isdisjoint(other.ports):
            yield ""
        yield from self.identity.barred_by(other.identity)


def without_conflicting_trays(
    site: PlacementSite, members: Iterable[GangMember], pods: Iterable[Object], nodes: Iterable[Object]
) -> PlacementSite:
    """The site without trays where a pod of others and members exclude each other.

    `nodes` are all nodes of the cluster: a pod on any of them may exclude members from its clique or zone.
    """
    mine = [_pod_constraints(member.obj, pod_identity(member.obj, HOST_KEY)) for member in members]
    are_selective = any(pod.identity.apart or pod.ports for pod in mine)
    theirs = [
        (pod["spec"]["nodeName"], _pod_constraints(pod, bound_pod_identity(pod, HOST_KEY)))
        for pod in pods
        if pod["spec"].get("nodeName")
        and not has_pod_ended(pod)
        and (are_selective or required_terms(pod["spec"], "podAntiAffinity"))
    ]
    # Members of one class conflict with the same pods, so two of each class stand for all.
    classes = _two_of_each_class(mine, set(_read_label_keys([*mine, *(pod for _, pod in theirs)])))
    domains = TopologyDomains(nodes)
    barred = {
        tray
        for node, other in theirs
        for pod in classes
        for tray in domains.around(node, pod.barred_by(other))
    }
    if not barred:
        return site
    return site.with_trays(
        lambda tray: (
            replace(tray, shut="; ".join(filter(None, (tray.shut, _KEPT_AWAY))))
            if tray.name in barred
            else tray
        )
    )


def hard_spread_constraints(spec: Object) -> Iterator[Object]:
    """The spread constraints that keep a pod unscheduled while they do not hold."""
    for constraint in spec.get("topologySpreadConstraints") or ():
        if constraint.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule":
            yield constraint


def _pod_constraints(pod: Object, identity: PodIdentity) -> _PodConstraints:
    containers = pod["spec"].get("containers") or ()
    ports = (port for container in containers for port in container.get("ports") or ())
    host_ports = ((port.get("protocol", "TCP"), port["hostPort"]) for port in ports if port.get("hostPort"))
    return _PodConstraints(identity, frozenset(host_ports))


def _member_constraints(member: GangMember) -> _PodConstraints:
    """The constraints of a member. A spread with maxSkew 1 becomes anti-affinity: one member per node."""
    constraints = _pod_constraints(member.obj, pod_identity(member.obj, HOST_KEY))
    spread = (
        AntiAffinityTerm(selector=constraint.get("labelSelector"), namespaces=(), everywhere=False)
        for constraint in hard_spread_constraints(member.obj["spec"])
    )
    identity = replace(constraints.identity, apart=(*constraints.identity.apart, *spread))
    return replace(constraints, identity=identity)


def _read_label_keys(pods: Iterable[_PodConstraints]) -> Iterator[str]:
    return (key for pod in pods for term in pod.identity.apart for key in selector_keys(term.selector))


def _two_of_each_class(pods: Iterable[_PodConstraints], label_keys: Collection[str]) -> list[_PodConstraints]:
    """At most two of each class of interchangeable pods, which are equal in all labels that a term reads.

    Two are enough: they also show whether pods of one class exclude each other.
    """
    classes: dict[bytes, list[_PodConstraints]] = {}
    for pod in pods:
        labels = {key: value for key, value in pod.identity.labels.items() if key in label_keys}
        bare = replace(pod, identity=replace(pod.identity, labels=labels))
        members = classes.setdefault(msgspec.json.encode(bare, order="deterministic"), [])
        if len(members) < 2:
            members.append(bare)
    return [pod for members in classes.values() for pod in members]


# Constraints that a gang cannot be placed by.


_OWN_LABELS = (GANG_LABEL, CHANNEL_LABEL, "batch.kubernetes.io/job-name", "job-name")
"""Labels whose value only pods of one gang have: those of the gang, its ComputeDomain and its Job."""


def check_supported(members: Sequence[GangMember], clique_label: str, *, is_together: bool) -> None:
    """Raise Refused, with what to change, for a rule that the placement cannot keep.

    `is_together`: the whole gang is in one clique.
    """
    for member in _one_of_each_class(members):
        spec = member.obj["spec"]
        near = _unsupported_affinity(spec, clique_label if is_together else None, members)
        for why, fix in (*near, *_unsupported_anti_affinity(spec), *_unsupported_spread(spec)):
            raise Refused(f"pod {member.name} requires {why}, which gangs are not placed by", nearest_fix=fix)


def _one_of_each_class(members: Iterable[GangMember]) -> Iterator[GangMember]:
    """One member for each distinct set of rules; most pods of a job have the same."""
    known: list[tuple[object, object]] = []
    for member in members:
        spec = member.obj["spec"]
        rules = (spec.get("affinity"), spec.get("topologySpreadConstraints"))
        if any(rules) and rules not in known:
            known.append(rules)
            yield member


def _unsupported_affinity(
    spec: Object, clique_label: str | None, members: Sequence[GangMember]
) -> Iterator[tuple[str, str]]:
    """`clique_label` is None for a gang in segments: the search decides which members share a clique."""
    for term in required_terms(spec, "podAffinity"):
        key = term.get("topologyKey")
        if clique_label is None:
            fix = "take the term out: members of a segment share a clique without it"
            yield f"podAffinity by {key}", fix
        elif key != clique_label:
            yield f"podAffinity by {key}", "take the term out, or prefer it instead"
        elif not _selects_gang_only(term, members):
            fix = f"take the term out, as a gang is in one clique without it, or select by label {GANG_LABEL}"
            yield f"podAffinity by {key} to pods that are not of the gang alone", fix


def _selects_gang_only(term: JsonMapping, members: Sequence[GangMember]) -> bool:
    """Whether it selects members and no other pods: the position of those is unknown to the search."""
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
SPLIT_GROUP_FIX = "give those that differ a group of their own (label rackloom.dev/gang-group)"


def group_terms(groups: Mapping[str, Sequence[GangMember]]) -> dict[str, PlacementTerms | None]:
    """The terms of each group; None without any. Raises Refused where members of a group differ."""
    by_group = {name: [_member_constraints(member) for member in members] for name, members in groups.items()}
    label_keys = set(_read_label_keys(pod for pods in by_group.values() for pod in pods))
    classes = {name: _two_of_each_class(pods, label_keys) for name, pods in by_group.items()}
    found: dict[str, PlacementTerms | None] = {}
    for name, mine in classes.items():
        where, apart = _shared_requirements(groups[name]).text, list[str]()
        # The groups, perhaps itself, of which no member may share a tray with one of it. With too many unlike
        # pairs to compare, keeping all of them apart is safe.
        for other, theirs in classes.items():
            pairs = combinations(mine, 2) if name == other else product(mine, theirs)
            is_too_many = len(mine) * len(theirs) > _MOST_PAIRS
            if is_too_many or any(pod.bars(another) for pod, another in pairs):
                apart.append(other)
        # Without terms the search stays on its counting path.
        terms = PlacementTerms(where=where, likeness=name if apart else "", apart=tuple(apart))
        found[name] = terms if where or apart else None
    return found


def pod_terms(member: GangMember) -> PlacementTerms:
    """The node rules of one pod, including its pin once it was ungated."""
    return PlacementTerms(where=node_requirements(member.obj["spec"]).text)


def check_terms(members: Sequence[GangMember], clique_label: str, *, is_together: bool) -> None:
    """Raise Refused for rules that cannot be kept, and where members of a group differ."""
    check_supported(members, clique_label, is_together=is_together)
    for group in dict.fromkeys(member.group for member in members):
        _shared_requirements([member for member in members if member.group == group])


def _shared_requirements(group: Sequence[GangMember]) -> NodeRequirements:
    """The node rules of all members of a group. Raises Refused where they differ or make no sense."""
    first = group[0].obj["spec"] if group else {}
    where = node_requirements(first)
    asked = [first.get(key) for key in _NODE_RULE_FIELDS]
    # Most pods of a group have the same text. Only where it differs are the rules read and compared.
    for member in group[1:]:
        spec = member.obj["spec"]
        if [spec.get(key) for key in _NODE_RULE_FIELDS] != asked and node_requirements(spec) != where:
            reason = f"{group[0].name} and {member.name} of one group may not go to the same nodes"
            raise Refused(f"{reason} (nodeSelector, node affinity, tolerations)", nearest_fix=SPLIT_GROUP_FIX)
    return where
