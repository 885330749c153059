"""From objects of the cluster to the view of a gang."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.members import member_of
from rackloom.claim.cluster.gang.record import GangKey, Record, record_of
from rackloom.claim.cluster.gang.trays import NodeView, node_view
from rackloom.claim.cluster.gang.view import Rival, View
from rackloom.claim.kube.api import Object


class Seen(Protocol):
    """Objects as last seen, or as just listed."""

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of a gang."""
        ...

    def plan_of(self, uid: str) -> Object | None:
        """The GangPlan of a UID."""
        ...

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of a gang."""
        ...

    def node(self, name: str) -> Object | None:
        """A node."""
        ...

    def held(self, uid: str) -> Sequence[Object]:
        """The nodes that carry the taint of a plan."""
        ...


def gang_of(obj: Object) -> GangKey | None:
    """The gang of a pod."""
    meta = obj["metadata"]
    name = (meta.get("labels") or {}).get(GANG_LABEL)
    has_size = marks.SIZE_ANNOTATION in (meta.get("annotations") or {})
    return GangKey(meta["namespace"], name) if name and has_size else None


def holders_of(node: Object) -> tuple[str, ...]:
    """UIDs of the plans whose taint a node carries."""
    taints = (node.get("spec") or {}).get("taints") or ()
    return tuple(one.get("value", "") for one in taints if one["key"] == marks.TAINT)


def view_of(seen: Seen, key: GangKey, now: float) -> View:
    """Everything about one gang. `now` is in seconds since the epoch."""
    found = seen.plan(key)
    record = None if found is None else record_of(found)
    nodes = {} if record is None else _nodes(seen, record)
    return View(
        key=key,
        now=now,
        record=record,
        members=tuple(member_of(one) for one in seen.pods(key)),
        nodes=nodes,
        rivals=() if record is None else tuple(_rivals(seen, record, nodes)),
    )


def _nodes(seen: Seen, record: Record) -> dict[str, NodeView]:
    named = (seen.node(name) for name in record.reserved)
    views = (node_view(one) for one in (*named, *seen.held(record.uid)) if one is not None)
    return {one.name: one for one in views}


def _rivals(seen: Seen, record: Record, nodes: Mapping[str, NodeView]) -> Iterable[Rival]:
    uids = {uid for name in record.reserved if name in nodes for uid in nodes[name].holders}
    for uid in sorted(uids - {record.uid}):
        found = seen.plan_of(uid)
        other = None if found is None else record_of(found)
        # One that was given up takes its taints off by itself.
        if other is not None and other.plan is not None:
            held = {one["metadata"]["name"] for one in seen.held(uid)}
            yield Rival(uid=uid, created=other.created, is_whole=held >= set(other.reserved))


class Confirmed:
    """A `Seen` with the plan and the pods of one gang as the API server has them; the rest is as last seen.

    Nodes need no second look: what is written to them fails if they have changed.
    """

    def __init__(self, seen: Seen, plan: Object | None, pods: Sequence[Object]) -> None:
        self._plan = plan
        self._pods = pods
        self.plan_of = seen.plan_of
        self.node = seen.node
        self.held = seen.held

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of the gang."""
        return self._plan

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of the gang."""
        return [one for one in self._pods if gang_of(one) == key]


class Listing:
    """A `Seen` of fresh lists. `record` takes in a plan that was written since."""

    def __init__(self, plans: Iterable[Object], pods: Iterable[Object], nodes: Iterable[Object]) -> None:
        self._plans: dict[GangKey, Object] = {}
        self._records: dict[GangKey, Record] = {}
        for plan in plans:
            self.record(plan)
        self._nodes = {one["metadata"]["name"]: one for one in nodes}
        self._pods: dict[GangKey, list[Object]] = {}
        self._held: dict[str, list[Object]] = {}
        for pod in pods:
            key = gang_of(pod)
            if key is not None:
                self._pods.setdefault(key, []).append(pod)
        for node in self._nodes.values():
            for uid in holders_of(node):
                self._held.setdefault(uid, []).append(node)

    @property
    def records(self) -> tuple[Record, ...]:
        """All plans."""
        return tuple(self._records.values())

    def record(self, plan: Object) -> None:
        """Know a plan as it was just written."""
        record = record_of(plan)
        self._plans[record.key], self._records[record.key] = plan, record

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of a gang."""
        return self._plans.get(key)

    def plan_of(self, uid: str) -> Object | None:
        """The GangPlan of a UID."""
        return next((one for one in self._plans.values() if one["metadata"]["uid"] == uid), None)

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of a gang."""
        return self._pods.get(key, [])

    def node(self, name: str) -> Object | None:
        """A node."""
        return self._nodes.get(name)

    def held(self, uid: str) -> Sequence[Object]:
        """The nodes that carry the taint of a plan."""
        return self._held.get(uid, [])
