"""What has to be removed, in which order, and what blocks it. Pure: an inventory in, a plan out.

The order is the safety:

1. webhooks       they are `failurePolicy: Fail`: no pod may be refused because their pods are gone
2. gangs          GangPlans, while a controller can end them; trays are given back
3. domains        ComputeDomains, while a controller can take them apart; their IMEX daemons end
4. controller     from here on nothing is made anew, such as the warm IMEX domain of a clique in channel mode
5. remains        those warm domains, and whatever of ComputeDomains and gangs outlived them
6. classes        without them kube-scheduler allocates no more devices
7. plugins        the last that could give a device back
8. devices        what the plugins published
9. objects        rights, policies, services: everything else that was installed
10. definitions   no object of theirs is left, so none is lost unseen
11. namespaces

A plan is made anew after each step from what is there then. So it does not matter where an earlier attempt
stopped, or that somebody ran `kubectl delete -k` before: what is gone is in no plan. Where no controller
runs, ComputeDomains and gangs are ended here, by the controller's own rules (`teardown`, `trays`, `record`):
a finalizer is taken off only when what it protects is gone.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from rackloom.claim.cluster.actions import Action, Create, Delete, unlabel
from rackloom.claim.cluster.gang.observe import holders_of
from rackloom.claim.cluster.gang.record import closed, record_of
from rackloom.claim.cluster.gang.trays import free, freed, node_view
from rackloom.claim.cluster.observe import snapshot, with_secrets
from rackloom.claim.cluster.settings import DaemonSettings, Settings
from rackloom.claim.cluster.teardown import teardown
from rackloom.claim.cluster.things import thing
from rackloom.claim.cluster.uninstall.blockers import Blocker, Left, Phase, blockers, left
from rackloom.claim.cluster.uninstall.inventory import (
    PLUGINS,
    Inventory,
    called,
    is_going,
    is_ours_by_writer,
    is_part,
    labels_of,
    name_of,
    namespace_of,
    seconds_overdue,
    sole_writer_of_label,
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
    MUTATING_WEBHOOK,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_SLICE,
    SECRET,
    VALIDATING_WEBHOOK,
)
from rackloom.claim.kube.timestamps import whole_time

ORDER = tuple(Phase)
WHAT = {
    Phase.WEBHOOKS: "delete the admission webhooks",
    Phase.GANGS: "end the gangs and give back their trays",
    Phase.DOMAINS: "delete the ComputeDomains and their IMEX daemons",
    Phase.CONTROLLER: "stop the controller and the webhook",
    Phase.REMAINS: "remove what ComputeDomains and gangs left",
    Phase.CLASSES: "delete the device classes, so that nothing new is allocated",
    Phase.PLUGINS: "stop the node plugins",
    Phase.DEVICES: "withdraw the published devices",
    Phase.OBJECTS: "delete rights, policies and what else was installed",
    Phase.DEFINITIONS: "delete the custom resource definitions",
    Phase.NAMESPACES: "delete the namespaces",
}
_OVERDUE_SECONDS = 5.0
"""After the end of its grace, a pod of ours whose plugin is gone is removed without its kubelet."""
_OWN_STEP = {
    MUTATING_WEBHOOK: Phase.WEBHOOKS,
    VALIDATING_WEBHOOK: Phase.WEBHOOKS,
    DEPLOYMENT: Phase.CONTROLLER,
    DEVICE_CLASS: Phase.CLASSES,
    DAEMON_SET: Phase.PLUGINS,
    CRD: Phase.DEFINITIONS,
    NAMESPACE: Phase.NAMESPACES,
}
"""When an installed object of a kind goes; all others go with `Phase.OBJECTS`."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one phase still has to do."""

    phase: Phase
    objects: tuple[str, ...] = ()
    """What is not gone yet, as `Kind namespace/name`."""
    waits: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why an object of them that was asked to go is still there."""
    actions: tuple[Action, ...] = ()
    """What to do now; none while all that remains is to see objects go."""
    blockers: tuple[Blocker, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that are not done, in order; empty when nothing of ours is left but what is `left`."""

    steps: tuple[Step, ...] = ()
    left: tuple[Left, ...] = ()

    @property
    def blockers(self) -> tuple[Blocker, ...]:
        """All of them."""
        return tuple(blocker for step in self.steps for blocker in step.blockers)


