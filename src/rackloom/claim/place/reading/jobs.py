"""Jobs of the kinds that people submit, as gangs with the pod templates of their groups."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.made_labels import made_labels
from rackloom.claim.place.reading.neighbours import Known, known
from rackloom.claim.place.reading.pods import Json, PodNeed, pod_need
from rackloom.claim.place.reading.shapes import Owned, Pod, called, check_shape
from rackloom.errors import Refused

Path = tuple[str | int, ...]
Template = tuple[str, str]
"""The namespace and the name of a ResourceClaimTemplate."""
MOST = 4096
"""Members of a job: far above any rack, and soon planned."""
_MPI = "kubeflow.org/v2beta1"
_JOB_NAMES = ("training.kubeflow.org/job-name", "batch.kubernetes.io/job-name", "job-name")


class Team(msgspec.Struct, frozen=True, kw_only=True):
    """A group before its claims are looked at."""

    name: str
    members: int
    template: Path
    """Where the object has the pod template."""
    need: PodNeed
    share: str = ""
    channel: bool = False
    """Each member gets the channel of a ComputeDomain."""
    known: Known
    """Each member as other pods know it."""
    made: tuple[str, ...] = ()
    """The labels that the controller of its kind puts on it."""


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
    for one in objects:
        if one.get("kind") in (*KINDS, "ComputeDomain"):
            check_shape(one, Pod if one["kind"] == "Pod" else Owned, called(one))
    found, channels = [], channel_templates(objects)
    for one in objects:
        if one.get("kind") in _READERS:
            with _shaped(called(one)):
                found.append(_job(one, channels, labels))
    pods = [
        one for one in objects if one.get("kind") == "Pod" and not (one.get("spec") or {}).get("nodeName")
    ]
    with _shaped("a Pod"):
        return [*found, *_pod_gangs(pods, channels, labels)]


def owner_of(pod: Json, labels: Labels) -> str:
    """The job that a pod belongs to: the gang, else the job of its labels, its controller, or itself."""
    metadata = pod.get("metadata") or {}
    marks = metadata.get("labels") or {}
    named = next((marks[key] for key in (labels.gang, *_JOB_NAMES) if marks.get(key)), None)
    controllers = [one["name"] for one in metadata.get("ownerReferences") or () if one.get("controller")]
    return in_namespace(metadata, named or next(iter(controllers), name_in(metadata)))


def name_in(metadata: Json) -> Any:
    """The name, or what the API server begins one with (generateName)."""
    return metadata.get("name") or metadata.get("generateName") or ""


def namespace_in(metadata: Json) -> str:
    """The namespace; the one that kubectl takes where none is written."""
    return metadata.get("namespace") or "default"


def has_channel(namespace: str, need: PodNeed, channels: Collection[Template]) -> bool:
    """Whether it claims by a template that a ComputeDomain makes."""
    return any((namespace, name) in channels for name in need.templates)


def in_namespace(metadata: Json, name: str) -> str:
    """The name by which a job is known to the planner; the default namespace is not named."""
    namespace = namespace_in(metadata)
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
def _shaped(what: str) -> Iterator[None]:
    """The API server checks every field; here those that are read have to be what their kind says."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise Refused(
            f"{what} is not shaped like one: {error}",
            nearest_fix="compare it with the reference of its kind (`kubectl explain`)",
        ) from error


