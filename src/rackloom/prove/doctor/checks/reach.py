"""Where else a pod could go: which tray has, free and well, all that it holds now.

Pods that share memory reach one another in one clique only, so a member of a ComputeDomain finds nothing for
it in another rack, however many devices are free there. Processors and other pods are not looked at: what is
named is where its devices are.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

from rackloom.claim.domain.names import GPU_DRIVER
from rackloom.prove.doctor.checks.view import View
from rackloom.prove.picture.values import DeviceSeen, DeviceUse, NodeSeen

GANG_TAINT = "rackloom.dev/gang="
"""Begins the mark of a tray that the gang controller keeps, also without a pod on it: a spare."""
KEEPS_OFF = ("NoSchedule", "NoExecute")
"""Effects of taints that keep newcomers away."""
_WITHDRAWN = {GPU_DRIVER: "gpu"}
"""What a device was that is published no more, where its driver's name tells."""
Need = tuple[tuple[tuple[str, str], int], ...]
"""How many devices of each driver and kind."""


class Reach:
    """One picture, as who looks for another place for a pod sees it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._known: dict[tuple[str | None, frozenset[str], Need], NodeSeen | None] = {}

    def place_for(self, pod: str, node: str) -> str:
        """In words, the tray where `pod` (namespace/name) of `node` finds what it has there; empty: nowhere.

        On its own tray it finds what it gives back, but for what is kept from newcomers.
        """
        here = self._view.nodes.get(node)
        if here is None:
            return ""
        opened, need = frozenset(kept_off(here.taints)), self._need(pod)
        if _is_open(here, opened) and _covers(self._free.get(node, Counter()) + self._own(pod, node), need):
            return f"other devices of {node}"
        other = self._tray(here.clique if pod in self._in_domains else None, opened, need)
        if other is None:
            return ""
        return f"{'the spare tray of its gang,' if _is_spare(other) else 'the free tray'} {other.name}"

    def clique_of(self, pod: str, node: str) -> str:
        """Which clique `pod` cannot leave; empty: it may go anywhere."""
        here = self._view.nodes.get(node)
        return "" if here is None or pod not in self._in_domains else here.clique or ""

    def _tray(self, clique: str | None, opened: frozenset[str], need: Need) -> NodeSeen | None:
        asked = (clique, opened, need)
        if asked not in self._known:
            nodes = self._view.nodes.values() if clique is None else self._cliques.get(clique, ())
            fit = [one for one in nodes if _is_open(one, opened) and self._has(one.name, need)]
            self._known[asked] = min(fit, key=lambda one: (not _is_spare(one), one.name), default=None)
        return self._known[asked]

    def _has(self, node: str, need: Need) -> bool:
        return _covers(self._free.get(node, Counter()), need)

    def _own(self, pod: str, node: str) -> Counter[tuple[str, str]]:
        """What it has itself and would find again."""
        held = (self._device(use) for use in self._uses_of.get(pod, ()))
        well = (one for one in held if one is not None and one.node == node and not kept_off(one.taints))
        return Counter((one.driver, one.kind) for one in well)

    def _need(self, pod: str) -> Need:
        kinds = ((one.driver, self._kind(one)) for one in self._uses_of.get(pod, ()))
        return tuple(sorted(Counter(kinds).items()))

    def _kind(self, use: DeviceUse) -> str:
        device = self._device(use)
        return _WITHDRAWN.get(use.driver, "") if device is None else device.kind

    def _device(self, use: DeviceUse) -> DeviceSeen | None:
        return self._view.devices.get((use.driver, use.pool, use.device))

    @cached_property
    def _uses_of(self) -> Mapping[str, list[DeviceUse]]:
        found: defaultdict[str, list[DeviceUse]] = defaultdict(list)
        for use in self._view.picture.uses:
            for pod in use.pods:
                found[pod].append(use)
        return found

    @cached_property
    def _free(self) -> Mapping[str, Counter[tuple[str, str]]]:
        found: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        for one in self._view.picture.devices:
            if not kept_off(one.taints) and (one.driver, one.pool, one.name) not in self._view.uses:
                found[one.node][one.driver, one.kind] += 1
        return found

    @cached_property
    def _cliques(self) -> Mapping[str, list[NodeSeen]]:
        found: defaultdict[str, list[NodeSeen]] = defaultdict(list)
        for node in self._view.picture.nodes:
            if node.clique is not None:
                found[node.clique].append(node)
        return found

    @cached_property
    def _in_domains(self) -> frozenset[str]:
        """Pods that share memory with others, namespace/name."""
        picture = self._view.picture
        shared = {(one.namespace, one.name) for one in picture.claims if one.domain}
        return frozenset(
            f"{pod.namespace}/{pod.name}"
            for pod in picture.pods
            if any((pod.namespace, name) in shared for name in pod.claims.values())
        )


def kept_off(taints: Iterable[str]) -> tuple[str, ...]:
    """Those of `key=value:effect` that keep newcomers away."""
    return tuple(one for one in taints if one.rpartition(":")[2] in KEEPS_OFF)


def _covers(free: Counter[tuple[str, str]], need: Need) -> bool:
    return all(free[kind] >= count for kind, count in need)


def _is_open(node: NodeSeen, stood: frozenset[str]) -> bool:
    """Whether it takes newcomers that stand the taints `stood`, as they do where they are now."""
    return node.ready is True and not node.unschedulable and set(kept_off(node.taints)) <= stood


def _is_spare(node: NodeSeen) -> bool:
    return any(one.startswith(GANG_TAINT) for one in node.taints)
