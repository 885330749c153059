"""The nodes on which a request may be met, by the taints that it tolerates.

A device with a blocking taint that the request does not tolerate cannot serve. So a search need not come to a
node where that holds for the first blocking taint of every device, as long as no selector fails there: a
selector is checked before taints, and its error counts.

The index reads nodes in order, and no further than it is asked to.
"""

from bisect import insort
from collections.abc import Callable, Iterable

from rackloom.core.allocate.eligibility import first_blocking_taint
from rackloom.core.allocate.nodes_by_value import CHANGED_SHARE, NodesByValue, first_of
from rackloom.core.allocate.objects import DeviceToleration
from rackloom.core.allocate.written_devices import DevicesByDriver


class TaintIndex:
    """The nodes by the first blocking taint of their devices, as far as they were read."""

    def __init__(self, passing: Callable[[int], DevicesByDriver | None]) -> None:
        """`passing` gives the devices of a node that count; None where it must be visited in any case."""
        self._passing = passing
        self.restart()

    def restart(self) -> None:
        """Forget what was read."""
        self.read = self._changed = 0
        self._always: list[int] = []
        """Nodes that are visited whatever is tolerated."""
        self._tainted: list[int] = []
        self._of_key = NodesByValue[str]()
        self._of_value = NodesByValue[tuple[str, str]]()

    def forget(self, number: int) -> None:
        """The devices of a node changed: it is visited whatever the taints. After many, all is read again."""
        if number >= self.read:
            return
        self._changed += 1
        if self._changed * CHANGED_SHARE > self.read:
            self.restart()
        elif number not in self._always:
            insort(self._always, number)

    def first(self, tolerations: Iterable[DeviceToleration], start: int, reach: int) -> int:
        """The first node from `start` on that taints do not rule out; `reach` where none comes before."""
        for number in range(self.read, reach):
            self._add(number)
        found = min(first_of(self._always, start, reach), reach)
        for toleration in tolerations:
            found = self._first_served(toleration, start, found)
        return found

    def _first_served(self, toleration: DeviceToleration, start: int, reach: int) -> int:
        if not toleration.key:
            return min(first_of(self._tainted, start, reach), reach)
        if toleration.operator in ("", "Equal"):
            return self._of_value.first((toleration.key, toleration.value), start, reach)
        return self._of_key.first(toleration.key, start, reach)

    def _add(self, number: int) -> None:
        self.read = number + 1
        groups = self._passing(number)
        if groups is None:
            self._always.append(number)
            return
        pairs: set[tuple[str, str]] = set()
        for _, devices in groups:
            for device in devices:
                taint = first_blocking_taint(device)
                if taint is None:
                    self._always.append(number)
                    return
                pairs.add((taint.key, taint.value))
        if pairs:
            self._tainted.append(number)
        for pair in pairs:
            self._of_value.add(pair, number)
        for key in {key for key, _ in pairs}:
            self._of_key.add(key, number)
