"""The nodes on which a request may be met, by the taints that it tolerates.

A device with a blocking taint that the request does not tolerate cannot serve. So a search need not come to a
node where that holds for the first blocking taint of every device, as long as no selector fails there: a
selector is checked before taints, and its error counts.

The index reads nodes in order, and no further than it is asked to.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence

from rackloom.core.allocate.eligibility import CandidateDevice, blocking_taint
from rackloom.core.allocate.objects import DeviceToleration

CHANGED_SHARE = 8
"""One node in so many may have changed since an index read it."""


class TaintIndex:
    """The nodes by the first blocking taint of their devices, as far as they were read."""

    def __init__(self, through: Callable[[int], Sequence[CandidateDevice] | None]) -> None:
        """`through` gives the devices of a node that count; None where it must be visited in any case."""
        self._through = through
        self.restart()

    def restart(self) -> None:
        """Forget what was read."""
        self.read = self._changed = 0
        self._always: list[int] = []
        """Nodes that are visited whatever is tolerated."""
        self._tainted: list[int] = []
        self._of_key: dict[str, list[int]] = {}
        self._of_value: dict[tuple[str, str], list[int]] = {}

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
        found = first_of(self._always, start, reach)
        for toleration in tolerations:
            found = min(found, first_of(self._may_serve(toleration), start, reach))
        return min(found, reach)

    def _may_serve(self, toleration: DeviceToleration) -> Sequence[int]:
        if not toleration.key:
            return self._tainted
        if toleration.operator in ("", "Equal"):
            return self._of_value.get((toleration.key, toleration.value), ())
        return self._of_key.get(toleration.key, ())

    def _add(self, number: int) -> None:
        self.read = number + 1
        candidates = self._through(number)
        if candidates is None:
            self._always.append(number)
            return
        taints = {blocking_taint(candidate.device, ()) for candidate in candidates}
        if None in taints:
            self._always.append(number)
            return
        if taints:
            self._tainted.append(number)
        for key in {taint.key for taint in taints if taint is not None}:
            self._of_key.setdefault(key, []).append(number)
        for pair in {(taint.key, taint.value) for taint in taints if taint is not None}:
            self._of_value.setdefault(pair, []).append(number)


def first_of(numbers: Sequence[int], start: int, end: int) -> int:
    """The first of sorted numbers from `start` on; `end` where there is none."""
    at = bisect_left(numbers, start)
    return numbers[at] if at < len(numbers) else end
