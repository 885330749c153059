"""Who would lose something by an uninstallation, and what it leaves alone. Pure.

A step that would take something away from a running pod is blocked, and so are those after it. A pod that
only waits at a gate of ours blocks too, since nobody would open it. Where the node plugin of a pod's devices
is gone already, waiting helps nobody: such a pod is reported as left, and blocks nothing.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from rackloom.claim.cluster.admission import marks as admission_marks
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.observe import gang_of
from rackloom.claim.cluster.settings import DEFAULT_NAMESPACE
from rackloom.claim.cluster.uninstall.inventory import (
    COMPONENT_LABEL,
    COMPONENTS,
    PART_OF,
    PART_OF_LABEL,
    Inventory,
    Use,
    called,
    is_going,
    is_part,
    labels_of,
    name_of,
    namespace_of,
    release_of,
    uid_of,
)
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    CRD,
    DAEMON_SET,
    DEPLOYMENT,
    DEVICE_CLASS,
    GANG_PLAN,
    NAMESPACE,
    NODE,
    POD,
)
from rackloom.claim.kube.pods import has_ended

_NAMED_ALIKE = frozenset({"admissionregistration.k8s.io", "rbac.authorization.k8s.io"})
"""Groups of which an object that begins like ours is worth a word."""
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
)
_SHOWN = 3
"""Names in one sentence."""


class Phase(StrEnum):
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


class Blocker(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of one maker that would lose the same thing."""

    phase: Phase
    """The first step that would take it away."""
    what: str
    why: str
    fix: str


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What stays, and why."""

    what: str
    why: str
    fix: str = ""


def blockers(inventory: Inventory) -> Iterator[Blocker]:
    """One for each maker of pods and reason, however many pods there are."""
    grouped: dict[tuple[Phase, str, str, str], list[str]] = {}
    for phase, pod, why in _reasons(inventory):
        if phase is not None:
            maker, fix = _maker(pod)
            grouped.setdefault((phase, maker, why, fix), []).append(name_of(pod))
    yield from _unlabelled(inventory)
    for (phase, maker, why, fix), pods in grouped.items():
        is_bare = maker.startswith("Pod ")
        what = maker if is_bare else f"{maker} ({_listed(sorted(set(pods)), 'pod')})"
        yield Blocker(phase=phase, what=what, why=why, fix=fix)


def _unlabelled(inventory: Inventory) -> Iterator[Blocker]:
    """Programs of ours that were installed without the label: nobody knows what else is ours."""
    for kind in (DEPLOYMENT, DAEMON_SET):
        for obj in inventory.all(kind):
            labels = labels_of(obj)
            is_program = labels.get(_NAME_LABEL) == PART_OF and labels.get(COMPONENT_LABEL) in COMPONENTS
            if is_program and namespace_of(obj) in inventory.homes and not is_part(obj):
                yield Blocker(
                    phase=Phase.WEBHOOKS,
                    what=called(kind, obj),
                    why=f"was installed without the label {PART_OF_LABEL}, by which we tell what is ours",
                    fix="kubectl apply --server-side -k deploy/kubernetes/base of this version labels it all",
                )


def _reasons(inventory: Inventory) -> Iterator[tuple[Phase | None, Object, str]]:
    """Pods that would lose something, by which phase, and what; no phase where it is lost already."""
    # A webhook for which nobody answers refuses every pod with a claim: its removal waits for nobody.
    first = Phase.WEBHOOKS if inventory.runs("webhook") else Phase.GANGS
    plans = {(namespace_of(found), name_of(found)) for found in inventory.all(GANG_PLAN)}
    for pod in inventory.all(POD):
        if is_going(pod) or has_ended(pod):
            continue
        gate, gang = _gate_of(pod), gang_of(pod)
        if gate is not None:
            yield first, pod, f"waits at the gate {gate}, which nobody would open"
        elif gang is not None and (gang.namespace, gang.name) in plans:
            yield first, pod, f"belongs to gang {gang.called}, which holds trays"
    for use in inventory.uses:
        yield _lost_by(use, first, inventory)


def _lost_by(use: Use, first: Phase, inventory: Inventory) -> tuple[Phase | None, Object, str]:
    if use.domain is None:
        phase = first if inventory.serves(use.driver) else None
        return phase, use.pod, f"holds devices of {use.driver}, which only its node plugin can take back"
    guarded = next((domain for domain in _domains_of(use, inventory) if _guards(domain, inventory)), None)
    if guarded is None:
        phase = Phase.PLUGINS if inventory.serves(use.driver) else None
        return phase, use.pod, "holds an IMEX channel, which only its node plugin can take back"
    place = f"{namespace_of(guarded)}/{name_of(guarded)}"
    why = f"holds a channel of ComputeDomain {place}: its memory sharing would end"
    return (Phase.REMAINS if inventory.is_warm(guarded) else first), use.pod, why


def _domains_of(use: Use, inventory: Inventory) -> Iterator[Object]:
    """The ComputeDomain of a channel, and in channel mode the one that keeps its clique warm."""
    yield from inventory.by(COMPUTE_DOMAIN, "domain", use.domain or "")
    warm = None if use.clique is None else inventory.warm_domain(use.clique)
    if warm is not None:
        yield warm


def _guards(domain: Object, inventory: Inventory) -> bool:
    """Whether a ComputeDomain must not go under load: its controller would hold that back, or daemons run."""
    notes = domain["metadata"].get("annotations") or {}
    if notes.get(names.ALLOW_DELETION_ANNOTATION) == "true":
        return False
    return inventory.runs("controller") or bool(inventory.daemons(uid_of(domain)))


def _gate_of(pod: Object) -> str | None:
    gates = {gate["name"] for gate in (pod.get("spec") or {}).get("schedulingGates") or ()}
    return next((gate for gate in (marks.GATE, admission_marks.GATE) if gate in gates), None)


def _maker(pod: Object) -> tuple[str, str]:
    """Whoever would make a pod anew, and the command that deletes it."""
    owners = pod["metadata"].get("ownerReferences") or ()
    owner = next((reference for reference in owners if reference.get("controller")), None)
    namespace, name, kind, group = namespace_of(pod), name_of(pod), "Pod", ""
    if owner is not None:
        kind, name, group = owner["kind"], owner["name"], owner["apiVersion"].rpartition("/")[0]
        deployment = name.removesuffix(f"-{labels_of(pod).get('pod-template-hash', '')}")
        if kind == "ReplicaSet" and deployment != name:
            kind, name = "Deployment", deployment
    resource = f"{kind.lower()}.{group}" if group else kind.lower()
    return f"{kind} {namespace}/{name}", f"kubectl delete {resource} -n {namespace} {name}"


def left(inventory: Inventory) -> Iterator[Left]:
    """What stays after the last step: what is not ours, and what we could not see."""
    yield from _lost_uses(inventory)
    for kind in inventory.kinds():
        for obj in inventory.all(kind):
            why = _why_it_stays(kind, obj, inventory)
            if why is not None:
                yield Left(what=called(kind, obj), why=why[0], fix=why[1])
    yield from _foreign_domains(inventory)
    yield from _strange_namespaces(inventory)
    yield from _labels_of_operators(inventory)
    for name in inventory.unread:
        yield Left(what=name, why="could not be listed: whether anything of ours is there is unknown")


def _lost_uses(inventory: Inventory) -> Iterator[Left]:
    for phase, pod, why in _reasons(inventory):
        if phase is None:
            yield Left(
                what=called(POD, pod),
                why=f"{why}, and that is gone: it runs on, but its kubelet cannot finish its deletion",
                fix="install again and delete it then, or when it may end: kubectl delete pod --force "
                f"-n {namespace_of(pod)} {name_of(pod)}",
            )


def _why_it_stays(kind: Kind, obj: Object, inventory: Inventory) -> tuple[str, str] | None:
    """Of an object that has our label, or only our name; None for all others, and for those that go."""
    if is_part(obj) and inventory.is_at_home(obj):
        release = release_of(obj)
        if release is not None:
            return f"belongs to the Helm release {release}", f"helm uninstall {release}"
        if inventory.is_shared(kind, obj):
            return "is used by another driver that is at work here", ""
    elif _has_only_our_name(kind, obj) and not inventory.is_shared(kind, obj):
        fix = f"if it is ours: kubectl apply -k deploy/kubernetes/base labels it {PART_OF_LABEL}={PART_OF}"
        return "has a name of ours, but not our label", fix
    return None


def _has_only_our_name(kind: Kind, obj: Object) -> bool:
    if kind == CRD:
        return obj["spec"].get("group") in _DEFINED_GROUPS
    if kind == DEVICE_CLASS:
        return name_of(obj) in _SHIPPED_CLASSES
    if kind == NAMESPACE:
        return name_of(obj) == DEFAULT_NAMESPACE
    return not kind.namespaced and kind.group in _NAMED_ALIKE and name_of(obj).startswith(_PREFIX)


def _foreign_domains(inventory: Inventory) -> Iterator[Left]:
    ours = {uid_of(domain) for domain in inventory.domains}
    others = [called(COMPUTE_DOMAIN, obj) for obj in inventory.all(COMPUTE_DOMAIN) if uid_of(obj) not in ours]
    if others:
        yield Left(what=_listed([name.split()[1] for name in others], "ComputeDomain"), why="not ours")


def _strange_namespaces(inventory: Inventory) -> Iterator[Left]:
    for kind, obj in inventory.installed:
        content = inventory.strange_content(name_of(obj)) if kind == NAMESPACE and not is_going(obj) else ()
        if content:
            found = _joined([called(inside, each) for inside, each in content])
            yield Left(
                what=called(kind, obj),
                why=f"holds what is not ours: {found}",
                fix=f"kubectl delete namespace {name_of(obj)} takes all of that along",
            )


def _labels_of_operators(inventory: Inventory) -> Iterator[Left]:
    labelled = [name_of(node) for node in inventory.all(NODE) if names.ISOLATION_LABEL in labels_of(node)]
    if labelled:
        yield Left(
            what=f"label {names.ISOLATION_LABEL} of {_listed(labelled, 'node')}",
            why="an operator set it",
            fix=f"kubectl label nodes -l {names.ISOLATION_LABEL} {names.ISOLATION_LABEL}-",
        )


def _listed(found: list[str], noun: str) -> str:
    return f"{noun if len(found) == 1 else f'{noun}s'} {_joined(found)}"


def _joined(found: Iterable[str]) -> str:
    first, rest = list(found)[:_SHOWN], len(list(found)) - _SHOWN
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
