"""What to know about a plan, or about the job as it is written, before anybody applies it."""

from collections import Counter
from collections.abc import Iterator

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.jobs import Job, part
from rackloom.claim.place.segments import told
from rackloom.claim.place.unhonoured import unhonoured
from rackloom.claim.place.values import Gang, Plan, Site

_RULES = ("spec", "affinity", "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution")


def notes_on(job: Job, gang: Gang, plan: Plan, site: Site, labels: Labels, down: float) -> Iterator[str]:
    """One sentence each; `down` is the share of trays that are down at any time."""
    taken = set(plan.trays)
    trays = Counter(tray.sharing for tray in site.trays)
    used = Counter(tray.sharing for tray in site.trays if tray.name in taken)
    for clique in plan.cliques:
        if not plan.spares and trays[clique] == used[clique]:
            yield (
                f"it takes all {trays[clique]} trays of clique {clique}: when one is lost,"
                " no other can stand in for it"
            )
    if gang.segment is not None:
        yield told(max(trays[clique] for clique in plan.cliques), gang.segment, down)
    if any(_picks_by_affinity(job, labels)):
        yield (
            f"it requires pod affinity on {labels.clique}: as written, its first pod picks the clique,"
            " whether or not the others fit; apply it with --render"
        )
    if part(job.objects[0], ("spec", "launcherCreationPolicy")) == "WaitForWorkersReady":
        yield "its launcher waits for the workers: a gang scheduler must count the workers only"
    yield from unhonoured(job, plan, labels)


def _picks_by_affinity(job: Job, labels: Labels) -> Iterator[bool]:
    for team in job.teams:
        rules = part(job.objects[0], (*team.template, *_RULES)) or ()
        yield any(rule.get("topologyKey") == labels.clique for rule in rules)
