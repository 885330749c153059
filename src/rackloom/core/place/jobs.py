"""Read jobs of the kinds that users submit: their groups, pod templates, labels and priority.

`read_jobs` finds the jobs among Kubernetes objects: MPIJob (kubeflow.org/v2beta1), Job, JobSet,
LeaderWorkerSet, and unbound pods. Pods form one job if they share a gang label, a job label, a
controller, or the channel template of a ComputeDomain. Pods of a job with equal requirements become
members of one group; where anti-affinity is involved, their labels must be equal too.

A `JobGroup` is the members of one pod template. A Job counts the pods that run at a time (the smaller of
parallelism and completions); each replica of a LeaderWorkerSet shares a clique. A job has at most 4096
members. Labels that a controller adds to its pods (`controller_labels`) are part of the group's identity,
because selectors may refer to them.

The priority is the class of the gang (an MPIJob's scheduling policy) if it names one, else the highest of
the groups with devices. A job preempts only if no class or pod says `preemptionPolicy: Never`.

Raises Refused for a job that cannot be read.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.place.object_shapes import OwnedShape, PodShape, check_shape, object_title
from rackloom.core.place.placement_values import SchedulerLabels, list_names
from rackloom.core.place.pod_constraints import (
    JsonMapping,
    PodIdentity,
    PodRequirements,
    pod_identity,
    read_pod_requirements,
)
from rackloom.errors import Refused

ObjectPath = tuple[str | int, ...]
TemplateName = tuple[str, str]
"""The namespace and the name of a ResourceClaimTemplate."""
MAX_JOB_MEMBERS = 4096
"""Members of a job: far above any rack, and soon planned."""
_MPI_VERSION = "kubeflow.org/v2beta1"
_JOB_NAME_LABELS = ("training.kubeflow.org/job-name", "batch.kubernetes.io/job-name", "job-name")


class JobGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a job, before its claims are resolved."""

    name: str
    members: int
    template: ObjectPath
    """Where the object has the pod template."""
    need: PodRequirements
    share: str = ""
    channel: bool = False
    """Each member gets the IMEX channel of a ComputeDomain."""
    identity: PodIdentity
    """Each member as other pods know it."""
    controller_labels: tuple[str, ...] = ()
    """Keys of the labels that the controller of its kind puts on it."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a file (or several pods) that runs whole."""

    name: str
    kind: str
    groups: tuple[JobGroup, ...]
    objects: tuple[dict[str, Any], ...]
    """One, or the pods of a gang in the order of the groups."""


GroupReader = Callable[[JsonMapping], Iterator[tuple[str, int, ObjectPath, str]]]
"""Yields name, members, path of the pod template and share of each group."""


def read_jobs(objects: Sequence[dict[str, Any]], labels: SchedulerLabels) -> list[Job]:
    """The jobs among the objects, in their order. Refused for a job that cannot be read."""
    for obj in objects:
        if obj.get("kind") in (*JOB_KINDS, "ComputeDomain"):
            check_shape(obj, PodShape if obj["kind"] == "Pod" else OwnedShape, object_title(obj))
    jobs, channels = [], channel_templates(objects)
    for obj in objects:
        if obj.get("kind") in _READERS:
            with _refuse_malformed(object_title(obj)):
                jobs.append(_read_job(obj, channels, labels))
    pods = [
        obj for obj in objects if obj.get("kind") == "Pod" and not (obj.get("spec") or {}).get("nodeName")
    ]
    with _refuse_malformed("a Pod"):
        return [*jobs, *_gangs_of_pods(pods, channels, labels)]


def owner_of_pod(pod: JsonMapping, labels: SchedulerLabels) -> str:
    """The job that a pod belongs to: the gang, else the job of its labels, its controller, or itself."""
    metadata = pod.get("metadata") or {}
    present, references = metadata.get("labels") or {}, metadata.get("ownerReferences") or ()
    named = next((present[key] for key in (labels.gang, *_JOB_NAME_LABELS) if present.get(key)), None)
    controller = next((owner["name"] for owner in references if owner.get("controller")), None)
    # The order of these sources matters: a pod of a gang also has a controller, which may make other pods.
    return qualified_name(metadata, named or controller or object_name(metadata))


