"""Nodes as a gang sees them: whether they live, and for whom they are reserved."""

from collections.abc import Mapping

import msgspec

from rackloom.claim.cluster.actions import Patch
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.things import not_ready_since
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import NODE


class Taint(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Of a node."""

    key: str
    effect: str
    value: str = ""
    time_added: str | None = None


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is a gang's tray, or was."""

    name: str
    resource_version: str
    taints: tuple[Taint, ...] = ()
    not_ready_since: float | None = None
    """Seconds since the epoch; None while it is ready."""

    @property
    def holders(self) -> tuple[str, ...]:
        """UIDs of the GangPlans for which it is reserved: at most one, unless a person added one."""
        return tuple(one.value for one in self.taints if one.key == marks.TAINT)

    def is_lost(self, now: float, after: float) -> bool:
        """Whether it has not been ready for so many seconds."""
        return self.not_ready_since is not None and now - self.not_ready_since >= after


def node_view(obj: Object) -> NodeView:
    """Read a node."""
    meta = obj["metadata"]
    return NodeView(
        name=meta["name"],
        resource_version=meta["resourceVersion"],
        taints=msgspec.convert((obj.get("spec") or {}).get("taints") or (), tuple[Taint, ...]),
        not_ready_since=not_ready_since(obj),
    )


def reserve(node: NodeView, uid: str) -> Patch:
    """Keep everybody away from a node who does not tolerate this plan's taint."""
    return _with_taints(node, (*node.taints, Taint(marks.TAINT, "NoSchedule", uid)))


def free(node: NodeView, uid: str) -> Patch:
    """Take this plan's taint off a node, and nobody else's."""
    return _with_taints(node, tuple(one for one in node.taints if (one.key, one.value) != (marks.TAINT, uid)))


def freed(nodes: Mapping[str, NodeView], names: tuple[str, ...], uid: str) -> tuple[Patch, ...]:
    """The same for several."""
    return tuple(free(nodes[name], uid) for name in names)


def _with_taints(node: NodeView, taints: tuple[Taint, ...]) -> Patch:
    # The list is replaced whole: with the resourceVersion it cannot undo another writer's change.
    patch = {
        "metadata": {"resourceVersion": node.resource_version},
        "spec": {"taints": [msgspec.to_builtins(one) for one in taints] or None},
    }
    return Patch(kind=NODE, namespace=None, name=node.name, patch=patch)
