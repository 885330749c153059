"""The pods of a gang as values."""

from collections.abc import Mapping

import msgspec

from rackloom.claim.cluster.admission.marks import GATE as TEMPLATE_GATE
from rackloom.claim.cluster.admission.shapes import Owner, Pod, read
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.wishes import group_of
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import JOB
from rackloom.claim.kube.timestamps import seconds_of
from rackloom.claim.place.reading.counts import count_of

GPU_RESOURCE = "nvidia.com/gpu"
_CLASS_RESOURCES = "deviceclass.resource.kubernetes.io/"
"""Before the name of a device class: kube-scheduler makes a claim for it, once it has chosen a node."""
_ENDED = ("Succeeded", "Failed")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a gang."""

    pod: Pod
    obj: Object
    """As it is stored: its rules about nodes and neighbours are read where it is placed."""
    namespace: str
    tolerations: int | None
    """How many it has; None where the field is missing."""
    ended: bool
    going: bool
    """Its deletion was asked for."""
    succeeded: bool = False
    waits_because: str = ""
    """What the scheduler says of a pod that it cannot bind."""
    is_unschedulable: bool = False
    """The scheduler found no node for it: said after its last gate went, since before it does not try."""
    priority: int = 0
    gpus: int = 0
    """Those that its containers count (`nvidia.com/gpu`); claimed ones are not among them."""
    uncounted: tuple[str, ...] = ()
    """Resources of its containers that stand for a device class (KEP-5004)."""

    @property
    def name(self) -> str:
        """Of the pod."""
        return self.pod.metadata.name

    @property
    def uid(self) -> str:
        """Of the pod."""
        return self.pod.metadata.uid

    @property
    def annotations(self) -> Mapping[str, str]:
        """Of the pod."""
        return self.pod.annotations

    @property
    def group(self) -> str:
        """Its group in the gang."""
        return group_of(self.pod.labels)

    @property
    def node(self) -> str | None:
        """Where it is bound."""
        return self.pod.spec.node_name or None

    @property
    def gate(self) -> int | None:
        """The place of our gate among its gates."""
        gates = [one.name for one in self.pod.spec.scheduling_gates or ()]
        return gates.index(marks.GATE) if marks.GATE in gates else None

    @property
    def foreign_gates(self) -> tuple[str, ...]:
        """Gates of others than Rackloom, such as queues."""
        gates = (one.name for one in self.pod.spec.scheduling_gates or ())
        return tuple(name for name in gates if name not in (marks.GATE, TEMPLATE_GATE))

    @property
    def tray(self) -> str | None:
        """The tray for which it was let go; None while it is gated, or if it was never held."""
        return None if self.gate is not None else self.annotations.get(marks.TRAY_ANNOTATION)

    @property
    def released_at(self) -> float | None:
        """When it was let go, in seconds since the epoch."""
        found = self.annotations.get(marks.RELEASED_ANNOTATION)
        return None if self.tray is None or found is None else seconds_of(found)

    @property
    def owner(self) -> Owner | None:
        """The controller that makes it anew when it is deleted."""
        return self.pod.owner

    @property
    def is_bare(self) -> bool:
        """Nobody owns it."""
        return not self.pod.metadata.owner_references

    @property
    def is_done(self) -> bool:
        """It ended well, and by itself: what is deleted may end well too, and is made anew."""
        return self.succeeded and not self.going

    @property
    def job(self) -> Owner | None:
        """Its owner where that is a Job."""
        owner = self.owner
        is_job = owner is not None and (owner.api_version, owner.kind) == (JOB.api_version, JOB.kind)
        return owner if is_job else None

    @property
    def rank(self) -> tuple[int, str]:
        """The order of members of a group."""
        found = (self.pod.labels.get(label, "") for label in marks.INDEX_LABELS)
        return next((int(one) for one in found if one.isdecimal()), 0), self.name


def member_of(obj: Object) -> Member:
    """Read a pod."""
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    tolerations, waits = spec.get("tolerations"), _not_scheduled(status)
    return Member(
        pod=read(obj, Pod),
        obj=obj,
        namespace=meta["namespace"],
        tolerations=None if tolerations is None else len(tolerations),
        ended=status.get("phase") in _ENDED,
        going="deletionTimestamp" in meta,
        succeeded=status.get("phase") == "Succeeded",
        waits_because=waits.get("message") or waits.get("reason") or "",
        is_unschedulable=waits.get("reason") == "Unschedulable",
        priority=spec.get("priority") or 0,
        gpus=counted_gpus(spec),
        uncounted=tuple(sorted(_of_classes(spec))),
    )


def counted_gpus(spec: Object) -> int:
    """GPUs in the limits of a pod's containers; what init containers have is over by then.

    Raises ValueError where a limit is no count.
    """
    limits = ((one.get("resources") or {}).get("limits") or {} for one in spec.get("containers") or ())
    return sum(count_of(one.get(GPU_RESOURCE, 0)) for one in limits)


def _not_scheduled(status: Object) -> Object:
    """The condition in which the scheduler says that it did not bind a pod; empty without one."""
    found = (one for one in status.get("conditions") or () if one["type"] == "PodScheduled")
    return next((one for one in found if one["status"] == "False"), {})


def _of_classes(spec: Object) -> set[str]:
    containers = (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    resources = (one.get("resources") or {} for one in containers)
    named = (name for one in resources for name in (*(one.get("limits") or ()), *(one.get("requests") or ())))
    return {name for name in named if name.startswith(_CLASS_RESOURCES)}