def plan(inventory: Inventory) -> Plan:
    """What to do about what is there."""
    work = _Work()
    for phase in ORDER:
        _PLANNERS[phase](work, inventory)
    steps = tuple(work.step(phase) for phase in ORDER)
    steps = tuple(step for step in steps if step.objects or step.actions)
    return Plan(steps=_blocked(steps, blockers(inventory)), left=tuple(left(inventory)))


class _Work:
    """Collects what each phase has to do."""

    def __init__(self) -> None:
        self._objects: dict[Phase, dict[str, str]] = {phase: {} for phase in ORDER}
        self._actions: dict[Phase, list[Action]] = {phase: [] for phase in ORDER}

    def delete(self, phase: Phase, kind: Kind, obj: Object, *, grace: int | None = None) -> None:
        """An object that has to be gone; it is asked to go unless it was, or now without its grace."""
        self.wait(phase, kind, obj)
        if not is_going(obj) or grace is not None:
            action = Delete(
                kind=kind,
                namespace=namespace_of(obj),
                name=name_of(obj),
                uid=uid_of(obj),
                grace_seconds=grace,
            )
            self._actions[phase].append(action)

    def wait(self, phase: Phase, kind: Kind, obj: Object) -> None:
        """An object that goes by itself."""
        self._objects[phase][called(kind, obj)] = _why_it_waits(kind, obj)

    def act(self, phase: Phase, *actions: Action) -> None:
        """Other writes than deletions; what they change is named."""
        for action in actions:
            self._objects[phase].setdefault(_target(action), "")
            self._actions[phase].append(action)

    def step(self, phase: Phase) -> Step:
        """What was collected."""
        found = self._objects[phase]
        return Step(
            phase=phase,
            objects=tuple(found),
            waits={what: why for what, why in found.items() if why},
            actions=tuple(self._actions[phase]),
        )


def _installed(phase: Phase, work: _Work, inventory: Inventory) -> None:
    for kind, obj in inventory.installed:
        if _OWN_STEP.get(kind, Phase.OBJECTS) is phase:
            work.delete(phase, kind, obj)


def _plan_webhooks(work: _Work, inventory: Inventory) -> None:
    _installed(Phase.WEBHOOKS, work, inventory)


def _plan_gangs(work: _Work, inventory: Inventory) -> None:
    views = {name_of(node): node_view(node) for node in inventory.all(NODE)}
    for found in inventory.all(GANG_PLAN):
        if inventory.runs("controller"):
            work.delete(Phase.GANGS, GANG_PLAN, found)
            continue
        uid = uid_of(found)
        held = tuple(name_of(node) for node in inventory.all(NODE) if uid in holders_of(node))
        work.wait(Phase.GANGS, GANG_PLAN, found)
        work.act(Phase.GANGS, *(freed(views, held, uid) or closed(record_of(found))))


def _plan_domains(work: _Work, inventory: Inventory) -> None:
    for domain in inventory.domains:
        if not inventory.is_warm(domain):
            _take_apart(Phase.DOMAINS, domain, work, inventory)


def _take_apart(phase: Phase, domain: Object, work: _Work, inventory: Inventory) -> None:
    """Delete a ComputeDomain; where no controller runs, also do what its finalizer waits for."""
    work.delete(phase, COMPUTE_DOMAIN, domain)
    if is_going(domain) and not inventory.runs("controller"):
        _tear_down(phase, uid_of(domain), work, inventory)


