"""Jobs of the kinds that people submit, as gangs with the pod templates of their groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.pods import Json, PodNeed, pod_need
from rackloom.errors import Refused

Path = tuple[str | int, ...]
MOST = 4096
"""Members of a job: far above any rack, and soon planned."""
_JOB_NAMES = ("training.kubeflow.org/job-name", "batch.kubernetes.io/job-name", "job-name")


class Team(msgspec.Struct, frozen=True, kw_only=True):
    """A group before its claims are looked at."""

    name: str
    members: int
    template: Path
    """Where the object has the pod template."""
    need: PodNeed
    share: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a file (or several pods) that runs whole."""

    name: str
    kind: str
    teams: tuple[Team, ...]
    objects: tuple[dict[str, Any], ...]
    """One, or the pods of a gang in the order of the teams."""


Reader = Callable[[Json], Iterator[tuple[str, int, Path, str]]]
"""Yields name, members, path of the pod template and share of each group."""


def jobs_of(objects: Sequence[dict[str, Any]], labels: Labels) -> list[Job]:
    """The jobs among the objects, in their order. Refused for a job that cannot be read."""
    found = []
    for one in objects:
        if one.get("kind") in _READERS:
            with _shaped(one["kind"]):
                found.append(_job(one, labels))
    pods = [
        one for one in objects if one.get("kind") == "Pod" and not (one.get("spec") or {}).get("nodeName")
    ]
    with _shaped("Pod"):
        return [*found, *_pod_gangs(pods, channel_templates(objects), labels)]


def owner_of(pod: Json, labels: Labels) -> str:
    """The job that a pod belongs to: the gang, else the job of its labels, its controller, or itself."""
    metadata = pod.get("metadata") or {}
    marks = metadata.get("labels") or {}
    named = next((marks[key] for key in (labels.gang, *_JOB_NAMES) if marks.get(key)), None)
    controllers = [one["name"] for one in metadata.get("ownerReferences") or () if one.get("controller")]
    return in_namespace(metadata, named or next(iter(controllers), metadata.get("name", "")))


def in_namespace(metadata: Json, name: str) -> str:
    """The name by which a job is known to the planner; the default namespace is not named."""
    namespace = metadata.get("namespace") or "default"
    return name if namespace == "default" else f"{namespace}/{name}"


def part(value: Any, path: Path) -> Any:
    """What an object has at a path; None where it has nothing."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


@contextmanager
def _shaped(kind: str) -> Iterator[None]:
    """The API server checks every field; here those that are read have to be what their kind says."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise Refused(
            f"a {kind} is not shaped like one: {error}",
            nearest_fix="compare it with the reference of its kind (`kubectl explain`)",
        ) from error


def _job(value: dict[str, Any], labels: Labels) -> Job:
    kind, metadata = value["kind"], value.get("metadata") or {}
    title, name = f"{kind} {metadata.get('name', '(unnamed)')}", _name_in(metadata, kind)
    teams: list[Team] = []
    for group, members, path, share in _READERS[kind](value):
        template = part(value, path)
        if not isinstance(template, Mapping):
            raise Refused(f"{title} has no pod template at {_dotted(path)}", nearest_fix="add it")
        _check_members(f"{title}: {group}", members, sum(one.members for one in teams))
        teams.append(
            Team(name=group, members=members, template=path, need=pod_need(template, labels), share=share)
        )
    if not teams:
        raise Refused(f"{title} has no replicas", nearest_fix="add its replica specs")
    return Job(name=in_namespace(metadata, name), kind=kind, teams=tuple(teams), objects=(value,))


def _check_members(group: str, members: object, others: int) -> None:
    if not isinstance(members, int) or members < 1:
        raise Refused(f"{group} has {members!r} members", nearest_fix="ask for a whole number from 1")
    if others + members > MOST:
        fix = f"ask for {MOST} or fewer in the whole job"
        raise Refused(f"{group} has {members} members, and {others} stand before it", nearest_fix=fix)


def _name_in(meta: Json, what: str) -> str:
    name = meta.get("name", "")
    if not isinstance(name, str):
        raise Refused(f"{what}: a name is {name!r}", nearest_fix="write it as text, in quotes if need be")
    return name


