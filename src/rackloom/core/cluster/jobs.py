"""Read jobs of the kinds that users submit: their groups, pod templates, labels and priority.

`read_jobs` finds the jobs among Kubernetes objects: the kinds of `workload_kinds`, any other object with pod
templates, and unbound pods. Pods form one job if they share a gang label, a job label, a controller, or the
channel template of a ComputeDomain. Pods of a job with equal requirements become members of one group. If
anti-affinity is involved, their labels must be equal too.

A `JobGroup` is the members of one pod template. A job has at most 4096 members. Labels that a controller adds
to its pods (`controller_labels`) are part of the group's identity, because selectors may refer to them.

The priority is the class of the gang (an MPIJob's scheduling policy) if it names one, or else the highest of
the groups with devices. A job preempts only if no class or pod has `preemptionPolicy: Never`.

Raises Refused for a job that cannot be read.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import convert_object
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import JsonMapping, list_names, object_name, title_in_file
from rackloom.core.cluster.pods import (
    AnyObject,
    Owner,
    PodObject,
    PodSpec,
    check_shape,
    node_of,
    object_namespace,
    pod_owner,
    qualified_name,
    read_pod,
)
from rackloom.core.cluster.scheduling import (
    PodIdentity,
    PodRequirements,
    pod_identity,
    read_pod_requirements,
)
from rackloom.core.cluster.workload_kinds import (
    VOLCANO,
    ObjectPath,
    PodGroup,
    check_members,
    checked_name,
    controller_labels,
    is_for_devices,
    is_guess,
    is_job,
    read_groups,
    value_at,
)
from rackloom.errors import Refused

TemplateName = tuple[str, str]
"""The namespace and the name of a ResourceClaimTemplate."""
_TRAINING_JOBS = ("MPIJob", "PyTorchJob")


class JobGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a job, before its claims are resolved."""

    name: str
    members: int
    template: ObjectPath
    """The path of the pod template in the object."""
    spec_key: str = "spec"
    """The template's key of its pod spec."""
    need: PodRequirements
    share: str = ""
    follows: bool = False
    """`PodGroup.follows`."""
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
    is_guess: bool = False
    """Its kind is not known: its groups are those of the pod templates that it has."""


def read_jobs(objects: Sequence[dict[str, Any]], labels: SchedulerLabels) -> list[Job]:
    """The jobs among the objects, in their order. Raises Refused for a job that cannot be read.

    A Deployment and its like, and jobs that are read by a guess, count only if a pod takes a device.
    """
    for obj in objects:
        if is_job(obj) or obj.get("kind") in ("Pod", "ComputeDomain"):
            check_shape(obj, PodObject if obj["kind"] == "Pod" else AnyObject, title_in_file(obj))
    jobs, channels = [], channel_templates(objects)
    for obj in objects:
        if is_job(obj):
            with _refuse_malformed(title_in_file(obj)):
                job = _read_job(obj, channels, labels)
            if is_for_devices(job.kind) or any(group.need.takes_devices for group in job.groups):
                jobs.append(job)
    pods = [obj for obj in objects if obj.get("kind") == "Pod" and not node_of(obj)]
    with _refuse_malformed("a Pod"):
        return [*jobs, *_gangs_of_pods(pods, channels, labels)]


def owner_of_job(job: "Job", gang_label: str) -> Owner:
    """The owner of the pods that a job of a file will have."""
    first = job.objects[0]
    if job.kind == "Pod":
        return pod_owner(read_pod(first), gang_label)
    kind = "training job" if job.kind in _TRAINING_JOBS else job.kind
    if str(first.get("apiVersion")).startswith(VOLCANO):
        kind = "VolcanoJob"
    return Owner(object_namespace(first), kind, job.name.rpartition("/")[2])


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
    kind, namespace = value["kind"], object_namespace(value)
    name = checked_name(object_name(value), kind)
    title = f"{kind} {name or '(unnamed)'}"
    groups: list[JobGroup] = []
    for group in read_groups(value):
        template = _pod_template(value, group, title)
        check_members(f"{title}: {group.name}", group.members, sum(other.members for other in groups))
        need, added = read_pod_requirements(template, labels), controller_labels(kind, name, group.name)
        groups.append(
            JobGroup(
                name=group.name,
                members=group.members,
                template=group.template,
                spec_key=group.spec_key,
                need=need,
                share=group.share,
                follows=group.follows,
                channel=any((namespace, template) in channels for template in need.templates),
                identity=PodIdentity(
                    namespace=namespace,
                    labels={**template.labels, **added},
                    apart=need.apart,
                ),
                controller_labels=tuple(added),
            )
        )
    if not groups and is_for_devices(kind):
        raise Refused(f"{title} has no replicas", nearest_fix="add its replica specs")
    return Job(
        name=qualified_name(namespace, name),
        kind=kind,
        groups=tuple(groups),
        objects=(value,),
        is_guess=is_guess(kind),
    )


