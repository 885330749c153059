"""The schedulers that a plan can be rendered for."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.jobs import Job
from rackloom.claim.place.render.affinity import with_affinity
from rackloom.claim.place.render.edit import Draft, Object
from rackloom.claim.place.render.groups import for_lws, for_pod_groups
from rackloom.claim.place.render.kai import for_kai
from rackloom.claim.place.render.kueue import for_kueue
from rackloom.claim.place.render.slurm import options, topology
from rackloom.claim.place.values import Gang, Plan, Site


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """What to hand to the scheduler."""

    objects: tuple[Any, ...]
    """Kubernetes objects, or Slurm's topology.yaml."""
    script: str = ""
    """Lines for the head of a batch script."""


Renderer = Callable[[Draft, Gang, Plan, Labels], list[Object]]
_RENDERERS: dict[str, Renderer] = {
    "kueue": for_kueue,
    "kai": for_kai,
    "lws": for_lws,
    "podgroup": for_pod_groups,
}


def rendered(target: str, job: Job, gang: Gang, plan: Plan, site: Site, labels: Labels) -> Rendered:
    """The job for `target`, the name of a scheduler of the command line. Refused where it cannot be told."""
    if target == "slurm":
        return Rendered(objects=(topology(site),), script=options(gang, plan))
    draft, plan = Draft(job), _by_hosts(plan, site)
    more: list[Object] = []
    if target == "affinity":
        with_affinity(draft, gang, plan, labels)
    else:
        more = _RENDERERS[target](draft, gang, plan, labels)
    return Rendered(objects=(*more, *draft.objects))


def _by_hosts(plan: Plan, site: Site) -> Plan:
    """The plan with its trays called as the label that node affinity reads calls them."""
    hosts = {tray.name: tray.host for tray in site.trays if tray.host}
    seats = tuple(replace(seat, tray=hosts.get(seat.tray, seat.tray)) for seat in plan.seats)
    return replace(plan, seats=seats)
