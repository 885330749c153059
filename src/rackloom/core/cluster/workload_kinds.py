"""The kinds of objects that make pods: the groups of pods that each makes, and the path of their template.

`read_groups` yields the groups of one object. Known kinds are read by their own rules (`_READERS`). Any other
object is searched for pod templates. Each is a group of as many pods as the nearest `replicas` around it.
This is a guess, and every surface that shows it must mark it as one. Kinds in `NOT_JOBS` make no job.

Groups with the same share have to be in one NVLink clique: a replica of a LeaderWorkerSet or of a
PodCliqueSet, a slice of a DisaggregatedSet with an exclusive policy. Groups without one belong to the whole
job.

Sources: the APIs of apps/v1, batch/v1, kubeflow.org/v2beta1 and v1, jobset.x-k8s.io,
leaderworkerset.x-k8s.io, disaggregatedset.x-k8s.io, ray.io, batch.volcano.sh, grove.io, kueue.x-k8s.io
(Workload v1beta2) and nvidia.com (DynamoGraphDeployment v1beta1). Also mpi-operator 0.8.0, `newConfigMap` and
`managedByExternalController`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster.objects import JsonMapping, object_name
from rackloom.errors import Refused

ObjectPath = tuple[str | int, ...]
MAX_JOB_MEMBERS = 4096
"""Members of a job: far above any rack, and soon planned."""
NOT_JOBS = frozenset({"DaemonSet", "PodTemplate", "TrainingRuntime", "ClusterTrainingRuntime"})
"""Kinds with pod templates that run on every node, or make no pods directly."""
_GENERAL = frozenset({"Deployment", "StatefulSet", "ReplicaSet", "CronJob", "Workload"})
"""Kinds with pods that mostly take no device."""
_MPI_VERSION = "kubeflow.org/v2beta1"
_MPI_OPERATOR = "kubeflow.org/mpi-operator"
VOLCANO = "batch.volcano.sh/"
_DYNAMO_OLD = "nvidia.com/v1alpha1"


class PodGroup(msgspec.Struct, frozen=True):
    """Pods that an object makes from one template."""

    name: str
    members: int
    template: ObjectPath
    """The path of the template in the object."""
    share: str = ""
    spec_key: str = "spec"
    """The template's key of its pod spec. Others than `spec` have no metadata as a pod template has."""
    follows: bool = False
    """The ranks of its members go on from those of the group before it."""


GroupReader = Callable[[JsonMapping], Iterator[PodGroup]]


def read_groups(value: JsonMapping) -> Iterator[PodGroup]:
    """The groups of an object that `is_job`. Raises Refused if it cannot be read."""
    kind = value["kind"]
    if kind == "Job" and str(value.get("apiVersion", "")).startswith(VOLCANO):
        return _volcano_job(value)
    return _READERS.get(kind, _guessed)(value)


def is_job(value: JsonMapping) -> bool:
    """Whether an object makes pods that run together. Bare pods are grouped by their owners instead."""
    kind = value.get("kind")
    if not isinstance(kind, str) or kind == "Pod" or kind in NOT_JOBS:
        return False
    return kind in _READERS or next(_templates(value, ()), None) is not None


def is_guess(kind: str) -> bool:
    """Whether the groups of an object are read from its shape alone."""
    return kind not in _READERS


def is_for_devices(kind: str) -> bool:
    """Whether objects of a kind are made for work that takes devices: one without any is a mistake."""
    return kind in _READERS and kind not in _GENERAL


# Helpers that readers share.


