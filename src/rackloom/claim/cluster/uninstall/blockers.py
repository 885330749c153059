"""Pods that would lose something by an uninstallation, and objects that it leaves in place.

A step that would take something from a running pod is blocked, and so are the steps after it. A pod
that waits at one of our scheduling gates blocks too, since no other program would open it. Where the node
plugin of a pod's devices is already gone, waiting does not help: such a pod is reported as left behind,
and blocks nothing.
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from rackloom.claim.cluster.uninstall.inventory import (
    COMPONENT_LABEL,
    COMPONENTS,
    PART_OF,
    PART_OF_LABEL,
    ClusterInventory,
    DeviceHolder,
    defined_group,
    is_part_of_rackloom,
)
from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import GANG_GATE, gang_key_of
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    CRD,
    DAEMON_SET,
    DEPLOYMENT,
    DEVICE_CLASS,
    GANG_PLAN,
    NAMESPACE,
    NODE,
    POD,
    Object,
    ResourceKind,
    annotations_of,
    controller_of,
    full_name,
    has_pod_ended,
    is_being_deleted,
    labels_of,
    list_names,
    name_of,
    namespace_of,
    title_of,
    uid_of,
)
from rackloom.core.cluster.pods import TEMPLATE_GATE, gates_of
from rackloom.core.domains.settings import DEFAULT_NAMESPACE

_NAMED_ALIKE = frozenset({"admissionregistration.k8s.io", "rbac.authorization.k8s.io"})
"""API groups in which an object with our prefix is reported."""
_PREFIX = "rackloom-"
_NAME_LABEL = "app.kubernetes.io/name"
_DEFINED_GROUPS = (names.GROUP, GANG_PLAN.group)
_SHIPPED_CLASSES = (
    names.DAEMON_CLASS,
    names.CHANNEL_CLASS,
    names.ISOLATED_CHANNEL_CLASS,
    "gpu.nvidia.com",
    "mig.nvidia.com",
    "vfio.gpu.nvidia.com",
    "dra.net",
    "dranet.net",
)
_SHOWN = 3
"""Names in one sentence; the rest are counted."""


class UninstallPhase(StrEnum):
    """The steps of an uninstallation, in order; `plan` says why in this one."""

    WEBHOOKS = "webhooks"
    GANGS = "gangs"
    DOMAINS = "domains"
    CONTROLLER = "controller"
    REMAINS = "remains"
    CLASSES = "classes"
    PLUGINS = "plugins"
    DEVICES = "devices"
    OBJECTS = "objects"
    DEFINITIONS = "definitions"
    NAMESPACES = "namespaces"


class UninstallBlocker(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of one owner that would lose the same resource."""

    phase: UninstallPhase
    """The first step that would take it away."""
    what: str
    why: str
    fix: str


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """What stays, and why."""

    what: str
    why: str
    fix: str = ""


def find_blockers(inventory: ClusterInventory) -> Iterator[UninstallBlocker]:
    """One for each owner of pods and reason, however many pods there are."""
    grouped: dict[tuple[UninstallPhase, str, str, str], list[str]] = {}
    for phase, pod, why in _reasons(inventory):
        if phase is not None:
            owner, fix = _owner_and_fix(pod)
            grouped.setdefault((phase, owner, why, fix), []).append(name_of(pod))
    yield from _unlabelled(inventory)
    for (phase, owner, why, fix), pods in grouped.items():
        is_bare = owner.startswith("Pod ")
        what = owner if is_bare else f"{owner} ({_listed_names(sorted(set(pods)), 'pod')})"
        yield UninstallBlocker(phase=phase, what=what, why=why, fix=fix)