def object_name(metadata: JsonMapping) -> Any:
    """The name, or what the API server begins one with (generateName)."""
    return metadata.get("name") or metadata.get("generateName") or ""


def object_namespace(metadata: JsonMapping) -> str:
    """The namespace; the one that kubectl takes where none is written."""
    return metadata.get("namespace") or "default"


def qualified_name(metadata: JsonMapping, name: str) -> str:
    """The name by which a job is known to the planner; the default namespace is not named."""
    namespace = object_namespace(metadata)
    return name if namespace == "default" else f"{namespace}/{name}"


def value_at(value: Any, path: ObjectPath) -> Any:
    """What an object has at a path; None where it has nothing."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


@contextmanager
def _refuse_malformed(what: str) -> Iterator[None]:
    """An object from a file was checked by no API server: its fields may have any type."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise Refused(
            f"{what} is not shaped like one: {error}",
            nearest_fix="compare it with the reference of its kind (`kubectl explain`)",
        ) from error


def _read_job(value: dict[str, Any], channels: Collection[TemplateName], labels: SchedulerLabels) -> Job:
    kind, metadata = value["kind"], value.get("metadata") or {}
    name = _checked_name(metadata, kind)
    title, namespace = f"{kind} {name or '(unnamed)'}", object_namespace(metadata)
    groups: list[JobGroup] = []
    for group_name, members, path, share in _READERS[kind](value):
        template = value_at(value, path)
        if not isinstance(template, Mapping):
            raise Refused(f"{title} has no pod template at {_dotted_path(path)}", nearest_fix="add it")
        check_shape(template, PodShape, title, _dotted_path(path))
        _check_members(f"{title}: {group_name}", members, sum(group.members for group in groups))
        need, added = read_pod_requirements(template, labels), controller_labels(kind, name, group_name)
        groups.append(
            JobGroup(
                name=group_name,
                members=members,
                template=path,
                need=need,
                share=share,
                channel=any((namespace, template) in channels for template in need.templates),
                identity=PodIdentity(
                    namespace=namespace,
                    labels={**(value_at(template, ("metadata", "labels")) or {}), **added},
                    apart=need.apart,
                ),
                controller_labels=tuple(added),
            )
        )
    if not groups:
        raise Refused(f"{title} has no replicas", nearest_fix="add its replica specs")
    return Job(name=qualified_name(metadata, name), kind=kind, groups=tuple(groups), objects=(value,))


def _check_members(group: str, members: object, others: int) -> None:
    if not isinstance(members, int) or members < 1:
        raise Refused(f"{group} has {members!r} members", nearest_fix="ask for a whole number from 1")
    if others + members > MAX_JOB_MEMBERS:
        fix = f"ask for {MAX_JOB_MEMBERS} or fewer in the whole job"
        raise Refused(f"{group} has {members} members, and {others} stand before it", nearest_fix=fix)


def _checked_name(meta: JsonMapping, what: str) -> str:
    name = object_name(meta)
    if not isinstance(name, str):
        raise Refused(f"{what}: a name is {name!r}", nearest_fix="write it as text, in quotes if need be")
    return name


def _count_at(value: Any, path: ObjectPath) -> Any:
    """A number of replicas; 1 where none is written, and 0 where it is 0."""
    found = value_at(value, path)
    return 1 if found is None else found


def _mpi_job(value: JsonMapping) -> Iterator[tuple[str, int, ObjectPath, str]]:
    if value.get("apiVersion", _MPI_VERSION) != _MPI_VERSION:
        reason = f"MPIJob {object_name(value.get('metadata') or {})} is of {value['apiVersion']}"
        raise Refused(f"{reason}, which is not read", nearest_fix=f"write it for {_MPI_VERSION}")
    specs = value_at(value, ("spec", "mpiReplicaSpecs")) or {}
    launchers = _count_at(value, ("spec", "mpiReplicaSpecs", "Launcher", "replicas"))
    if launchers != 1:
        reason = f"MPIJob {object_name(value.get('metadata') or {})} has {launchers!r} launchers"
        raise Refused(reason, nearest_fix="set Launcher.replicas to 1: no other number is taken")
    for role in ("Launcher", "Worker"):
        if role in specs:
            path: ObjectPath = ("spec", "mpiReplicaSpecs", role)
            yield role.lower(), _count_at(value, (*path, "replicas")), (*path, "template"), ""