def _tear_down(phase: Phase, uid: str, work: _Work, inventory: Inventory) -> None:
    """What the controller would do for a ComputeDomain that is being deleted, or that is gone."""
    settings = _settings(inventory)
    certificates = tuple(thing(SECRET, secret) for secret in inventory.certificates(uid))
    seen = with_secrets(snapshot(inventory, uid, settings, whole_time(inventory.now)), certificates)
    daemons = inventory.daemons(uid)
    for pod in daemons:
        _see_off(phase, pod, work, inventory)
    for held in seen.held:
        found = inventory.at(held.kind, held.namespace, held.name)
        if found is not None and (held.deleting or names.FINALIZER in held.finalizers):
            work.wait(phase, held.kind, found)
    actions = teardown(seen)
    # The last finalizer is the ComputeDomain's own: it stays until its daemons have ended.
    if not (daemons and any(action.kind == COMPUTE_DOMAIN for action in actions)):
        work.act(phase, *actions)


def _see_off(phase: Phase, pod: Object, work: _Work, inventory: Inventory) -> None:
    """A daemon ends with its DaemonSet; its kubelet cannot finish while the plugin of its claim is gone."""
    is_stuck = seconds_overdue(pod, inventory.now) > _OVERDUE_SECONDS
    if is_stuck and not inventory.serves(names.IMEX_DRIVER):
        work.delete(phase, POD, pod, grace=0)
    else:
        work.wait(phase, POD, pod)


def _settings(inventory: Inventory) -> Settings:
    """As far as taking apart needs them: where daemons may be."""
    first, *more = inventory.daemon_namespaces
    return Settings(
        daemon=DaemonSettings(image=""), daemon_namespace=first, additional_namespaces=tuple(more)
    )


def _plan_controller(work: _Work, inventory: Inventory) -> None:
    _installed(Phase.CONTROLLER, work, inventory)
    for component in ("controller", "webhook"):
        for pod in inventory.pods_of(component):
            work.wait(Phase.CONTROLLER, POD, pod)


def _plan_remains(work: _Work, inventory: Inventory) -> None:
    for node in inventory.all(NODE):
        _plan_node(node, work, inventory)
    for found in _slices(inventory):
        if names.WARM_CLIQUE_LABEL in labels_of(found):
            work.delete(Phase.REMAINS, RESOURCE_SLICE, found)
    for domain in inventory.domains:
        if inventory.is_warm(domain):
            _take_apart(Phase.REMAINS, domain, work, inventory)
    for uid in inventory.outlived:
        _tear_down(Phase.REMAINS, uid, work, inventory)


def _plan_node(node: Object, work: _Work, inventory: Inventory) -> None:
    """Labels and taints of the controller; those of ComputeDomains go with these."""
    seen = thing(NODE, node)
    for label in (names.CHANNELS_READY_LABEL, names.WARM_CLIQUE_LABEL):
        if label in seen.labels:
            work.act(Phase.REMAINS, unlabel(seen, label, seen.labels[label]))
    plans = {uid_of(found) for found in inventory.all(GANG_PLAN)}
    for uid in holders_of(node):
        if uid not in plans:
            work.act(Phase.REMAINS, free(node_view(node), uid))


def _plan_classes(work: _Work, inventory: Inventory) -> None:
    for kind, obj in inventory.installed:
        if kind == DEVICE_CLASS and not inventory.is_shared(kind, obj):
            work.delete(Phase.CLASSES, kind, obj)


def _plan_plugins(work: _Work, inventory: Inventory) -> None:
    _installed(Phase.PLUGINS, work, inventory)
    for component in PLUGINS.values():
        for pod in inventory.pods_of(component):
            work.wait(Phase.PLUGINS, POD, pod)


def _plan_devices(work: _Work, inventory: Inventory) -> None:
    for found in _slices(inventory):
        if names.WARM_CLIQUE_LABEL not in labels_of(found):
            work.delete(Phase.DEVICES, RESOURCE_SLICE, found)
    for node in inventory.all(NODE):
        clique = labels_of(node).get(names.GPU_CLIQUE_LABEL)
        if clique is not None and sole_writer_of_label(node, names.GPU_CLIQUE_LABEL):
            work.act(Phase.DEVICES, unlabel(thing(NODE, node), names.GPU_CLIQUE_LABEL, clique))