def value_at(value: Any, path: ObjectPath) -> Any:
    """The value of an object at a path, or None if it has none."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def checked_name(name: object, what: str) -> str:
    """A name, or "" for none. Raises Refused if it is not text."""
    if not isinstance(name or "", str):
        raise Refused(f"{what}: a name is {name!r}", nearest_fix="write it as text, in quotes if need be")
    return str(name or "")


def check_members(group: str, members: object, others: int) -> None:
    """Raises Refused for more members than a job with `others` other members can have."""
    if not isinstance(members, int) or members < 1:
        raise Refused(f"{group} has {members!r} members", nearest_fix="ask for a whole number from 1")
    if others + members > MAX_JOB_MEMBERS:
        fix = f"ask for {MAX_JOB_MEMBERS} or fewer in the whole job"
        raise Refused(f"{group} has {members} members, and {others} stand before it", nearest_fix=fix)


def _count_at(value: Any, path: ObjectPath, default: int = 1) -> Any:
    """A number of replicas, or the default if none is written. A written 0 stays 0."""
    found = value_at(value, path)
    return default if found is None else found


def _items_at(value: Any, path: ObjectPath, what: str) -> Iterator[tuple[str, ObjectPath]]:
    """The name and the path of each item of a list."""
    for number, item in enumerate(value_at(value, path) or ()):
        yield checked_name(item.get("name"), what) or f"{what}-{number}", (*path, number)


def _title(value: JsonMapping) -> str:
    return f"{value['kind']} {object_name(value)}"


# Kubernetes' own.


def _replicated(value: JsonMapping) -> Iterator[PodGroup]:
    """Deployment, StatefulSet, ReplicaSet."""
    if (replicas := _count_at(value, ("spec", "replicas"))) != 0:
        yield PodGroup("pod", replicas, ("spec", "template"))


def _batch_job(value: JsonMapping) -> Iterator[PodGroup]:
    yield PodGroup("pod", _parallel_pods(value, ("spec",)), ("spec", "template"))


def _cron_job(value: JsonMapping) -> Iterator[PodGroup]:
    """One run of it."""
    spec: ObjectPath = ("spec", "jobTemplate", "spec")
    yield PodGroup("pod", _parallel_pods(value, spec), (*spec, "template"))


def _parallel_pods(value: JsonMapping, spec: ObjectPath) -> Any:
    """Pods of a Job that run beside each other: never more than are left to complete."""
    parallelism = _count_at(value, (*spec, "parallelism"))
    completions = value_at(value, (*spec, "completions"))
    return parallelism if completions is None else min(parallelism, completions)


# Training.


def _mpi_job(value: JsonMapping) -> Iterator[PodGroup]:
    if value.get("apiVersion", _MPI_VERSION) != _MPI_VERSION:
        reason = f"{_title(value)} is of {value['apiVersion']}"
        raise Refused(f"{reason}, which is not read", nearest_fix=f"write it for {_MPI_VERSION}")
    launchers = _count_at(value, ("spec", "mpiReplicaSpecs", "Launcher", "replicas"))
    if launchers != 1:
        reason = f"{_title(value)} has {launchers!r} launchers"
        raise Refused(reason, nearest_fix="set Launcher.replicas to 1: no other number is taken")
    worker = value_at(value, ("spec", "mpiReplicaSpecs", "Worker"))
    if worker is not None and value_at(worker, ("replicas",)) is None:
        reason = f"{_title(value)} does not say how many workers it has"
        raise Refused(reason, nearest_fix="set Worker.replicas: the operator refuses a job without it")
    for group in _by_role(value, ("spec", "mpiReplicaSpecs"), ("Launcher", "Worker")):
        yield replace(group, follows=group.name == "worker" and is_launcher_a_worker(value))


def is_launcher_a_worker(mpi_job: JsonMapping) -> bool:
    """Whether the launcher of an MPIJob runs ranks too: the hostfile names it before worker 0."""
    return bool(value_at(mpi_job, ("spec", "runLauncherAsWorker")))


def waits_for_workers(mpi_job: JsonMapping) -> bool:
    """Whether the operator makes the launcher once all workers are ready."""
    return bool(value_at(mpi_job, ("spec", "launcherCreationPolicy")) == "WaitForWorkersReady")


def other_manager(mpi_job: JsonMapping) -> str | None:
    """The manager that reconciles an MPIJob instead of the MPI operator, which then ignores it, or None."""
    manager = value_at(mpi_job, ("spec", "runPolicy", "managedBy"))
    return None if manager in (None, _MPI_OPERATOR) else str(manager)


def _pytorch_job(value: JsonMapping) -> Iterator[PodGroup]:
    return _by_role(value, ("spec", "pytorchReplicaSpecs"), ("Master", "Worker"))


def _by_role(value: JsonMapping, specs: ObjectPath, roles: tuple[str, ...]) -> Iterator[PodGroup]:
    for role in roles:
        if role in (value_at(value, specs) or {}):
            replicas = _count_at(value, (*specs, role, "replicas"))
            yield PodGroup(role.lower(), replicas, (*specs, role, "template"))


STARTUP_ORDER = ("spec", "startupPolicy", "startupPolicyOrder")
"""The place of a JobSet's order of its replicated Jobs."""


def starts_in_any_order(job_set: JsonMapping) -> bool:
    """Whether the replicated Jobs of a JobSet may start together."""
    jobs = value_at(job_set, ("spec", "replicatedJobs"))
    return value_at(job_set, STARTUP_ORDER) == "AnyOrder" and not any(job.get("dependsOn") for job in jobs)


