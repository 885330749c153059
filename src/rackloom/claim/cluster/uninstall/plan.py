"""The uninstallation plan: what has to be removed, in which order, and what blocks it.

The order makes it safe:

1. webhooks: they have `failurePolicy: Fail`, and no pod may be refused because their pods are gone;
2. gangs: GangPlans, while a controller can end them; trays are released;
3. domains: ComputeDomains, while a controller can take them apart; their IMEX daemons end;
4. controller: from here on nothing is created again, such as a clique's warm IMEX domain;
5. remains: warm domains, and what outlived ComputeDomains and gangs;
6. classes: without them kube-scheduler allocates no more devices;
7. plugins: the last programs that could give a device back;
8. devices: what the plugins published;
9. objects: rights, policies, services, everything else that was installed;
10. definitions: no object of theirs is left, so none is lost unseen;
11. namespaces.

The plan is built again after each step, from a new read. So it does not matter where an earlier attempt
stopped. Where no controller runs, ComputeDomains and gangs are ended by the controller's own
rules (`core.domains.owned`, `core.gangs.snapshot`): a finalizer is removed only when what it protects is
gone.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from rackloom.claim.cluster.uninstall.blockers import (
    LeftBehind,
    UninstallBlocker,
    UninstallPhase,
    find_blockers,
    find_left_behind,
)
from rackloom.claim.cluster.uninstall.inventory import (
    NODE_COMPONENTS,
    PLUGINS,
    ClusterInventory,
    is_part_of_rackloom,
    is_sole_label_writer,
    was_written_by_us,
)
from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import read_tray_node, reserving_plans
from rackloom.core.cluster.nodes import slice_pool
from rackloom.core.cluster.objects import (
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
    CreateObject,
    DeleteObject,
    Object,
    ObjectWrite,
    ResourceKind,
    conditions_of,
    deletion_time,
    finalizers_of,
    is_being_deleted,
    labels_of,
    metav1_time,
    name_of,
    namespace_of,
    object_title,
    owners_of,
    title_of,
    uid_of,
)
from rackloom.core.cluster.pods import node_of
from rackloom.core.domains.observe import take_domain_snapshot, with_secrets
from rackloom.core.domains.owned import teardown_writes
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings
from rackloom.core.domains.snapshot import owned_object, remove_label
from rackloom.core.gangs.snapshot import close_record, read_record, release_tray, release_trays

PHASE_ORDER = tuple(UninstallPhase)
PHASE_TITLES = {
    UninstallPhase.WEBHOOKS: "delete the admission webhooks",
    UninstallPhase.GANGS: "end the gangs and give back their trays",
    UninstallPhase.DOMAINS: "delete the ComputeDomains and their IMEX daemons",
    UninstallPhase.CONTROLLER: "stop the controller and the webhook",
    UninstallPhase.REMAINS: "remove what ComputeDomains and gangs left",
    UninstallPhase.CLASSES: "delete the device classes, so that nothing new is allocated",
    UninstallPhase.PLUGINS: "stop the node plugins",
    UninstallPhase.DEVICES: "withdraw the published devices",
    UninstallPhase.OBJECTS: "delete rights, policies and what else was installed",
    UninstallPhase.DEFINITIONS: "delete the custom resource definitions",
    UninstallPhase.NAMESPACES: "delete the namespaces",
}
_OVERDUE_SECONDS = 5.0
"""Seconds after its grace period in which a daemon pod whose plugin is gone is removed by force."""
_OWN_STEP = {
    MUTATING_WEBHOOK: UninstallPhase.WEBHOOKS,
    VALIDATING_WEBHOOK: UninstallPhase.WEBHOOKS,
    DEPLOYMENT: UninstallPhase.CONTROLLER,
    DEVICE_CLASS: UninstallPhase.CLASSES,
    DAEMON_SET: UninstallPhase.PLUGINS,
    CRD: UninstallPhase.DEFINITIONS,
    NAMESPACE: UninstallPhase.NAMESPACES,
}
"""The phase in which installed objects of a kind go; all others go in `UninstallPhase.OBJECTS`."""


class UninstallStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one phase still has to do."""

    phase: UninstallPhase
    objects: tuple[str, ...] = ()
    """Objects that are not gone yet, as `Kind namespace/name`."""
    waits: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why an object that is being deleted still exists."""
    actions: tuple[ObjectWrite, ...] = ()
    """Writes to send now. Empty while it remains to wait for deletions."""
    blockers: tuple[UninstallBlocker, ...] = ()


class UninstallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that are not done, in order. Empty if of our objects only `left` remain."""

    steps: tuple[UninstallStep, ...] = ()
    left: tuple[LeftBehind, ...] = ()

    @property
    def blockers(self) -> tuple[UninstallBlocker, ...]:
        """All of them."""
        return tuple(blocker for step in self.steps for blocker in step.blockers)


