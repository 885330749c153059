"""Which nodes the members of a gang may go to, by their own rules; a text of it is kept in the plan. Pure.

kube-scheduler holds pods to these rules on the tray to which they are pinned, so the planner is told of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from rackloom.claim.allocate.nodes import MalformedSelector
from rackloom.claim.allocate.objects import NodeSelector, NodeSelectorRequirement, NodeSelectorTerm
from rackloom.claim.cluster.gang import marks
from rackloom.claim.kube.api import Object
from rackloom.claim.place.reading.neighbours import required_terms
from rackloom.claim.place.reading.node_rules import NodeRule, node_rule, unmet
from rackloom.claim.place.reading.observed import seen_together
from rackloom.claim.place.reading.pods import Toleration, taints_kept_off
from rackloom.claim.place.values import Site, Terms, Tray
from rackloom.errors import Refused

_CONDITIONS = "node.kubernetes.io/"
"""Taints that repeat what is wrong with a node: the API server lets pods tolerate some for a while."""
_OURS = Toleration(key=marks.TAINT, operator="Exists")
"""Reservations are told by plans, and a pod that is let go tolerates its own."""


class Where(msgspec.Struct, frozen=True, omit_defaults=True):
    """What members ask of a node."""

    rule: NodeRule = NodeRule()
    tolerations: tuple[Toleration, ...] = ()

    @property
    def text(self) -> str:
        """It as text, the same for what is the same; "" where nothing is asked."""
        return "" if self == Where() else msgspec.json.encode(self, order="deterministic").decode()

    def closes(self, tray: Tray, node: Object) -> Tray:
        """The tray as members see it. Raises MalformedSelector."""
        taints = [f"taint {one}" for one in taints_kept_off(node, (*self.tolerations, _OURS))]
        unfit = list(unmet(self.rule, node))
        why = [*([] if tray.shut is None else [tray.shut]), *taints, *unfit]
        return replace(tray, shut="; ".join(why) or None, is_unfit=bool(unfit))


def where_of(spec: Object) -> Where:
    """Read the spec of a pod that is held."""
    tolerations = msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...])
    kept = (one for one in tolerations if not one.key.startswith(_CONDITIONS) and one.key != marks.TAINT)
    near = {str(one.get("topologyKey")) for one in required_terms(spec, "podAffinity")}
    return Where(_labelled(node_rule(spec), sorted(near)), tuple(dict.fromkeys(kept)))


def _labelled(rule: NodeRule, keys: Sequence[str]) -> NodeRule:
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
        replace(one, match_expressions=(*one.match_expressions, *has)) if one != NodeSelectorTerm() else one
        for one in rule.affinity.node_selector_terms
    )
    return replace(rule, affinity=NodeSelector(node_selector_terms=terms))


def as_met(site: Site, terms: Iterable[Terms | None], nodes: Mapping[str, Object]) -> Site:
    """The site as it is to members with these terms, who may not go everywhere. Raises Refused."""
    wheres = dict.fromkeys("" if one is None else one.where for one in terms)
    return seen_together({text: Site(tuple(_met(site, text, nodes)), site.holds) for text in wheres})


def _met(site: Site, text: str, nodes: Mapping[str, Object]) -> Iterator[Tray]:
    where = _read(text)
    for tray in site.trays:
        try:
            yield where.closes(tray, nodes[tray.name])
        except MalformedSelector as error:
            fix = "correct it in the pod template"
            raise Refused(f"node affinity of the pods cannot be read: {error}", nearest_fix=fix) from error


def _read(text: str) -> Where:
    try:
        return msgspec.json.decode(text, type=Where) if text else Where()
    except msgspec.DecodeError as error:
        fix = "end its pods: the GangPlan was changed by somebody else"
        raise Refused(f"the plan says of its pods what cannot be read: {error}", nearest_fix=fix) from error