def _unlabelled(inventory: ClusterInventory) -> Iterator[UninstallBlocker]:
    """Our programs without our label: which other objects are ours is unknown then."""
    for kind in (DEPLOYMENT, DAEMON_SET):
        for obj in inventory.all(kind):
            labels = labels_of(obj)
            is_program = labels.get(_NAME_LABEL) == PART_OF and labels.get(COMPONENT_LABEL) in COMPONENTS
            if is_program and namespace_of(obj) in inventory.homes and not is_part_of_rackloom(obj):
                yield UninstallBlocker(
                    phase=UninstallPhase.WEBHOOKS,
                    what=title_of(kind, obj),
                    why=f"was installed without the label {PART_OF_LABEL}, by which we tell what is ours",
                    fix="kubectl apply --server-side -k deploy/kubernetes/base of this version labels it all",
                )


def _reasons(inventory: ClusterInventory) -> Iterator[tuple[UninstallPhase | None, Object, str]]:
    """The phase that takes something from a pod, the pod, and why; no phase if it is lost already."""
    # A webhook without a running server refuses every pod with a claim, so its removal must not wait.
    first = UninstallPhase.WEBHOOKS if inventory.runs("webhook") else UninstallPhase.GANGS
    plans = {(namespace_of(found), name_of(found)) for found in inventory.all(GANG_PLAN)}
    for pod in inventory.all(POD):
        if is_being_deleted(pod) or has_pod_ended(pod):
            continue
        gate = next((name for name in (GANG_GATE, TEMPLATE_GATE) if name in gates_of(pod)), None)
        gang = gang_key_of(pod)
        if gate is not None:
            yield first, pod, f"waits at the gate {gate}, which nobody would open"
        elif gang is not None and (gang.namespace, gang.name) in plans:
            yield first, pod, f"belongs to gang {gang.full_name}, which holds trays"
    for use in inventory.uses:
        yield _loss_of(use, first, inventory)


def _loss_of(
    use: DeviceHolder, first: UninstallPhase, inventory: ClusterInventory
) -> tuple[UninstallPhase | None, Object, str]:
    if use.domain is None:
        phase = first if inventory.serves(use.driver) else None
        return phase, use.pod, f"holds devices of {use.driver}, which only its node plugin can take back"
    # The ComputeDomain of a channel, and in channel mode the one that keeps its clique warm.
    warm = None if use.clique is None else inventory.warm_domain(use.clique)
    for domain in (*inventory.by(COMPUTE_DOMAIN, "domain", use.domain or ""), *((warm,) if warm else ())):
        # One in use stays while its controller would hold deletion back, or daemons of it run.
        may_go = annotations_of(domain).get(names.ALLOW_DELETION_ANNOTATION) == "true"
        if not may_go and (inventory.runs("controller") or inventory.daemons(uid_of(domain))):
            why = f"holds a channel of ComputeDomain {full_name(domain)}: its memory sharing would end"
            return (UninstallPhase.REMAINS if inventory.is_warm(domain) else first), use.pod, why
    phase = UninstallPhase.PLUGINS if inventory.serves(use.driver) else None
    return phase, use.pod, "holds an IMEX channel, which only its node plugin can take back"


def _owner_and_fix(pod: Object) -> tuple[str, str]:
    """The owner that would recreate a pod, and the command that deletes it."""
    namespace, name, kind, group = namespace_of(pod), name_of(pod), "Pod", ""
    if (owner := controller_of(pod)) is not None:
        kind, name, group = owner.kind, owner.name, owner.api_version.rpartition("/")[0]
        deployment = name.removesuffix(f"-{labels_of(pod).get('pod-template-hash', '')}")
        if kind == "ReplicaSet" and deployment != name:
            kind, name = "Deployment", deployment
    resource = f"{kind.lower()}.{group}" if group else kind.lower()
    return f"{kind} {namespace}/{name}", f"kubectl delete {resource} -n {namespace} {name}"