def _batch_job(value: JsonMapping) -> Iterator[tuple[str, int, ObjectPath, str]]:
    yield "pod", _parallel_pods(value, ("spec",)), ("spec", "template"), ""


def _job_set(value: JsonMapping) -> Iterator[tuple[str, int, ObjectPath, str]]:
    for number, job in enumerate(value_at(value, ("spec", "replicatedJobs")) or ()):
        spec: ObjectPath = ("spec", "replicatedJobs", number, "template", "spec")
        replicas = job.get("replicas", 1)
        if replicas != 0:
            pods = replicas * _parallel_pods(value, spec)
            yield _checked_name(job, "JobSet") or f"job-{number}", pods, (*spec, "template"), ""


def _parallel_pods(value: JsonMapping, spec: ObjectPath) -> Any:
    """Pods of a Job that run beside each other: never more than are left to complete."""
    parallelism = _count_at(value, (*spec, "parallelism"))
    completions = value_at(value, (*spec, "completions"))
    return parallelism if completions is None else min(parallelism, completions)


def _leader_worker_set(value: JsonMapping) -> Iterator[tuple[str, int, ObjectPath, str]]:
    """Each replica is a leader and its workers, which share a clique."""
    inside: ObjectPath = ("spec", "leaderWorkerTemplate")
    size = _count_at(value, (*inside, "size"))
    _check_members("each replica", size, 0)
    leads = value_at(value, (*inside, "leaderTemplate")) is not None
    for number in range(_count_at(value, ("spec", "replicas"))):
        replica = f"replica-{number}"
        if leads:
            yield f"{replica}-leader", 1, (*inside, "leaderTemplate"), replica
        if size > leads:
            yield f"{replica}-worker", size - leads, (*inside, "workerTemplate"), replica


_READERS: dict[str, GroupReader] = {
    "MPIJob": _mpi_job,
    "Job": _batch_job,
    "JobSet": _job_set,
    "LeaderWorkerSet": _leader_worker_set,
}
JOB_KINDS = (*_READERS, "Pod")


def _gangs_of_pods(
    pods: Sequence[dict[str, Any]], channels: Collection[TemplateName], labels: SchedulerLabels
) -> Iterator[Job]:
    """Pods that share a gang label, a job, or the channel of a ComputeDomain are one job."""
    gangs: dict[str, list[tuple[dict[str, Any], JobGroup]]] = {}
    for pod in pods:
        need, metadata = read_pod_requirements(pod, labels), pod.get("metadata") or {}
        own, namespace = _checked_name(metadata, "Pod"), object_namespace(metadata)
        domain = next((name for name in need.templates if (namespace, name) in channels), None)
        name = qualified_name(metadata, domain) if domain else owner_of_pod(pod, labels)
        group = JobGroup(
            name=own,
            members=1,
            template=(),
            need=need,
            channel=domain is not None,
            identity=pod_identity(pod, labels.host),
        )
        gangs.setdefault(name, []).append((pod, group))
    for name, members in gangs.items():
        groups = [group for _, group in members]
        first, by_identity = groups[0], any(group.need.apart for group in groups)
        # Without anti-affinity, labels do not matter for the placement.
        if all(
            group.need == first.need and (not by_identity or group.identity == first.identity)
            for group in groups
        ):
            groups = [replace(first, name="pod", members=len(groups))]
        yield Job(name=name, kind="Pod", groups=tuple(groups), objects=tuple(pod for pod, _ in members))


def channel_templates(objects: Sequence[JsonMapping]) -> set[TemplateName]:
    """The claim templates that ComputeDomains create: each pod gets an IMEX channel, whatever its node."""
    return {
        (object_namespace(obj.get("metadata") or {}), name)
        for obj in objects
        if obj.get("kind") == "ComputeDomain"
        and isinstance(name := value_at(obj, ("spec", "channel", "resourceClaimTemplate", "name")), str)
    }


def _dotted_path(path: ObjectPath) -> str:
    return ".".join(str(key) for key in path)


# Labels that controllers put on their pods.


