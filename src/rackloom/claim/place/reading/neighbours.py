"""Which pods a pod may not share a node with: its required podAntiAffinity by hostname (core/v1)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rackloom.claim.place.reading.node_rules import REQUIRED

Json = Mapping[str, Any]
_BY_LABELS = ("matchLabelKeys", "mismatchLabelKeys")


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """Pods that are on no node with a pod."""

    selector: Json | None
    """A LabelSelector; None selects nobody."""
    namespaces: tuple[str, ...]
    """Where they are; empty: where the pod is."""
    everywhere: bool
    """They are in any namespace."""
    by: str = ""
    """The label by whose value nodes are one to it (a clique, a zone); empty: each node is its own."""

    def means(self, namespace: str, other: "Known") -> bool:
        """Whether another pod is meant, for a pod of this namespace."""
        named = self.everywhere or other.namespace in (self.namespaces or (namespace,))
        return named and selects(self.selector, other.labels)


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as others know it, and whom it keeps off its node."""

    namespace: str
    labels: Mapping[str, str]
    apart: tuple[Apart, ...]

    def bars(self, other: "Known") -> bool:
        """Whether the two are never on one node: either may say so."""
        return any(True for _ in self.barred_by(other))

    def barred_by(self, other: "Known") -> Iterator[str]:
        """`Apart.by` of each term that keeps the two apart, whoever says so."""
        yield from (one.by for one in self.apart if one.means(self.namespace, other))
        yield from (one.by for one in other.apart if one.means(other.namespace, self))


def apart_of(spec: Json, host: str) -> tuple[Apart, ...]:
    """The terms of a pod spec that can be told; `host`: the label key by which a node is known."""
    return tuple(_meant(term) for term in required_terms(spec, "podAntiAffinity") if is_told(term, host))


def _meant(term: Json) -> Apart:
    return Apart(
        selector=term.get("labelSelector"),
        namespaces=tuple(term.get("namespaces") or ()),
        everywhere=term.get("namespaceSelector") == {},
    )


def means(term: Json, pod: Known, other: Known) -> bool:
    """Whether a term of a pod, of affinity or anti-affinity, is about another."""
    return _meant(term).means(pod.namespace, other)


def is_told(term: Json, host: str) -> bool:
    """Whether a term is about nodes, and about pods that labels and namespaces tell."""
    return (
        term.get("topologyKey") == host
        and not term.get("namespaceSelector")
        and not any(term.get(key) for key in _BY_LABELS)
    )


def required_terms(spec: Json, kind: str) -> Sequence[Json]:
    """Those of `podAffinity` or `podAntiAffinity`."""
    return ((spec.get("affinity") or {}).get(kind) or {}).get(REQUIRED) or ()


def known(pod: Json, host: str) -> Known:
    """A pod object, or a template in a namespace of its own metadata."""
    metadata = pod.get("metadata") or {}
    return Known(
        namespace=metadata.get("namespace") or "default",
        labels=metadata.get("labels") or {},
        apart=apart_of(pod.get("spec") or {}, host),
    )


def known_there(pod: Json, host: str) -> Known:
    """A pod that the API server has, with all that it requires: the scheduler holds others to it, too.

    What `matchLabelKeys` name is in the selectors of its terms by then. Namespaces that a term finds by their
    labels are taken to be all.
    """
    terms = required_terms(pod.get("spec") or {}, "podAntiAffinity")
    return msgspec.structs.replace(known(pod, host), apart=tuple(_required(term, host) for term in terms))


def _required(term: Json, host: str) -> Apart:
    key, everywhere = term.get("topologyKey", host), term.get("namespaceSelector") is not None
    return msgspec.structs.replace(_meant(term), everywhere=everywhere, by="" if key == host else key)


class Reaches:
    """How far around its node a pod keeps others off."""

    def __init__(self, nodes: Iterable[Json]) -> None:
        """`nodes`: node objects."""
        self._labels = {one["metadata"]["name"]: one["metadata"].get("labels") or {} for one in nodes}
        self._sharing: dict[tuple[str, str], tuple[str, ...]] = {}

    def around(self, node: str, by: Iterable[str]) -> Iterator[str]:
        """Names of nodes, for each `Apart.by`; a node without that label is like no other."""
        for key in by:
            value = self._labels.get(node, {}).get(key)
            if not key:
                yield node
            elif value is not None:
                yield from self._with(key, value)

    def _with(self, key: str, value: str) -> tuple[str, ...]:
        if (key, value) not in self._sharing:
            names = (name for name, labels in self._labels.items() if labels.get(key) == value)
            self._sharing[key, value] = tuple(names)
        return self._sharing[key, value]


def selects(selector: Json | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects such labels: an empty one does, none does not."""
    if selector is None:
        return False
    equal = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return equal and all(_holds(one, labels) for one in selector.get("matchExpressions") or ())


def named_by(selector: Json | None) -> Iterator[tuple[str, str]]:
    """Labels and values that a LabelSelector asks for."""
    yield from ((selector or {}).get("matchLabels") or {}).items()
    for one in (selector or {}).get("matchExpressions") or ():
        yield from ((one["key"], value) for value in one.get("values") or () if one["operator"] == "In")


def keys_of(selector: Json | None) -> Iterator[str]:
    """The labels that a LabelSelector asks about."""
    yield from (selector or {}).get("matchLabels") or {}
    yield from (one["key"] for one in (selector or {}).get("matchExpressions") or ())


def told(selector: Json | None) -> str:
    """A LabelSelector in words."""
    equal = [f"{key}={value}" for key, value in ((selector or {}).get("matchLabels") or {}).items()]
    others = (
        " ".join((one["key"], one["operator"], "/".join(one.get("values") or ()))).rstrip()
        for one in (selector or {}).get("matchExpressions") or ()
    )
    return " and ".join((*equal, *others)) or ("no pod" if selector is None else "every pod")


def _holds(need: Json, labels: Mapping[str, str]) -> bool:
    present, values = need["key"] in labels, need.get("values") or ()
    match need["operator"]:
        case "Exists":
            return present
        case "DoesNotExist":
            return not present
        case "In":
            return present and labels[need["key"]] in values
    return not present or labels[need["key"]] not in values