def build_uninstall_plan(inventory: ClusterInventory) -> UninstallPlan:
    """What remains to be done in each phase."""
    work = _StepCollector()
    _plan_installed(work, inventory)
    _plan_programs(work, inventory)
    _plan_gangs(work, inventory)
    for domain in inventory.domains:
        if not inventory.is_warm(domain):
            _take_apart(UninstallPhase.DOMAINS, domain, work, inventory)
    _plan_remains(work, inventory)
    _plan_devices(work, inventory)
    for kind in inventory.kinds():
        for obj in inventory.all(kind):
            if _is_created_at_run_time(kind, obj, inventory):
                work.delete(UninstallPhase.OBJECTS, kind, obj)
    steps = tuple(work.step(phase) for phase in PHASE_ORDER)
    steps = tuple(step for step in steps if step.objects or step.actions)
    return UninstallPlan(
        steps=_with_blockers(steps, find_blockers(inventory)), left=tuple(find_left_behind(inventory))
    )


class _StepCollector:
    """Collects what each phase has to do."""

    def __init__(self) -> None:
        self._objects: dict[UninstallPhase, dict[str, str]] = {phase: {} for phase in PHASE_ORDER}
        self._actions: dict[UninstallPhase, list[ObjectWrite]] = {phase: [] for phase in PHASE_ORDER}

    def delete(
        self, phase: UninstallPhase, kind: ResourceKind, obj: Object, *, grace: int | None = None
    ) -> None:
        """Delete an object, unless it is being deleted; with `grace`, in any case."""
        self.wait(phase, kind, obj)
        if not is_being_deleted(obj) or grace is not None:
            action = DeleteObject(
                kind=kind,
                namespace=namespace_of(obj),
                name=name_of(obj),
                uid=uid_of(obj),
                grace_seconds=grace,
            )
            self._actions[phase].append(action)

    def wait(self, phase: UninstallPhase, kind: ResourceKind, obj: Object) -> None:
        """Wait for an object that goes by itself."""
        self._objects[phase][title_of(kind, obj)] = _why_it_waits(kind, obj)

    def act(self, phase: UninstallPhase, *actions: ObjectWrite) -> None:
        """Add other writes than deletions."""
        for action in actions:
            self._objects[phase].setdefault(_target_label(action), "")
            self._actions[phase].append(action)

    def step(self, phase: UninstallPhase) -> UninstallStep:
        """What was collected."""
        found = self._objects[phase]
        return UninstallStep(
            phase=phase,
            objects=tuple(found),
            waits={what: why for what, why in found.items() if why},
            actions=tuple(self._actions[phase]),
        )


def _plan_installed(work: _StepCollector, inventory: ClusterInventory) -> None:
    """Delete what was installed, except definitions that others use and namespaces with foreign content."""
    for kind, obj in inventory.installed:
        if kind in (CRD, DEVICE_CLASS):
            stays = inventory.is_shared(kind, obj)
        elif kind == NAMESPACE:
            stays = not is_being_deleted(obj) and bool(inventory.foreign_content(name_of(obj)))
        else:
            stays = False
        if not stays:
            work.delete(_OWN_STEP.get(kind, UninstallPhase.OBJECTS), kind, obj)


