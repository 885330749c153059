"""Which nodes reach a device: node selectors, and the selector that an allocation carries."""

from collections.abc import Iterable, Mapping

from rackloom.claim.allocate.objects import Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm

_NAME_FIELD = "metadata.name"


class MalformedSelector(ValueError):
    """A node selector that cannot be read: upstream gives up on the whole attempt."""


def reaches(
    node: Node, *, node_name: str | None, all_nodes: bool | None, selector: NodeSelector | None
) -> bool:
    """Whether the node is selected. Nothing set selects no node. Raises MalformedSelector."""
    if node_name:
        return node.metadata.name == node_name
    if all_nodes:
        return True
    return selector is not None and _selected(node, selector)


def _selected(node: Node, selector: NodeSelector) -> bool:
    # All terms first: upstream refuses a malformed term even where another one matches.
    held = [_term_holds(node, term) for term in selector.node_selector_terms]
    return any(held)


def _term_holds(node: Node, term: NodeSelectorTerm) -> bool:
    labels = [_label_holds(node.metadata.labels, need) for need in term.match_expressions]
    fields = [_field_holds(node.metadata.name, need) for need in term.match_fields]
    return bool(labels or fields) and all(labels) and all(fields)


def _label_holds(labels: Mapping[str, str], need: NodeSelectorRequirement) -> bool:
    present, value = need.key in labels, labels.get(need.key)
    match need.operator:
        case "In" | "NotIn" if not need.values:
            raise MalformedSelector(f"{need.key}: operator {need.operator} needs values")
        case "In":
            return present and value in need.values
        case "NotIn":
            return not present or value not in need.values
        case "Exists" | "DoesNotExist" if need.values:
            raise MalformedSelector(f"{need.key}: operator {need.operator} takes no values")
        case "Exists":
            return present
        case "DoesNotExist":
            return not present
        case "Gt" | "Lt":
            return _compared(need, value)
        case other:
            raise MalformedSelector(f"{need.key}: {other!r} is not a node selector operator")


def _compared(need: NodeSelectorRequirement, value: str | None) -> bool:
    if len(need.values) != 1 or _integer(need.values[0]) is None:
        raise MalformedSelector(f"{need.key}: operator {need.operator} needs one whole number")
    bound, actual = _integer(need.values[0]), _integer(value or "")
    if bound is None or actual is None:
        return False
    return actual > bound if need.operator == "Gt" else actual < bound


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _field_holds(name: str, need: NodeSelectorRequirement) -> bool:
    if need.key != _NAME_FIELD or need.operator not in ("In", "NotIn") or len(need.values) != 1:
        raise MalformedSelector(f"{need.key}: match fields know {_NAME_FIELD} In or NotIn one name")
    return (need.values[0] == name) == (need.operator == "In")


def only(node: str) -> NodeSelector:
    """The selector of exactly one node."""
    requirement = NodeSelectorRequirement(key=_NAME_FIELD, operator="In", values=(node,))
    return NodeSelector(node_selector_terms=(NodeSelectorTerm(match_fields=(requirement,)),))


def merged(selectors: Iterable[NodeSelector]) -> NodeSelector | None:
    """One term that asks for all that the given selectors ask for; None when that is nothing.

    Raises MalformedSelector for a selector of several terms: their union cannot be joined into one term.
    """
    fields: list[NodeSelectorRequirement] = []
    labels: list[NodeSelectorRequirement] = []
    for selector in selectors:
        if len(selector.node_selector_terms) > 1:
            raise MalformedSelector(f"node selector with {len(selector.node_selector_terms)} terms")
        for term in selector.node_selector_terms:
            _add_new(fields, term.match_fields)
            _add_new(labels, term.match_expressions)
    if not fields and not labels:
        return None
    term = NodeSelectorTerm(match_expressions=tuple(labels), match_fields=tuple(fields))
    return NodeSelector(node_selector_terms=(term,))


def _add_new(known: list[NodeSelectorRequirement], more: Iterable[NodeSelectorRequirement]) -> None:
    for need in more:
        same = (need.key, need.operator, frozenset(need.values))
        if same not in [(one.key, one.operator, frozenset(one.values)) for one in known]:
            known.append(need)