def _slices(inventory: Inventory) -> Iterator[Object]:
    for found in inventory.all(RESOURCE_SLICE):
        if found["spec"].get("driver") in PLUGINS and is_ours_by_writer(found):
            yield found


def _plan_objects(work: _Work, inventory: Inventory) -> None:
    _installed(Phase.OBJECTS, work, inventory)
    for kind in inventory.kinds():
        for obj in inventory.all(kind):
            if _made_at_work(kind, obj, inventory):
                work.delete(Phase.OBJECTS, kind, obj)


def _made_at_work(kind: Kind, obj: Object, inventory: Inventory) -> bool:
    """What our programs made in our namespaces beside ComputeDomains: the leases of their elections."""
    return (
        kind not in _NEVER_AT_WORK
        and namespace_of(obj) in inventory.homes
        and is_ours_by_writer(obj)
        and not is_part(obj)
        and names.COMPUTE_DOMAIN_LABEL not in labels_of(obj)
        and not obj["metadata"].get("ownerReferences")
    )


def _plan_definitions(work: _Work, inventory: Inventory) -> None:
    for kind, obj in inventory.installed:
        if kind == CRD and not inventory.is_shared(kind, obj):
            work.delete(Phase.DEFINITIONS, kind, obj)


def _plan_namespaces(work: _Work, inventory: Inventory) -> None:
    for kind, obj in inventory.installed:
        if kind == NAMESPACE and (is_going(obj) or not inventory.strange_content(name_of(obj))):
            work.delete(Phase.NAMESPACES, kind, obj)


def _blocked(steps: tuple[Step, ...], blockers: Iterable[Blocker]) -> tuple[Step, ...]:
    """Each blocker at the first step that is left from its own phase on."""
    found: dict[Phase, list[Blocker]] = {}
    for blocker in blockers:
        at = ORDER.index(blocker.phase)
        first = next((step.phase for step in steps if ORDER.index(step.phase) >= at), None)
        if first is not None:
            found.setdefault(first, []).append(blocker)
    return tuple(msgspec.structs.replace(step, blockers=tuple(found.get(step.phase, ()))) for step in steps)


def _why_it_waits(kind: Kind, obj: Object) -> str:
    """What an object that was asked to go says of itself; empty for one that was not asked."""
    if not is_going(obj):
        return ""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    said = {one["type"]: one.get("message", "") for one in conditions if one.get("status") == "True"}
    if kind == NAMESPACE:
        return "; ".join(message for message in said.values() if message) or "its content is being deleted"
    if kind == POD:
        node = obj["spec"].get("nodeName")
        forced = f"kubectl delete pod --force -n {namespace_of(obj)} {name_of(obj)}"
        return f"node {node} has not ended it; if that node is lost: {forced}"
    held = ", ".join(obj["metadata"].get("finalizers") or ()) or "its dependents"
    told = "; ".join(filter(None, (said.get("Progressing"), said.get("Degraded"), said.get("Terminating"))))
    return f"held by {held}{f' ({told})' if told else ''}"


def _target(action: Action) -> str:
    if isinstance(action, Create):
        return action.what
    place = f"{action.namespace}/{action.name}" if action.namespace else action.name
    return f"{action.kind.kind} {place}"


_NEVER_AT_WORK = frozenset({POD, COMPUTE_DOMAIN, GANG_PLAN})
_PLANNERS = {
    Phase.WEBHOOKS: _plan_webhooks,
    Phase.GANGS: _plan_gangs,
    Phase.DOMAINS: _plan_domains,
    Phase.CONTROLLER: _plan_controller,
    Phase.REMAINS: _plan_remains,
    Phase.CLASSES: _plan_classes,
    Phase.PLUGINS: _plan_plugins,
    Phase.DEVICES: _plan_devices,
    Phase.OBJECTS: _plan_objects,
    Phase.DEFINITIONS: _plan_definitions,
    Phase.NAMESPACES: _plan_namespaces,
}
