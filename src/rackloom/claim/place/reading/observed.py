"""Nodes and pods of a cluster as a site."""

from collections.abc import Iterable, Iterator, Mapping

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.counts import count_of
from rackloom.claim.place.reading.jobs import owner_of
from rackloom.claim.place.reading.pods import Json, Toleration, gpus_of, taints_kept_off
from rackloom.claim.place.values import Hold, Site, Tray
from rackloom.errors import Refused

_OVER = ("Succeeded", "Failed")


def site_of(
    nodes: Iterable[Json],
    pods: Iterable[Json],
    labels: Labels = Labels(),  # noqa: B008 (a frozen value)
    *,
    tolerations: tuple[Toleration, ...] = (),
    selector: Mapping[str, str] | None = None,
    published: Mapping[str, int] | None = None,
) -> Site:
    """The site as pods with these tolerations and this node selector may use it.

    `published`: GPUs by node that a driver publishes in slices; counted GPUs are read from the node itself.
    """
    trays = tuple(
        Tray(
            name=node["metadata"]["name"],
            clique=(node["metadata"].get("labels") or {}).get(labels.clique),
            gpus=_gpus(node, labels) or (published or {}).get(node["metadata"]["name"], 0),
            shut="; ".join(_shut(node, tolerations, selector or {})) or None,
        )
        for node in nodes
    )
    return Site(trays, tuple(_holds(pods, labels)))


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


def _gpus(node: Json, labels: Labels) -> int:
    status = node.get("status") or {}
    value = (status.get("allocatable") or status.get("capacity") or {}).get(labels.gpu, 0)
    try:
        return count_of(value)
    except ValueError as error:
        reason = f"node {node['metadata']['name']}: {labels.gpu} is {value!r}"
        raise Refused(reason, nearest_fix="set it to a whole number") from error


def _shut(node: Json, tolerations: tuple[Toleration, ...], selector: Mapping[str, str]) -> Iterator[str]:
    if (node.get("spec") or {}).get("unschedulable"):
        yield "cordoned"
    ready = [one for one in (node.get("status") or {}).get("conditions") or () if one.get("type") == "Ready"]
    if any(one.get("status") != "True" for one in ready):
        yield "not ready"
    # The node controller repeats conditions as taints under this prefix.
    taints = taints_kept_off(node, tolerations)
    yield from (f"taint {taint}" for taint in taints if not taint.startswith("node.kubernetes.io/"))
    has = node["metadata"].get("labels") or {}
    yield from (f"not {key}={value}" for key, value in selector.items() if has.get(key) != value)


def _holds(pods: Iterable[Json], labels: Labels) -> Iterator[Hold]:
    """One for each pod that is bound and not over."""
    for pod in pods:
        spec = pod.get("spec") or {}
        if not spec.get("nodeName") or (pod.get("status") or {}).get("phase") in _OVER:
            continue
        if gpus_of(spec, labels):
            yield hold_of(pod, labels)
