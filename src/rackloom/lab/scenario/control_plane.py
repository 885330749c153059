"""Faults of the API server and of Rackloom's controllers in a scenario, and who is observed to lead.

The API server becomes unreachable, answers conflicts, loses replies, repeats or delays events, lags
behind, or drops and expires all watches. `ApiServerGood` fails when the fault struck nothing, because
the scenario would then show nothing.

Controllers without an election are killed, killed at a crash point, doubled, or get a wrong clock. Of
elected controllers the leader is killed or cut off from the API server. `ExpectLeader` compares the
leader with the Lease; that two lead at once is a violation at any time since the start.
"""

from typing import ClassVar, Literal

from rackloom.claim.kube.api import KubeApi
from rackloom.core.kubernetes.objects import LEASE
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.scenario.model import (
    ClusterAction,
    ClusterExpectation,
    End,
    LeaderAction,
    NotObserved,
    SoleAction,
)
from rackloom.lab.scenario.site_expectations import ExpectInvariants
from rackloom.lab.scenario.stage import ClusterControl, ElectionControl


class ApiServerDown(ClusterAction, frozen=True, kw_only=True, tag="api-server-down"):
    """No request reaches the API server, and all watches end."""


class ApiServerBad(ClusterAction, frozen=True, kw_only=True, tag="api-server-bad"):
    """A part of our writes meet conflicts or lose answers, or of changes are heard twice or out of order."""

    how: Literal["conflict", "loses-reply", "events-twice", "events-late"]
    rate: float


class ApiServerStale(ClusterAction, frozen=True, kw_only=True, tag="api-server-stale"):
    """Our processes are stuck with one that falls behind: watches tell nothing; plain lists stay true."""


class ApiServerGood(ClusterAction, frozen=True, kw_only=True, tag="api-server-good"):
    """Everything reaches it and is answered again. Fails if what was bad has struck nothing."""

    breaks: ClassVar[bool] = False


class WatchesDrop(ClusterAction, frozen=True, kw_only=True, tag="watches-drop"):
    """All watches break; the API server still has what comes meanwhile."""


class WatchesExpire(ClusterAction, frozen=True, kw_only=True, tag="watches-expire"):
    """All watches break, and the API server no longer has what came since: 410 Gone."""


class ControllersKilled(SoleAction, frozen=True, kw_only=True, tag="controllers-killed"):
    """Rackloom's controllers are killed where they stand; others begin after so many seconds."""

    down: float = 1.0


class ControllersDie(SoleAction, frozen=True, kw_only=True, tag="controllers-die"):
    """So many `lives` of Rackloom's controllers end at their `point`-th step: before a write, or after it."""

    point: int
    lives: int = 1


class ControllersDoubled(SoleAction, frozen=True, kw_only=True, tag="controllers-doubled"):
    """Others begin beside Rackloom's controllers, as when a leader wakes up that was thought dead."""


class ControllersSingle(SoleAction, frozen=True, kw_only=True, tag="controllers-single"):
    """The others end."""


class ControllersClockSet(ClusterAction, frozen=True, kw_only=True, tag="controllers-clock-set"):
    """The clock of the controllers' machine is set forwards, or backwards."""

    by: float


class LeaderKilled(LeaderAction, frozen=True, kw_only=True, tag="leader-killed"):
    """It is killed where it stands and keeps the Lease; `down` seconds later it stands for election again."""

    down: float = 60.0


class LeaderCutOff(LeaderAction, frozen=True, kw_only=True, tag="leader-cut-off"):
    """Nothing arrives any more between it and the API server; the other replica still reaches that."""


class LeaderConnected(LeaderAction, frozen=True, kw_only=True, tag="leader-connected"):
    """What was cut off reaches the API server again."""


class ExpectLeader(ClusterExpectation, frozen=True, kw_only=True, tag="leader"):
    """The Lease names who leads, and no two ever did at once; `changed`: not whom the last such step saw."""

    changed: bool = False


class ExpectControllersEnded(ClusterExpectation, frozen=True, kw_only=True, tag="controllers-ended"):
    """So many lives of Rackloom's controllers have ended."""

    count: int


# The API server.


CONTROLLER_USER = "rackloom-controller"
RACKLOOM_USERS = (CONTROLLER_USER, "rackloom-webhook", "compute-domain-daemon")
"""Rackloom's processes that watch, as they call themselves."""
_UPDATE_VERBS = ("replace", "apply", "patch")


