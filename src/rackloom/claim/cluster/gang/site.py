"""The cluster as the planner takes it: trays with GPUs, and who has them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from rackloom.claim.cluster.gang.members import GPU_RESOURCE, counted_gpus
from rackloom.claim.cluster.gang.observe import gang_of
from rackloom.claim.cluster.gang.record import Record
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Object
from rackloom.claim.place.reading.counts import count_of
from rackloom.claim.place.reading.devices import is_channel
from rackloom.claim.place.values import Hold, Site, Tray

_ENDED = ("Succeeded", "Failed")
OTHER = "another job"


class Objects(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh lists of what bears on a placement."""

    nodes: tuple[Object, ...]
    pods: tuple[Object, ...]
    claims: tuple[Object, ...] = ()
    slices: tuple[Object, ...] = ()
    classes: tuple[Object, ...] = ()
    templates: tuple[Object, ...] = ()


def site_of(objects: Objects, records: Iterable[Record], settings: GangSettings) -> Site:
    """Trays in order of clique and name; holds of running pods, of their claims, and of recorded plans."""
    return with_plans(running_on(objects, settings), records)


def running_on(objects: Objects, settings: GangSettings) -> Site:
    """The same without the plans: it holds for all gangs that are placed from one look."""
    published = _published(objects.slices)
    trays = (_tray(node, published, settings) for node in objects.nodes)
    found = sorted((one for one in trays if one.gpus > 0), key=lambda one: (one.clique or "", one.name))
    size = {one.name: one.gpus for one in found}
    holds = (*_running(objects.pods, size), *_claimed(objects, size))
    return Site(tuple(found), tuple(one for one in holds if one.tray in size))


def with_plans(running: Site, records: Iterable[Record]) -> Site:
    """The trays that plans reserve are held too, whole."""
    size = {one.name: one.gpus for one in running.trays}
    planned = (one for one in _recorded(records, size) if one.tray in size)
    return Site(running.trays, (*running.holds, *planned))


def seen_from(site: Site, namespace: str) -> Site:
    """The site as it may be told in a namespace: of jobs elsewhere, only that they are others.

    Owners stay apart, since a job ends whole.
    """
    others: dict[str, str] = {}
    for hold in site.holds:
        if not hold.owner.startswith(f"{namespace}/"):
            others.setdefault(hold.owner, f"{OTHER} {len(others) + 1}" if others else OTHER)
    return Site(site.trays, tuple(replace(one, owner=others.get(one.owner, one.owner)) for one in site.holds))


def owner_of(pod: Object) -> str:
    """Whose pod it is: of its gang, of the controller that made it, or its own.

    No word with a space is the name of a gang: what is only called like one is another job.
    """
    gang, meta = gang_of(pod), pod["metadata"]
    if gang is not None:
        return gang.called
    owners = (
        f"{one['kind']} {one['name']}" for one in meta.get("ownerReferences") or () if one.get("controller")
    )
    return f"{meta['namespace']}/{next(owners, 'pod ' + meta['name'])}"


def owners_of_claims(objects: Objects) -> Iterator[tuple[Object, str]]:
    """Each claim, and whose it is: of the pod for which it is reserved or was made, or its own."""
    uids = {uid for claim in objects.claims for uid in _users(claim)}
    owners = {uid: owner_of(pod) for pod in objects.pods if (uid := pod["metadata"]["uid"]) in uids}
    for claim in objects.claims:
        meta = claim["metadata"]
        found = (owners[uid] for uid in _users(claim) if uid in owners)
        yield claim, next(found, f"{meta['namespace']}/claim {meta['name']}")


def _users(claim: Object) -> Iterator[str]:
    reserved = (claim.get("status") or {}).get("reservedFor") or ()
    return (one["uid"] for one in (*reserved, *(claim["metadata"].get("ownerReferences") or ())))


def _published(slices: Iterable[Object]) -> Counter[str]:
    """GPUs that node plugins publish, by node."""
    found: Counter[str] = Counter()
    for one in slices:
        spec = one["spec"]
        if spec["driver"] == names.GPU_DRIVER and spec.get("nodeName"):
            found[spec["nodeName"]] += sum(_is_whole_gpu(device) for device in spec.get("devices") or ())
    return found


def _is_whole_gpu(device: Object) -> bool:
    """A slice lists the MIG parts of a GPU beside it."""
    kind = (device.get("attributes") or {}).get("type") or {}
    return bool(kind.get("string", "gpu") == "gpu")


def _tray(node: Object, published: Mapping[str, int], settings: GangSettings) -> Tray:
    name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
    counted = count_of(((node.get("status") or {}).get("allocatable") or {}).get(GPU_RESOURCE, 0))
    gpus = max(counted, published.get(name, 0))
    return Tray(name=name, clique=labels.get(settings.clique_label), gpus=gpus, shut=_shut(node))


def _shut(node: Object) -> str | None:
    """What keeps everybody away; of taints, pods say themselves."""
    if (node.get("spec") or {}).get("unschedulable"):
        return "cordoned"
    conditions = (node.get("status") or {}).get("conditions") or ()
    if not any((one["type"], one["status"]) == ("Ready", "True") for one in conditions):
        return "not ready"
    return None


def _running(pods: Iterable[Object], size: Mapping[str, int]) -> Iterator[Hold]:
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node not in size or (pod.get("status") or {}).get("phase") in _ENDED:
            continue
        gpus = _used(pod["spec"], size[node])
        if gpus:
            yield Hold(owner=owner_of(pod), tray=node, gpus=gpus)


def _used(spec: Object, whole: int) -> int:
    """What cannot be read counts as the whole tray: one pod of anybody must not stop the placement of all."""
    try:
        return counted_gpus(spec)
    except ValueError:
        return whole


def _claimed(objects: Objects, size: Mapping[str, int]) -> Iterator[Hold]:
    """A node's channel counts as the whole tray: no other job's channel fits beside it."""
    for claim, owner in owners_of_claims(objects):
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for tray, gpus in _devices(allocation, size).items():
            yield Hold(owner=owner, tray=tray, gpus=gpus)


def _devices(allocation: Object, size: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in (allocation.get("devices") or {}).get("results") or ():
        if one["driver"] == names.GPU_DRIVER:
            found[one["pool"]] += 1
        elif is_channel(one["driver"], one["device"]):
            found[one["pool"]] += size.get(one["pool"], 0)
    return found


def _recorded(records: Iterable[Record], size: Mapping[str, int]) -> Iterator[Hold]:
    for record in records:
        for tray in record.reserved:
            yield Hold(owner=record.key.called, tray=tray, gpus=size.get(tray, 0))