def _plan_gangs(work: _StepCollector, inventory: ClusterInventory) -> None:
    nodes = {name_of(node): read_tray_node(node) for node in inventory.all(NODE)}
    for plan in inventory.all(GANG_PLAN):
        if inventory.runs("controller"):
            work.delete(UninstallPhase.GANGS, GANG_PLAN, plan)
            continue
        uid = uid_of(plan)
        held = tuple(name for name, node in nodes.items() if uid in node.holders)
        work.wait(UninstallPhase.GANGS, GANG_PLAN, plan)
        work.act(UninstallPhase.GANGS, *(release_trays(nodes, held, uid) or close_record(read_record(plan))))


def _take_apart(
    phase: UninstallPhase, domain: Object, work: _StepCollector, inventory: ClusterInventory
) -> None:
    """Delete a ComputeDomain. If no controller runs, also do what its finalizer waits for."""
    work.delete(phase, COMPUTE_DOMAIN, domain)
    if is_being_deleted(domain) and not inventory.runs("controller"):
        _tear_down(phase, uid_of(domain), work, inventory)


def _tear_down(phase: UninstallPhase, uid: str, work: _StepCollector, inventory: ClusterInventory) -> None:
    """What the controller would do for a ComputeDomain that is being deleted, or that is gone."""
    # Of the settings, taking apart needs only the namespaces of the daemons.
    first, *more = inventory.daemon_namespaces
    settings = ControllerSettings(
        daemon=ImexDaemonSettings(image=""), daemon_namespace=first, additional_namespaces=tuple(more)
    )
    certificates = tuple(owned_object(SECRET, secret) for secret in inventory.certificates(uid))
    snapshot = take_domain_snapshot(inventory, uid, settings, metav1_time(inventory.now))
    snapshot = with_secrets(snapshot, certificates)
    daemons = inventory.daemons(uid)
    for pod in daemons:
        # A daemon ends with its DaemonSet. Its kubelet cannot finish while the plugin of its claim is gone.
        due = deletion_time(pod)
        is_stuck = due is not None and inventory.now - due > _OVERDUE_SECONDS
        if is_stuck and not inventory.serves(names.IMEX_DRIVER):
            work.delete(phase, POD, pod, grace=0)
        else:
            work.wait(phase, POD, pod)
    for held in snapshot.held:
        obj = inventory.at(held.kind, held.namespace, held.name)
        if obj is not None and (held.deleting or names.FINALIZER in held.finalizers):
            work.wait(phase, held.kind, obj)
    actions = teardown_writes(snapshot)
    # The ComputeDomain's finalizer is the last to go, and only after its daemons have ended.
    if not (daemons and any(action.kind == COMPUTE_DOMAIN for action in actions)):
        work.act(phase, *actions)


def _plan_programs(work: _StepCollector, inventory: ClusterInventory) -> None:
    """The pods of our programs end with their Deployments and DaemonSets."""
    phases = dict.fromkeys(("controller", "webhook"), UninstallPhase.CONTROLLER)
    phases |= dict.fromkeys(NODE_COMPONENTS, UninstallPhase.PLUGINS)
    for component, phase in phases.items():
        for pod in inventory.pods_of(component):
            work.wait(phase, POD, pod)


def _plan_remains(work: _StepCollector, inventory: ClusterInventory) -> None:
    for node in inventory.all(NODE):
        _plan_node(node, work, inventory)
    for found in _our_slices(inventory):
        if names.WARM_CLIQUE_LABEL in labels_of(found):
            work.delete(UninstallPhase.REMAINS, RESOURCE_SLICE, found)
    for domain in inventory.domains:
        if inventory.is_warm(domain):
            _take_apart(UninstallPhase.REMAINS, domain, work, inventory)
    for uid in inventory.outlived:
        _tear_down(UninstallPhase.REMAINS, uid, work, inventory)