def controller_labels(kind: str, name: str, group: str) -> dict[str, str]:
    """The labels that tell the pods of a group of a job from all others."""
    match kind:
        case "MPIJob":
            return {
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/operator-name": "mpi-operator",
                "training.kubeflow.org/job-role": group,
            }
        case "Job":
            return {"batch.kubernetes.io/job-name": name, "job-name": name}
        case "JobSet":
            return {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": group,
            }
        case "LeaderWorkerSet":
            return {"leaderworkerset.sigs.k8s.io/name": name}
    return {}


# Priority classes.


BUILT_IN_PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
"""Priority classes of every cluster."""
DEFAULT_CLASS = ""
"""What pods without a class have: the value of the class that is the global default."""
_POD_GROUP_CLASS = ("spec", "runPolicy", "schedulingPolicy", "priorityClass")
"""Of an MPIJob: the class of its PodGroup, whatever its pods say."""


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True):
    """One PriorityClass (scheduling.k8s.io/v1)."""

    name: str
    value: int
    is_default: bool = False
    never_preempts: bool = False


class PriorityClasses:
    """Values by name, and whether these are all classes of the site.

    A class that the site does not have is refused where all are known, because the API server would refuse
    the pods. Otherwise it counts as priority 0, and a note says so.
    """

    def __init__(self, classes: Iterable[PriorityClass], *, are_all_known: bool) -> None:
        self.values: dict[str, int] = dict(BUILT_IN_PRIORITIES)
        self.never: set[str] = set()
        """Classes whose pods preempt nothing."""
        self._are_all_known = are_all_known
        for klass in classes:
            self._add(klass.name, klass)
            # Of several defaults the API server takes the lowest.
            if klass.is_default and klass.value <= self.values.get(DEFAULT_CLASS, klass.value):
                self._add(DEFAULT_CLASS, klass)

    def _add(self, name: str, klass: PriorityClass) -> None:
        self.values[name] = klass.value
        self.never.discard(name)
        if klass.never_preempts:
            self.never.add(name)

    def check(self, job: Job) -> None:
        """Refuse a class that the site does not have: the API server would refuse the pods."""
        unknown = _unknown_classes(job, self.values)
        if unknown and self._are_all_known:
            known = sorted(name for name in self.values if name != DEFAULT_CLASS)
            raise Refused(
                f"{job.name} names the PriorityClass {unknown[0]}, which there is not",
                nearest_fix=f"name one of {list_names(known, most=8)}, or add {unknown[0]} to the files",
            )

    def notes(self, job: Job) -> Iterator[str]:
        """A note for each class whose value is in no file."""
        for name in _unknown_classes(job, self.values):
            yield (
                f"nothing is known of the PriorityClass {name}:"
                f" it counts as priority 0, so no preemption is"
                " offered for it; add the site's priorityclasses to --site"
            )


def priority_of_job(job: Job, classes: Mapping[str, int]) -> int:
    """That of the class that the gang names, else the highest of its groups with devices; 0 if unknown."""
    if named := _pod_group_class(job):
        return classes.get(named, 0)
    return max(need.priority or classes.get(need.priority_class, 0) for need in _requirements(job))


def may_preempt(job: Job, never: Collection[str]) -> bool:
    """Whether the scheduler may make room for it; `never`: classes whose preemptionPolicy is Never."""
    if _pod_group_class(job) in (set(never) - {DEFAULT_CLASS}):
        return False
    return all(need.preempts and need.priority_class not in never for need in _requirements(job))


def _unknown_classes(job: Job, classes: Mapping[str, int]) -> list[str]:
    """Classes that the job names and that are not in `classes`, each once."""
    named = dict.fromkeys((_pod_group_class(job), *(group.need.priority_class for group in job.groups)))
    return [name for name in named if name and name not in classes]


def _requirements(job: Job) -> list[PodRequirements]:
    """Of the groups with devices, where there is one."""
    with_devices = [group.need for group in job.groups if group.need.takes_devices]
    return with_devices or [group.need for group in job.groups]


def _pod_group_class(job: Job) -> str:
    named = value_at(job.objects[0], _POD_GROUP_CLASS) if job.kind == "MPIJob" else None
    return named if isinstance(named, str) else ""
