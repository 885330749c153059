"""What goes wrong with the API server of a scenario, and what becomes well again."""

from rackloom.twin.kube import FakeKube, Fault
from rackloom.twin.scenario import cluster_values as values
from rackloom.twin.scenario.stage import NotSeen

CONTROLLERS = "rackloom-controller"
OURS = (CONTROLLERS, "rackloom-webhook", "compute-domain-daemon")
"""Rackloom's processes that watch, as they call themselves."""
_CHANGES = ("replace", "apply", "patch")


class ServerHands:
    """Breaks what is said to and by the API server."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube

    async def down(self, _: values.ApiServerDown) -> str:
        """Nobody reaches it."""
        self._kube.faults.add(Fault())
        self._kube.store.hang_up()
        return "the API server cannot be reached"

    async def bad(self, step: values.ApiServerBad) -> str:
        """What our processes ask or hear goes wrong."""
        match step.how:
            case "conflict":
                for verb in _CHANGES:
                    self._kube.faults.add(_fault(step.rate, verb, code=409, reason="Conflict"))
            case "loses-reply":
                for verb in ("create", "delete", *_CHANGES):
                    self._kube.faults.add(_fault(step.rate, verb, lost="reply"))
            case "events-twice":
                self._kube.tangle.begin(OURS, twice=step.rate)
            case "events-late":
                self._kube.tangle.begin(OURS, late=step.rate)
        return f"{step.how}: {step.rate:.0%}"

    async def stale(self, _: values.ApiServerStale) -> str:
        """Our processes are stuck with a server that does not follow the others."""
        self._kube.lag.begin(self._kube.store, self._kube.shapes, OURS)
        return f"Rackloom's processes hear nothing that comes after version {self._kube.store.version}"

    async def good(self, _: values.ApiServerGood) -> str:
        """All is answered. Not seen where nobody has noticed that it was bad."""
        struck = self._end()
        if not struck:
            raise NotSeen("nothing was struck by what was bad: the scenario shows nothing")
        return f"the API server answers; {struck} calls and changes were struck"

    async def drop_watches(self, _: values.WatchesDrop) -> str:
        """They can go on from where they were."""
        self._kube.store.hang_up()
        return "all watches ended"

    async def expire_watches(self, _: values.WatchesExpire) -> str:
        """410 for whoever wants to go on from where it was."""
        self._kube.store.compact()
        self._kube.store.hang_up()
        return "all watches ended, and what was before is forgotten"

    async def heal(self) -> str:
        """Whatever is bad is over."""
        self._end()
        return "the API server answers"

    def _end(self) -> int:
        struck = self._kube.faults.hits + self._kube.lag.hits + self._kube.tangle.hits
        self._kube.faults.clear()
        self._kube.lag.end()
        self._kube.tangle.end()
        return struck


def _fault(rate: float, verb: str, **how: object) -> Fault:
    return Fault(rate=rate, verb=verb, user=CONTROLLERS, **how)  # type: ignore[arg-type]
