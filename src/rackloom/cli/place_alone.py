"""Jobs whose shares (replicas of a LeaderWorkerSet, or their segments) each need a clique to themselves."""

from collections.abc import Iterator

from msgspec.structs import replace

from rackloom.claim.place.many.alone import cliques_alone, plan_alone, without_cliques
from rackloom.claim.place.reading.jobs import Job
from rackloom.claim.place.reading.pods import Json
from rackloom.claim.place.search.blocks import blocks_of
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import try_gang
from rackloom.claim.place.values import Gang, Site
from rackloom.cli.place_page import Answer
from rackloom.cli.place_site import Found

_GROUP = "leaderworkerset.sigs.k8s.io/group-key"
"""On all pods of a LeaderWorkerSet; exclusive topology keeps others that have it, of one namespace, out."""


def free_of_others(site: Site, found: Found, job: Job) -> Site:
    """The site without cliques where another LeaderWorkerSet of the job's namespace runs."""
    namespace = _namespace(job.objects[0])
    trays = {
        (pod.get("spec") or {}).get("nodeName")
        for pod in found.pods
        if _GROUP in ((pod.get("metadata") or {}).get("labels") or {}) and _namespace(pod) == namespace
    }
    return without_cliques(site, {tray.sharing for tray in site.trays if tray.name in trays})


def refused_alone(job: Job, gang: Gang, site: Site) -> Answer | None:
    """Why too few cliques are left, where one at least is; None where the first share finds none."""
    blocks, cliques = len(blocks_of(gang)), cliques_alone(site, gang, Effort())
    if not cliques or len(cliques) == blocks:
        return None
    return Answer(
        job=job.name,
        plan=None,
        blocked=(
            f"{gang.name}: by exclusive topology each of its {blocks} {_shares(gang)} has a clique to itself,"
            f" and only {', '.join(cliques)} can be had"
        ),
        fixes=tuple(_fixes(gang, site, len(cliques))),
    )


def notes_alone(gang: Gang) -> Iterator[str]:
    """That it takes more cliques than it might."""
    if len(blocks_of(gang)) > 1:
        yield f"{_shares(gang)} have a clique each: exclusive topology starts no two of them in one"


def _shares(gang: Gang) -> str:
    return "replicas" if gang.segment is None else f"segments of {gang.segment}"


def _fixes(gang: Gang, site: Site, most: int) -> Iterator[str]:
    """Each was planned."""
    together = try_gang(site, gang, Effort())
    if together is not None and len(together.cliques) == 1:
        yield f"use --render affinity: they share clique {together.cliques[0]} then"
    if gang.segment is not None:
        whole = replace(gang, segment=None)
        if plan_alone(site, whole, Effort()) is not None:
            yield "leave --segment out"
        return
    yield f"ask for {most} replicas instead of {len(blocks_of(gang))}"


def _namespace(value: Json) -> str:
    return (value.get("metadata") or {}).get("namespace") or "default"