def _plan_node(node: Object, work: _StepCollector, inventory: ClusterInventory) -> None:
    """Labels and taints of the controller. Those of ComputeDomains go with these."""
    owned = owned_object(NODE, node)
    for label in (names.CHANNELS_READY_LABEL, names.WARM_CLIQUE_LABEL):
        if label in owned.labels:
            work.act(UninstallPhase.REMAINS, remove_label(owned, label, owned.labels[label]))
    plans = {uid_of(found) for found in inventory.all(GANG_PLAN)}
    for uid in reserving_plans(node):
        if uid not in plans:
            work.act(UninstallPhase.REMAINS, release_tray(read_tray_node(node), uid))


def _plan_devices(work: _StepCollector, inventory: ClusterInventory) -> None:
    for found in _our_slices(inventory):
        if names.WARM_CLIQUE_LABEL not in labels_of(found):
            work.delete(UninstallPhase.DEVICES, RESOURCE_SLICE, found)
    for node in inventory.all(NODE):
        clique = labels_of(node).get(names.GPU_CLIQUE_LABEL)
        if clique is not None and is_sole_label_writer(node, names.GPU_CLIQUE_LABEL):
            work.act(
                UninstallPhase.DEVICES, remove_label(owned_object(NODE, node), names.GPU_CLIQUE_LABEL, clique)
            )


def _our_slices(inventory: ClusterInventory) -> Iterator[Object]:
    for found in inventory.all(RESOURCE_SLICE):
        if slice_pool(found).driver in PLUGINS and was_written_by_us(found):
            yield found


def _is_created_at_run_time(kind: ResourceKind, obj: Object, inventory: ClusterInventory) -> bool:
    """Whether our programs created it in our namespaces, not for a ComputeDomain: the leases of elections."""
    return (
        kind not in (POD, COMPUTE_DOMAIN, GANG_PLAN)
        and namespace_of(obj) in inventory.homes
        and was_written_by_us(obj)
        and not is_part_of_rackloom(obj)
        and names.COMPUTE_DOMAIN_LABEL not in labels_of(obj)
        and not owners_of(obj)
    )


def _with_blockers(
    steps: tuple[UninstallStep, ...], blockers: Iterable[UninstallBlocker]
) -> tuple[UninstallStep, ...]:
    """Each blocker at the first step that is left from its own phase on."""
    found: dict[UninstallPhase, list[UninstallBlocker]] = {}
    for blocker in blockers:
        at = PHASE_ORDER.index(blocker.phase)
        first = next((step.phase for step in steps if PHASE_ORDER.index(step.phase) >= at), None)
        if first is not None:
            found.setdefault(first, []).append(blocker)
    return tuple(msgspec.structs.replace(step, blockers=tuple(found.get(step.phase, ()))) for step in steps)


def _why_it_waits(kind: ResourceKind, obj: Object) -> str:
    """Why an object that is being deleted still exists. Empty for all others."""
    if not is_being_deleted(obj):
        return ""
    messages = {found.type: found.message for found in conditions_of(obj) if found.status == "True"}
    if kind == NAMESPACE:
        return (
            "; ".join(message for message in messages.values() if message) or "its content is being deleted"
        )
    if kind == POD:
        node = node_of(obj) or None
        forced = f"kubectl delete pod --force -n {namespace_of(obj)} {name_of(obj)}"
        return f"node {node} has not ended it; if that node is lost: {forced}"
    held = ", ".join(finalizers_of(obj)) or "its dependents"
    reasons = (messages.get(type_) for type_ in ("Progressing", "Degraded", "Terminating"))
    why = "; ".join(filter(None, reasons))
    return f"held by {held}{f' ({why})' if why else ''}"


def _target_label(action: ObjectWrite) -> str:
    if isinstance(action, CreateObject):
        return action.what
    return object_title(action.kind, action.namespace, action.name)