def _job_set(value: JsonMapping) -> Iterator[PodGroup]:
    for name, path in _items_at(value, ("spec", "replicatedJobs"), "job"):
        spec: ObjectPath = (*path, "template", "spec")
        if (replicas := _count_at(value, (*path, "replicas"))) != 0:
            yield PodGroup(name, replicas * _parallel_pods(value, spec), (*spec, "template"))


def _train_job(value: JsonMapping) -> Iterator[PodGroup]:
    """Its pods are those of the JobSet that its runtime makes, which has the TrainJob's name."""
    raise Refused(
        f"{_title(value)} has no pod template: its runtime has it",
        nearest_fix="create it with suspend: true, and place what its runtime makes of it:"
        f" kubectl get jobset {object_name(value)} -o yaml",
    )


def _volcano_job(value: JsonMapping) -> Iterator[PodGroup]:
    for name, path in _items_at(value, ("spec", "tasks"), "task"):
        if (replicas := _count_at(value, (*path, "replicas"))) != 0:
            yield PodGroup(name, replicas, (*path, "template"))


def _ray(cluster: ObjectPath) -> GroupReader:
    """RayCluster, and RayJob, which has one inside."""

    def read(value: JsonMapping) -> Iterator[PodGroup]:
        if value_at(value, (*cluster, "headGroupSpec")) is not None:
            yield PodGroup("head", 1, (*cluster, "headGroupSpec", "template"))
        for number, group in enumerate(value_at(value, (*cluster, "workerGroupSpecs")) or ()):
            path: ObjectPath = (*cluster, "workerGroupSpecs", number)
            replicas = _count_at(group, ("replicas",), default=_count_at(group, ("minReplicas",), default=0))
            name = checked_name(group.get("groupName"), "a worker group") or f"workers-{number}"
            if replicas != 0:
                yield PodGroup(name, replicas * _count_at(group, ("numOfHosts",)), (*path, "template"))

    return read


# Inference.


def _leader_worker_set(value: JsonMapping) -> Iterator[PodGroup]:
    """Each replica is a leader and its workers, which share a clique."""
    for replica, path, members, role in _leaders_and_workers(value, ("spec",)):
        yield PodGroup(f"{replica}-{role}", members, path, replica)


def _disaggregated_set(value: JsonMapping) -> Iterator[PodGroup]:
    """A slice has every role once, each as a LeaderWorkerSet. An exclusive policy keeps it in one domain."""
    policy = value_at(value, ("spec", "placementPolicy", "type"))
    together = policy in ("ExclusiveSlice", "ExclusiveTopology")
    for slice_ in range(_count_at(value, ("spec", "slices"))):
        for name, path in _items_at(value, ("spec", "roles"), "role"):
            for replica, template, members, role in _leaders_and_workers(value, (*path, "spec")):
                inside = f"slice-{slice_}-{name}-{replica}"
                share = f"slice-{slice_}" if together else inside
                yield PodGroup(f"{inside}-{role}", members, template, share)


def _leaders_and_workers(value: JsonMapping, spec: ObjectPath) -> Iterator[tuple[str, ObjectPath, Any, str]]:
    """Replica, template, members and role of each group of the spec of a LeaderWorkerSet."""
    inside: ObjectPath = (*spec, "leaderWorkerTemplate")
    size = _count_at(value, (*inside, "size"))
    check_members("each replica", size, 0)
    leads = value_at(value, (*inside, "leaderTemplate")) is not None
    for number in range(_count_at(value, (*spec, "replicas"))):
        if leads:
            yield f"replica-{number}", (*inside, "leaderTemplate"), 1, "leader"
        if size > leads:
            yield f"replica-{number}", (*inside, "workerTemplate"), size - leads, "worker"


def _pod_clique_set(value: JsonMapping) -> Iterator[PodGroup]:
    """Each replica has every clique. A scaling group repeats those that it names, as often as its `replicas`.

    A required pack holds within each replica of its object: the set, or else the scaling group.
    """
    template: ObjectPath = ("spec", "template")
    cliques = dict(_items_at(value, (*template, "cliques"), "clique"))
    groups = {
        name: value_at(value, path)
        for name, path in _items_at(value, (*template, "podCliqueScalingGroups"), "group")
    }
    grouped = {clique: name for name, group in groups.items() for clique in group.get("cliqueNames") or ()}
    packs_whole = value_at(value, (*template, "topologyConstraint")) is not None
    for number in range(_count_at(value, ("spec", "replicas"), default=0)):
        replica = f"replica-{number}"
        for clique, path in cliques.items():
            pods = _count_at(value, (*path, "spec", "replicas"))
            group = groups.get(grouped.get(clique, ""))
            if group is None:
                yield PodGroup(f"{replica}-{clique}", pods, (*path, "spec"), replica, "podSpec")
                continue
            packs_group = group.get("topologyConstraint") is not None and not packs_whole
            for copy in range(_count_at(group, ("replicas",))):
                inside = f"{replica}-{grouped[clique]}-{copy}"
                share = inside if packs_group else replica
                yield PodGroup(f"{inside}-{clique}", pods, (*path, "spec"), share, "podSpec")


