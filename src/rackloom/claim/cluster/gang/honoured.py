"""What pods require that a gang is not placed by: it is refused, for kube-scheduler insists on it. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from rackloom.claim.cluster.admission.marks import CHANNEL_LABEL, GANG_LABEL
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.neighbours import HOST, spread_out
from rackloom.claim.kube.api import Object
from rackloom.claim.place.reading.neighbours import Json, is_told, required_terms, selects
from rackloom.errors import Refused

_OWN = (GANG_LABEL, CHANNEL_LABEL, "batch.kubernetes.io/job-name", "job-name")
"""Labels that only pods of one gang have: those of a ComputeDomain are one, and so are those of a Job."""


def check_honoured(members: Sequence[Member], clique_label: str, *, is_together: bool) -> None:
    """Raise Refused, with what to change, for a rule that is not kept when the gang is placed.

    `is_together`: all of the gang is in one clique.
    """
    for member in _unlike(members):
        spec = member.obj["spec"]
        near = _near(spec, clique_label, members) if is_together else _near_in_segments(spec)
        for why, fix in (*near, *_apart(spec), *_spread(spec)):
            raise Refused(f"pod {member.name} requires {why}, which gangs are not placed by", nearest_fix=fix)


def _unlike(members: Iterable[Member]) -> Iterator[Member]:
    """One of those that say the same: most pods of a job do."""
    said: list[tuple[object, object]] = []
    for member in members:
        spec = member.obj["spec"]
        one = (spec.get("affinity"), spec.get("topologySpreadConstraints"))
        if any(one) and one not in said:
            said.append(one)
            yield member


def _near(spec: Object, clique_label: str, members: Sequence[Member]) -> Iterator[tuple[str, str]]:
    for term in required_terms(spec, "podAffinity"):
        key = term.get("topologyKey")
        if key != clique_label:
            yield f"podAffinity by {key}", "take the term out, or prefer it instead"
        elif not _is_of_gang(term, members):
            fix = f"take the term out, as a gang is in one clique without it, or select by label {GANG_LABEL}"
            yield f"podAffinity by {key} to pods that are not of the gang alone", fix


def _near_in_segments(spec: Object) -> Iterator[tuple[str, str]]:
    for term in required_terms(spec, "podAffinity"):
        fix = "take the term out: members of a segment share a clique without it"
        yield f"podAffinity by {term.get('topologyKey')}", fix


def _is_of_gang(term: Json, members: Sequence[Member]) -> bool:
    """Whether it selects members, and no pod of others: else it depends on where those are."""
    selector, namespace = term.get("labelSelector") or {}, members[0].namespace
    labels = members[0].pod.labels
    named = selector.get("matchLabels") or {}
    owned = any(key in named and named[key] == labels.get(key) for key in _OWN)
    inside = not term.get("namespaceSelector") and set(term.get("namespaces") or ()) <= {namespace}
    return owned and inside and any(selects(selector, one.pod.labels) for one in members)


def _apart(spec: Object) -> Iterator[tuple[str, str]]:
    for term in required_terms(spec, "podAntiAffinity"):
        if term.get("topologyKey") != HOST:
            fix = f"use topologyKey {HOST}, or prefer the term instead"
            yield f"podAntiAffinity by {term.get('topologyKey')}", fix
        elif not is_told(term, HOST):
            fix = "use labelSelector and namespaces alone"
            yield "podAntiAffinity with namespaceSelector, matchLabelKeys or mismatchLabelKeys", fix


def _spread(spec: Object) -> Iterator[tuple[str, str]]:
    for one in spread_out(spec):
        key, skew = one.get("topologyKey"), one.get("maxSkew")
        if key != HOST or skew != 1:
            fix = f"use ScheduleAnyway, or {HOST} with maxSkew 1: one member on a tray"
            yield f"topologySpreadConstraints by {key} with maxSkew {skew}", fix