def _job(value: dict[str, Any], channels: Collection[Template], labels: Labels) -> Job:
    kind, metadata = value["kind"], value.get("metadata") or {}
    name = _name_in(metadata, kind)
    title, namespace = f"{kind} {name or '(unnamed)'}", namespace_in(metadata)
    teams: list[Team] = []
    for group, members, path, share in _READERS[kind](value):
        template = part(value, path)
        if not isinstance(template, Mapping):
            raise Refused(f"{title} has no pod template at {_dotted(path)}", nearest_fix="add it")
        check_shape(template, Pod, title, _dotted(path))
        _check_members(f"{title}: {group}", members, sum(one.members for one in teams))
        need, made = pod_need(template, labels), made_labels(kind, name, group)
        teams.append(
            Team(
                name=group,
                members=members,
                template=path,
                need=need,
                share=share,
                channel=has_channel(namespace, need, channels),
                known=Known(
                    namespace=namespace,
                    labels={**(part(template, ("metadata", "labels")) or {}), **made},
                    apart=need.apart,
                ),
                made=tuple(made),
            )
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
    name = name_in(meta)
    if not isinstance(name, str):
        raise Refused(f"{what}: a name is {name!r}", nearest_fix="write it as text, in quotes if need be")
    return name


def _count(value: Any, path: Path) -> Any:
    """1 where nothing is written; 0 is what it says."""
    found = part(value, path)
    return 1 if found is None else found


def _mpi_job(value: Json) -> Iterator[tuple[str, int, Path, str]]:
    if value.get("apiVersion", _MPI) != _MPI:
        reason = f"MPIJob {name_in(value.get('metadata') or {})} is of {value['apiVersion']}"
        raise Refused(f"{reason}, which is not read", nearest_fix=f"write it for {_MPI}")
    specs = part(value, ("spec", "mpiReplicaSpecs")) or {}
    launchers = _count(value, ("spec", "mpiReplicaSpecs", "Launcher", "replicas"))
    if launchers != 1:
        reason = f"MPIJob {name_in(value.get('metadata') or {})} has {launchers!r} launchers"
        raise Refused(reason, nearest_fix="set Launcher.replicas to 1: no other number is taken")
    for role in ("Launcher", "Worker"):
        if role in specs:
            path: Path = ("spec", "mpiReplicaSpecs", role)
            yield role.lower(), _count(value, (*path, "replicas")), (*path, "template"), ""


def _batch_job(value: Json) -> Iterator[tuple[str, int, Path, str]]:
    yield "pod", _at_a_time(value, ("spec",)), ("spec", "template"), ""


def _job_set(value: Json) -> Iterator[tuple[str, int, Path, str]]:
    for number, one in enumerate(part(value, ("spec", "replicatedJobs")) or ()):
        spec: Path = ("spec", "replicatedJobs", number, "template", "spec")
        replicas = one.get("replicas", 1)
        if replicas != 0:
            pods = replicas * _at_a_time(value, spec)
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


def _pod_gangs(
    pods: Sequence[dict[str, Any]], channels: Collection[Template], labels: Labels
) -> Iterator[Job]:
    """Pods that share a gang label, a job, or the channel of a ComputeDomain run together."""
    gangs: dict[str, list[tuple[dict[str, Any], Team]]] = {}
    for pod in pods:
        need, metadata = pod_need(pod, labels), pod.get("metadata") or {}
        own, namespace = _name_in(metadata, "Pod"), namespace_in(metadata)
        domain = next((name for name in need.templates if (namespace, name) in channels), None)
        name = in_namespace(metadata, domain) if domain else owner_of(pod, labels)
        team = Team(
            name=own,
            members=1,
            template=(),
            need=need,
            channel=domain is not None,
            known=known(pod, labels.host),
        )
        gangs.setdefault(name, []).append((pod, team))
    for name, members in gangs.items():
        teams = _joined([team for _, team in members])
        yield Job(name=name, kind="Pod", teams=teams, objects=tuple(pod for pod, _ in members))


def _joined(pods: Sequence[Team]) -> tuple[Team, ...]:
    """Pods that are alike are members of one group; else each is a group.

    By their labels they differ only where these say who may be together.
    """
    first, choosy = pods[0], any(one.need.apart for one in pods)
    if all(one.need == first.need and (not choosy or one.known == first.known) for one in pods):
        return (replace(first, name="pod", members=len(pods)),)
    return tuple(pods)


def channel_templates(objects: Sequence[Json]) -> set[Template]:
    """The claim templates that ComputeDomains make: each pod gets an IMEX channel, whichever its node."""
    return {
        (namespace_in(one.get("metadata") or {}), name)
        for one in objects
        if one.get("kind") == "ComputeDomain"
        and isinstance(name := part(one, ("spec", "channel", "resourceClaimTemplate", "name")), str)
    }


def _dotted(path: Path) -> str:
    return ".".join(str(key) for key in path)