class ApiServerFaults:
    """Breaks what is said to and by the API server."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube

    async def down(self, _: ApiServerDown) -> str:
        """Nobody reaches it."""
        self._kube.faults.add(RequestFault())
        self._kube.store.hang_up()
        return "the API server cannot be reached"

    async def bad(self, step: ApiServerBad) -> str:
        """What our processes ask or hear goes wrong."""
        match step.how:
            case "conflict":
                for verb in _UPDATE_VERBS:
                    self._kube.faults.add(
                        _controller_write_fault(step.rate, verb, code=409, reason="Conflict")
                    )
            case "loses-reply":
                for verb in ("create", "delete", *_UPDATE_VERBS):
                    self._kube.faults.add(_controller_write_fault(step.rate, verb, lost="reply"))
            case "events-twice":
                self._kube.disordered_events.begin(RACKLOOM_USERS, twice=step.rate)
            case "events-late":
                self._kube.disordered_events.begin(RACKLOOM_USERS, late=step.rate)
        return f"{step.how}: {step.rate:.0%}"

    async def stale(self, _: ApiServerStale) -> str:
        """Our processes are stuck with a server that does not follow the others."""
        self._kube.stale_reads.begin(self._kube.store, self._kube.schemas, RACKLOOM_USERS)
        return f"Rackloom's processes hear nothing that comes after version {self._kube.store.version}"

    async def good(self, _: ApiServerGood) -> str:
        """All is answered. Not seen where nobody has noticed that it was bad."""
        struck = self._end()
        if not struck:
            raise NotObserved("nothing was struck by what was bad: the scenario shows nothing")
        return f"the API server answers; {struck} calls and changes were struck"

    async def drop_watches(self, _: WatchesDrop) -> str:
        """They can go on from where they were."""
        self._kube.store.hang_up()
        return "all watches ended"

    async def expire_watches(self, _: WatchesExpire) -> str:
        """410 for whoever wants to go on from where it was."""
        self._kube.store.compact()
        self._kube.store.hang_up()
        return "all watches ended, and what was before is forgotten"

    async def heal(self) -> str:
        """Whatever is bad is over."""
        self._end()
        return "the API server answers"

    def _end(self) -> int:
        struck = self._kube.faults.hits + self._kube.stale_reads.hits + self._kube.disordered_events.hits
        self._kube.faults.clear()
        self._kube.stale_reads.end()
        self._kube.disordered_events.end()
        return struck


def _controller_write_fault(rate: float, verb: str, **how: object) -> RequestFault:
    return RequestFault(rate=rate, verb=verb, user=CONTROLLER_USER, **how)  # type: ignore[arg-type]


# Controllers without an election.


class ControllerFaults:
    """Ends them, doubles them, confuses them."""

    def __init__(self, stage: ClusterControl) -> None:
        self._stage = stage

    async def kill(self, step: ControllersKilled) -> str:
        """And others in their place."""
        await self._stage.controllers.kill(step.down)
        return f"Rackloom's controllers ended, and others begin after {step.down:g} s"

    async def die(self, step: ControllersDie) -> str:
        """At a step of their own."""
        self._stage.controllers.die(step.point, step.lives)
        return f"{step.lives} lives of the controllers will end, each at its step {step.point}"

    async def ended(self, step: ExpectControllersEnded) -> str:
        """How many lives are over."""
        ended = self._stage.controllers.ended
        if ended != step.count:
            raise NotObserved(f"{ended} lives of the controllers have ended")
        return f"{ended} lives of the controllers have ended"

    async def double(self, _: ControllersDoubled) -> str:
        """Both believe that they lead."""
        self._stage.controllers.double()
        return "other controllers work beside the first"

    async def single(self, _: ControllersSingle) -> str:
        """One is left."""
        await self._stage.controllers.single()
        return "the other controllers ended"

    async def set_clock(self, step: ControllersClockSet) -> str:
        """What their machine believes."""
        self._stage.clock.skew += step.by
        return f"the clock of the controllers' machine is {self._stage.clock.skew:+g} s"

    async def heal(self) -> str:
        """One is left, knows the time, and reaches the API server."""
        self._stage.clock.skew = 0.0
        if self._stage.candidates is not None:
            self._stage.candidates.connect()
        await self._stage.controllers.single()
        return "one controller is at work"


# Elected controllers.


LEADER_LEASE = ("rackloom-controller", "rackloom-system")
"""Name and namespace of the Lease."""


class LeaderFaults:
    """Ends the leader, parts it from the API server, and looks who leads. `api` asks as a user does."""

    def __init__(self, candidates: ElectionControl, api: KubeApi) -> None:
        self._candidates = candidates
        self._api = api
        self._seen: str | None = None
        """Who led when a `leader` step last looked."""
        self._before: dict[int, str | None] = {}
        """By step, who led when the one before it last looked: a step looks again and again."""

    async def kill(self, step: LeaderKilled) -> str:
        """Without a last word: the Lease stays its own."""
        who = _require_leader(await self._candidates.kill_leader(step.down))
        return f"{who}, which led, ended; it stands for election again after {step.down:g} s"

    async def cut_off(self, _: LeaderCutOff) -> str:
        """Alive, and deaf."""
        return (
            f"{_require_leader(self._candidates.cut_off_leader())}, which led, is cut off from the API server"
        )

    async def connect(self, _: LeaderConnected) -> str:
        """It hears what came meanwhile."""
        self._candidates.connect()
        return "all replicas reach the API server"

    async def leader(self, step: ExpectLeader) -> str:
        """Who leads, whom the Lease names, and whether two ever did."""
        self._require_one_at_a_time()
        before = self._before.setdefault(id(step), self._seen)
        who = _require_leader(self._candidates.leader)
        named = (await self._api.get(LEASE, *LEADER_LEASE))["spec"].get("holderIdentity")
        if who != named:
            raise NotObserved(f"{who} leads, the Lease names {named}")
        if step.changed and (before is None or who == before):
            raise NotObserved(f"{who} still leads" if before else "no step before saw who led")
        self._seen = who
        return f"{who} leads, as the Lease says" + (f"; before, {before} did" if step.changed else "")

    async def one_at_a_time(self, _: ExpectInvariants | End) -> str:
        """Since the start."""
        self._require_one_at_a_time()
        return "never did two of Rackloom's controllers lead at once"

    def _require_one_at_a_time(self) -> None:
        if self._candidates.overlaps:
            raise NotObserved(self._candidates.overlaps[0])


def _require_leader(who: str | None) -> str:
    if who is None:
        raise NotObserved("nobody leads")
    return who