def _count(value: Any, path: Path) -> Any:
    """1 where nothing is written; 0 is what it says."""
    found = part(value, path)
    return 1 if found is None else found


def _mpi_job(value: Json) -> Iterator[tuple[str, int, Path, str]]:
    specs = part(value, ("spec", "mpiReplicaSpecs")) or {}
    for role in ("Launcher", "Worker"):
        if role in specs:
            path: Path = ("spec", "mpiReplicaSpecs", role)
            yield role.lower(), _count(value, (*path, "replicas")), (*path, "template"), ""


def _batch_job(value: Json) -> Iterator[tuple[str, int, Path, str]]:
    yield "pod", _at_a_time(value, ("spec",)), ("spec", "template"), ""


def _job_set(value: Json) -> Iterator[tuple[str, int, Path, str]]:
    for number, one in enumerate(part(value, ("spec", "replicatedJobs")) or ()):
        spec: Path = ("spec", "replicatedJobs", number, "template", "spec")
        pods = one.get("replicas", 1) * _at_a_time(value, spec)
        yield _name_in(one, "JobSet") or f"job-{number}", pods, (*spec, "template"), ""


def _at_a_time(value: Json, spec: Path) -> Any:
    """Pods of a Job that run beside each other: never more than are left to complete."""
    parallelism, completions = _count(value, (*spec, "parallelism")), part(value, (*spec, "completions"))
    return parallelism if completions is None else min(parallelism, completions)


def _leader_worker_set(value: Json) -> Iterator[tuple[str, int, Path, str]]:
    """Each replica is a leader and its workers, in a clique of their own."""
    inside: Path = ("spec", "leaderWorkerTemplate")
    size = _count(value, (*inside, "size"))
    _check_members("each replica", size, 0)
    leads = part(value, (*inside, "leaderTemplate")) is not None
    for number in range(_count(value, ("spec", "replicas"))):
        replica = f"replica-{number}"
        if leads:
            yield f"{replica}-leader", 1, (*inside, "leaderTemplate"), replica
        if size > leads:
            yield f"{replica}-worker", size - leads, (*inside, "workerTemplate"), replica


_READERS: dict[str, Reader] = {
    "MPIJob": _mpi_job,
    "Job": _batch_job,
    "JobSet": _job_set,
    "LeaderWorkerSet": _leader_worker_set,
}
KINDS = (*_READERS, "Pod")


def _pod_gangs(pods: Sequence[dict[str, Any]], channels: set[str], labels: Labels) -> Iterator[Job]:
    """Pods that share a gang label, a job, or the channel of a ComputeDomain run together."""
    gangs: dict[str, list[tuple[dict[str, Any], PodNeed]]] = {}
    for pod in pods:
        need = pod_need(pod, labels)
        domain = next((name for name in need.templates if name in channels), None)
        metadata = pod.get("metadata") or {}
        _name_in(metadata, "Pod")
        name = in_namespace(metadata, domain) if domain else owner_of(pod, labels)
        gangs.setdefault(name, []).append((pod, need))
    for name, members in gangs.items():
        yield Job(
            name=name,
            kind="Pod",
            teams=tuple(_teams([(pod["metadata"]["name"], need) for pod, need in members])),
            objects=tuple(pod for pod, _ in members),
        )


def _teams(pods: Sequence[tuple[str, PodNeed]]) -> Iterator[Team]:
    """Pods that are alike are members of one group; else each is a group."""
    first = pods[0][1]
    if all(need == first for _, need in pods):
        yield Team(name="pod", members=len(pods), template=(), need=first)
        return
    for name, need in pods:
        yield Team(name=name, members=1, template=(), need=need)


def channel_templates(objects: Sequence[Json]) -> set[str]:
    """The claim templates that ComputeDomains make: each pod gets an IMEX channel, whichever its node."""
    return {
        name
        for one in objects
        if one.get("kind") == "ComputeDomain"
        and (name := part(one, ("spec", "channel", "resourceClaimTemplate", "name")))
    }


def _dotted(path: Path) -> str:
    return ".".join(str(key) for key in path)
