"""Nodes and pods of a cluster as a site."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.counts import count_of
from rackloom.claim.place.reading.jobs import Job, owner_of
from rackloom.claim.place.reading.neighbours import Known, Reaches, known_there, required_terms
from rackloom.claim.place.reading.node_rules import NodeRule, unmet
from rackloom.claim.place.reading.pods import Json, Toleration, gpus_of, taints_kept_off
from rackloom.claim.place.reading.terms import Avoided
from rackloom.claim.place.values import Hold, Site, Tray
from rackloom.errors import Refused

_OVER = ("Succeeded", "Failed")
_CORDON = "node.kubernetes.io/unschedulable"
_UNWELL = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints in which the node controller repeats what the node itself says."""


def site_of(
    nodes: Iterable[Json],
    pods: Iterable[Json],
    labels: Labels = Labels(),  # noqa: B008 (a frozen value)
    *,
    tolerations: tuple[Toleration, ...] = (),
    rule: NodeRule = NodeRule(),  # noqa: B008 (a frozen value)
    avoided: Mapping[str, str] | None = None,
    published: Mapping[str, int] | None = None,
) -> Site:
    """The site as pods with these tolerations and this rule may use it.

    `avoided`: nodes from which something else keeps them, and what. `published`: GPUs by node that a driver
    publishes in slices; counted GPUs are read from the node itself.
    """
    trays = []
    for node in nodes:
        name = node["metadata"]["name"]
        closed, unfit = list(_shut(node, tolerations)), list(unmet(rule, node))
        if avoided and name in avoided:
            unfit.append(avoided[name])
        trays.append(
            Tray(
                name=name,
                clique=(node["metadata"].get("labels") or {}).get(labels.clique),
                host=_host(node, labels),
                gpus=_gpus(node, labels) or (published or {}).get(name, 0),
                shut="; ".join((*closed, *unfit)) or None,
                is_unfit=bool(unfit),
            )
        )
    return Site(tuple(trays), tuple(_holds(pods, labels)))


def avoided_by(job: Job, nodes: Iterable[Json], pods: Iterable[Json], labels: Labels) -> Avoided:
    """Nodes where those of a group and pods of other jobs are never together, and whose these are."""
    reaches, there = Reaches(nodes), [pod for pod in pods if is_on_a_node(pod)]
    choosy = [pod for pod in there if required_terms(pod["spec"], "podAntiAffinity")]
    told: list[tuple[Known, dict[str, str]]] = []
    found = {}
    for team in job.teams:
        shut = next((shut for one, shut in told if one == team.known), None)
        if shut is None:
            theirs = (
                pod for pod in (there if team.known.apart else choosy) if owner_of(pod, labels) != job.name
            )
            shut = dict(_barring(team.known, theirs, reaches, labels))
            told.append((team.known, shut))
        if shut:
            found[team.name] = shut
    return found


def _barring(
    mine: Known, pods: Iterable[Json], reaches: Reaches, labels: Labels
) -> Iterator[tuple[str, str]]:
    for pod in pods:
        for node in reaches.around(pod["spec"]["nodeName"], mine.barred_by(known_there(pod, labels.host))):
            yield node, f"kept apart from {owner_of(pod, labels)}"


def seen_together(sites: Mapping[str, Site]) -> Site:
    """One site as it is to members of several kinds, from how each of them sees it: by `Terms.where`."""
    trays = []
    for seen in zip(*(site.trays for site in sites.values()), strict=True):
        closed = {where: tray.shut for where, tray in zip(sites, seen, strict=True) if tray.shut is not None}
        if len(closed) == len(sites):
            trays.append(seen[0])
        else:
            trays.append(replace(seen[0], shut=None, is_unfit=False, closed=closed))
    return Site(tuple(trays), next(iter(sites.values())).holds)


def hold_of(pod: Json, labels: Labels) -> Hold:
    """What a pod has of its node by the limits of its containers."""
    spec, metadata = pod.get("spec") or {}, pod.get("metadata") or {}
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    return Hold(
        owner=owner_of(pod, labels),
        tray=spec.get("nodeName") or "",
        gpus=gpus_of(spec, labels),
        priority=spec.get("priority") or 0,
        movable=marks.get(labels.movable) == "true",
    )


def _host(node: Json, labels: Labels) -> str | None:
    """What the kubelet calls its machine; cloud providers name the node otherwise."""
    host = (node["metadata"].get("labels") or {}).get(labels.host)
    return None if host == node["metadata"]["name"] else host


def _gpus(node: Json, labels: Labels) -> int:
    status = node.get("status") or {}
    value = (status.get("allocatable") or status.get("capacity") or {}).get(labels.gpu, 0)
    try:
        return count_of(value)
    except ValueError as error:
        reason = f"node {node['metadata']['name']}: {labels.gpu} is {value!r}"
        raise Refused(reason, nearest_fix="set it to a whole number") from error


def _shut(node: Json, tolerations: tuple[Toleration, ...]) -> Iterator[str]:
    taints = list(taints_kept_off(node, tolerations))
    if (node.get("spec") or {}).get("unschedulable") or _CORDON in taints:
        yield "cordoned"
    ready = [one for one in (node.get("status") or {}).get("conditions") or () if one.get("type") == "Ready"]
    if any(one.get("status") != "True" for one in ready) or any(taint in _UNWELL for taint in taints):
        yield "not ready"
    yield from (f"taint {taint}" for taint in taints if taint not in (_CORDON, *_UNWELL))


def _holds(pods: Iterable[Json], labels: Labels) -> Iterator[Hold]:
    """One for each pod that is bound and not over."""
    for pod in pods:
        if is_on_a_node(pod) and gpus_of(pod["spec"], labels):
            yield hold_of(pod, labels)


def is_on_a_node(pod: Json) -> bool:
    """Whether it is bound and not over."""
    is_over = (pod.get("status") or {}).get("phase") in _OVER
    return bool((pod.get("spec") or {}).get("nodeName")) and not is_over