def _dynamo_graph(value: JsonMapping) -> Iterator[PodGroup]:
    """The components. One of several nodes has that many pods a replica. The graph is one unit.

    If only components have a topology constraint, each of their replicas is packed separately.
    """
    if value.get("apiVersion") == _DYNAMO_OLD:
        name = object_name(value)
        fix = f"write it for nvidia.com/v1beta1: kubectl get dynamographdeployments.v1beta1.nvidia.com {name}"
        raise Refused(f"{_title(value)} is of {_DYNAMO_OLD}, which is not read", nearest_fix=f"{fix} -o yaml")
    whole = value_at(value, ("spec", "topologyConstraint")) is not None
    for name, path in _items_at(value, ("spec", "components"), "component"):
        component = value_at(value, path)
        if component.get("podTemplate") is None:  # the operator makes one, without GPUs
            continue
        replicas, template = _count_at(component, ("replicas",)), (*path, "podTemplate")
        several = component.get("multinode")
        nodes = 1 if several is None else _count_at(several, ("nodeCount",), default=2)
        if whole or component.get("topologyConstraint") is None:
            if replicas != 0:
                yield PodGroup(name, replicas * nodes, template)
            continue
        for number in range(replicas):
            yield PodGroup(f"{name}-{number}", nodes, template, f"{name}-{number}")


# Queues.


def _kueue_workload(value: JsonMapping) -> Iterator[PodGroup]:
    """Kueue's object for the admission of a job: the pod sets of a job of any kind."""
    for name, path in _items_at(value, ("spec", "podSets"), "podset"):
        if (count := _count_at(value, (*path, "count"))) != 0:
            yield PodGroup(name, count, (*path, "template"))


# Kinds that are not known.


def _guessed(value: JsonMapping) -> Iterator[PodGroup]:
    for name, members, path in _templates(value, ()):
        if members != 0:
            yield PodGroup(name, members, path)


_DEEPEST = 24
"""Keys on the way to a pod template: no API has that many."""


def _templates(
    value: Any, path: ObjectPath, name: str = "pod", members: Any = 1
) -> Iterator[tuple[str, Any, ObjectPath]]:
    """Name, pods and path of every pod template below a path, except templates inside pods."""
    if isinstance(value, Mapping):
        if path and _is_template(value):
            yield name, members, path
            return
        if len(path) > _DEEPEST:
            return
        members = value.get("replicas", members)
        if path and isinstance(own := value.get("name"), str):
            name = own
        for key, below in value.items():
            yield from _templates(below, (*path, key), name, members)
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _templates(below, (*path, number), f"{name}-{number}", members)


def _is_template(value: JsonMapping) -> bool:
    containers = value_at(value, ("spec", "containers"))
    return isinstance(containers, list) and all(isinstance(container, Mapping) for container in containers)


_READERS: dict[str, GroupReader] = {
    "MPIJob": _mpi_job,
    "Job": _batch_job,
    "JobSet": _job_set,
    "LeaderWorkerSet": _leader_worker_set,
    "Deployment": _replicated,
    "StatefulSet": _replicated,
    "ReplicaSet": _replicated,
    "CronJob": _cron_job,
    "DisaggregatedSet": _disaggregated_set,
    "PyTorchJob": _pytorch_job,
    "TrainJob": _train_job,
    "RayCluster": _ray(("spec",)),
    "RayJob": _ray(("spec", "rayClusterSpec")),
    "PodCliqueSet": _pod_clique_set,
    "DynamoGraphDeployment": _dynamo_graph,
    "Workload": _kueue_workload,
}
JOB_KINDS = (*_READERS, "Pod")


# Labels that controllers put on their pods.


def controller_labels(kind: str, name: str, group: str) -> dict[str, str]:
    """The labels that distinguish the pods of a group of a job from all others."""
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
        case "DisaggregatedSet":
            return {"disaggregatedset.x-k8s.io/name": name}
        case "PyTorchJob":
            return {"training.kubeflow.org/job-name": name, "training.kubeflow.org/replica-type": group}
        case "RayCluster":
            return {"ray.io/cluster": name}
        case "PodCliqueSet":
            return {"app.kubernetes.io/part-of": name}
        case "DynamoGraphDeployment":
            return {"nvidia.com/dynamo-graph-deployment-name": name}
    return {}