def _pod_template(value: JsonMapping, group: PodGroup, title: str) -> PodObject:
    """The pod template of a group, with its spec under that name. Raises Refused if there is none."""
    template, at = value_at(value, group.template), ".".join(map(str, group.template))
    if group.spec_key != "spec" and isinstance(template, Mapping):
        template, at = {"spec": template.get(group.spec_key)}, f"{at}.{group.spec_key}"
    if not isinstance(template, Mapping) or not isinstance(template.get("spec", {}), Mapping):
        raise Refused(f"{title} has no pod template at {at}", nearest_fix="add it")
    return check_shape(template, PodObject, title, at)


def pod_specs_of(job: Job, group: JobGroup) -> Iterator[PodSpec]:
    """The pod specs of a group: that of its template, or one of each pod."""
    if group.template:
        yield convert_object(value_at(job.objects[0], (*group.template, group.spec_key)) or {}, PodSpec)
        return
    for obj in job.objects:
        if group.name in ("pod", object_name(obj)):
            yield read_pod(obj).spec


def topology_request(workload: JsonMapping, group: JobGroup) -> JsonMapping:
    """The request for domains of a topology that a Workload of Kueue has beside a pod template."""
    return value_at(workload, (*group.template[:-1], "topologyRequest")) or {}


def _gangs_of_pods(
    pods: Sequence[dict[str, Any]], channels: Collection[TemplateName], labels: SchedulerLabels
) -> Iterator[Job]:
    """Pods that share a gang label, a job, or the channel of a ComputeDomain are one job."""
    gangs: dict[str, list[tuple[dict[str, Any], JobGroup]]] = {}
    for obj in pods:
        pod = read_pod(obj)
        need, namespace = read_pod_requirements(pod, labels), pod.namespace
        domain = next((name for name in need.templates if (namespace, name) in channels), None)
        name = qualified_name(namespace, domain or pod_owner(pod, labels.gang).name)
        group = JobGroup(
            name=checked_name(object_name(obj), "Pod"),
            members=1,
            template=(),
            need=need,
            channel=domain is not None,
            identity=pod_identity(pod, labels.host),
        )
        gangs.setdefault(name, []).append((obj, group))
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
    """The claim templates that ComputeDomains create: each pod gets an IMEX channel, on any node."""
    return {
        (object_namespace(obj), name)
        for obj in objects
        if obj.get("kind") == "ComputeDomain"
        and isinstance(name := value_at(obj, ("spec", "channel", "resourceClaimTemplate", "name")), str)
    }


# Priority classes.


BUILT_IN_PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
"""Priority classes of every cluster."""
DEFAULT_CLASS = ""
"""The class of pods without one: its value is that of the global default."""
_POD_GROUP_CLASS = ("spec", "runPolicy", "schedulingPolicy", "priorityClass")
"""Of an MPIJob: the class of its PodGroup, which overrides that of its pods."""


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True):
    """One PriorityClass (scheduling.k8s.io/v1)."""

    name: str
    value: int
    is_default: bool = False
    never_preempts: bool = False


class PriorityClasses:
    """Values by name, and whether these are all classes of the site.

    If all classes are known, a class that the site does not have is refused, because the API server would
    refuse the pods. Otherwise it counts as priority 0, with a note.
    """

    def __init__(self, classes: Iterable[PriorityClass], *, are_all_known: bool) -> None:
        self.values: dict[str, int] = dict(BUILT_IN_PRIORITIES)
        self.never: set[str] = set()
        """Classes with pods that preempt nothing."""
        self._are_all_known = are_all_known
        for klass in classes:
            self._add(klass.name, klass)
            # The API server takes the lowest of several defaults.
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
        """A note for each class that no file gives a value."""
        for name in _unknown_classes(job, self.values):
            yield (
                f"nothing is known of the PriorityClass {name}:"
                f" it counts as priority 0, so no preemption is"
                " offered for it; add the site's priorityclasses to --site"
            )


def priority_of_job(job: Job, classes: Mapping[str, int]) -> int:
    """That of the class that the gang names, or else the highest of its groups with devices. 0 if unknown."""
    if named := _pod_group_class(job):
        return classes.get(named, 0)
    return max(need.priority or classes.get(need.priority_class, 0) for need in _requirements(job))


def may_preempt(job: Job, never: Collection[str]) -> bool:
    """Whether the scheduler may make room for it. `never`: classes with preemptionPolicy Never."""
    if _pod_group_class(job) in (set(never) - {DEFAULT_CLASS}):
        return False
    return all(need.preempts and need.priority_class not in never for need in _requirements(job))


def _unknown_classes(job: Job, classes: Mapping[str, int]) -> list[str]:
    """Classes that the job names and that are not in `classes`, each once."""
    named = dict.fromkeys((_pod_group_class(job), *(group.need.priority_class for group in job.groups)))
    return [name for name in named if name and name not in classes]


def _requirements(job: Job) -> list[PodRequirements]:
    """The requirements of the groups with devices, or of all groups if none has devices."""
    with_devices = [group.need for group in job.groups if group.need.takes_devices]
    return with_devices or [group.need for group in job.groups]


def _pod_group_class(job: Job) -> str:
    named = value_at(job.objects[0], _POD_GROUP_CLASS) if job.kind == "MPIJob" else None
    return named if isinstance(named, str) else ""