def find_left_behind(inventory: ClusterInventory) -> Iterator[LeftBehind]:
    """What stays after the last step: objects that are not ours, and types that could not be listed."""
    yield from _lost_uses(inventory)
    for kind in inventory.kinds():
        for obj in inventory.all(kind):
            why = _why_it_stays(kind, obj, inventory)
            if why is not None:
                yield LeftBehind(what=title_of(kind, obj), why=why[0], fix=why[1])
    yield from _foreign_domains(inventory)
    yield from _namespaces_with_foreign_content(inventory)
    yield from _labels_of_operators(inventory)
    for name in inventory.unread:
        yield LeftBehind(what=name, why="could not be listed: whether anything of ours is there is unknown")


def _lost_uses(inventory: ClusterInventory) -> Iterator[LeftBehind]:
    for phase, pod, why in _reasons(inventory):
        if phase is None:
            yield LeftBehind(
                what=title_of(POD, pod),
                why=f"{why}, and that is gone: it runs on, but its kubelet cannot finish its deletion",
                fix="install again and delete it then, or when it may end: kubectl delete pod --force "
                f"-n {namespace_of(pod)} {name_of(pod)}",
            )


def _why_it_stays(kind: ResourceKind, obj: Object, inventory: ClusterInventory) -> tuple[str, str] | None:
    """Why an object with our label, or only our name, stays, and a fix. None for all others."""
    if is_part_of_rackloom(obj) and inventory.is_at_home(obj):
        release = inventory.foreign_release_of(obj)
        if release is not None:
            fix = f"if this is Rackloom's: --helm-release {release}; else helm uninstall {release}"
            return f"belongs to the Helm release {release}", fix
        if inventory.is_shared(kind, obj):
            return "is used by another driver that is at work here", ""
    elif _has_only_our_name(kind, obj) and not inventory.is_shared(kind, obj):
        fix = f"if it is ours: kubectl apply -k deploy/kubernetes/base labels it {PART_OF_LABEL}={PART_OF}"
        return "has a name of ours, but not our label", fix
    return None


def _has_only_our_name(kind: ResourceKind, obj: Object) -> bool:
    if kind == CRD:
        return defined_group(obj) in _DEFINED_GROUPS
    if kind == DEVICE_CLASS:
        return name_of(obj) in _SHIPPED_CLASSES
    if kind == NAMESPACE:
        return name_of(obj) == DEFAULT_NAMESPACE
    return not kind.namespaced and kind.group in _NAMED_ALIKE and name_of(obj).startswith(_PREFIX)


def _foreign_domains(inventory: ClusterInventory) -> Iterator[LeftBehind]:
    ours = {uid_of(domain) for domain in inventory.domains}
    others = [full_name(obj) for obj in inventory.all(COMPUTE_DOMAIN) if uid_of(obj) not in ours]
    if others:
        yield LeftBehind(what=_listed_names(others, "ComputeDomain"), why="not ours")


def _namespaces_with_foreign_content(inventory: ClusterInventory) -> Iterator[LeftBehind]:
    for kind, obj in inventory.installed:
        content = (
            inventory.foreign_content(name_of(obj)) if kind == NAMESPACE and not is_being_deleted(obj) else ()
        )
        if content:
            found = list_names([title_of(inside, each) for inside, each in content], _SHOWN)
            yield LeftBehind(
                what=title_of(kind, obj),
                why=f"holds what is not ours: {found}",
                fix=f"kubectl delete namespace {name_of(obj)} takes all of that along",
            )


def _labels_of_operators(inventory: ClusterInventory) -> Iterator[LeftBehind]:
    labelled = [name_of(node) for node in inventory.all(NODE) if names.ISOLATION_LABEL in labels_of(node)]
    if labelled:
        yield LeftBehind(
            what=f"label {names.ISOLATION_LABEL} of {_listed_names(labelled, 'node')}",
            why="an operator set it",
            fix=f"kubectl label nodes -l {names.ISOLATION_LABEL} {names.ISOLATION_LABEL}-",
        )


def _listed_names(names: list[str], noun: str) -> str:
    return f"{noun if len(names) == 1 else f'{noun}s'} {list_names(names, _SHOWN)}"
