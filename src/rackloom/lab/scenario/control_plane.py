"""Faults of the API server and of Rackloom's controllers in a scenario, and the observed leader.

The API server becomes unreachable, answers conflicts, loses replies, repeats or delays events, lags
behind, or drops and expires all watches. `api-server-good` fails when the fault struck nothing, because
the scenario would then show nothing.

Controllers without an election are killed, killed at a crash point, doubled, or get a wrong clock. Of
elected controllers the leader is killed or cut off from the API server. `leader` compares the leader
with the Lease. Two leaders at once are a violation at any time since the start.
"""

from typing import Literal

from rackloom.core.cluster.objects import LEASE
from rackloom.core.domains.settings import DEFAULT_NAMESPACE
from rackloom.lab.kube.faults import ApiCall, RequestFault
from rackloom.lab.scenario.controllers import CONTROLLER_LEASE, ControllerReplicas
from rackloom.lab.scenario.model import NotObserved, action, expectation, require
from rackloom.lab.scenario.parameters import Count, Number, Ordinal, Rate, Seconds
from rackloom.lab.scenario.stage import Stage

# The API server.


RACKLOOM_USERS = (CONTROLLER_LEASE, "rackloom-webhook", "compute-domain-daemon")
"""Rackloom's processes that watch, as they call themselves."""
_UPDATE_VERBS = ("replace", "apply", "patch")


@action(layer="cluster")
async def api_server_down(stage: Stage) -> str:
    """No request reaches the API server, and all watches end."""
    stage.cluster.kube.faults.add(RequestFault())
    stage.cluster.kube.store.hang_up()
    return "the API server cannot be reached"


@action(layer="cluster")
async def api_server_bad(
    stage: Stage, *, how: Literal["conflict", "loses-reply", "events-twice", "events-late"], rate: Rate
) -> str:
    """A part of our writes meet conflicts or lose answers, or of changes are heard twice or out of order."""
    kube, user = stage.cluster.kube, CONTROLLER_LEASE
    match how:
        case "conflict":
            for verb in _UPDATE_VERBS:
                kube.faults.add(RequestFault(rate=rate, verb=verb, user=user, code=409, reason="Conflict"))
        case "loses-reply":
            for verb in ("create", "delete", *_UPDATE_VERBS):
                kube.faults.add(RequestFault(rate=rate, verb=verb, user=user, lost="reply"))
        case "events-twice":
            kube.disordered_events.begin(RACKLOOM_USERS, twice=rate)
        case "events-late":
            kube.disordered_events.begin(RACKLOOM_USERS, late=rate)
    return f"{how}: {rate:.0%}"


@action(layer="cluster")
async def api_server_stale(stage: Stage) -> str:
    """Our processes are stuck with one that falls behind: watches are silent, but plain lists stay true."""
    kube = stage.cluster.kube
    kube.stale_reads.begin(kube.store, kube.schemas, RACKLOOM_USERS)
    return f"Rackloom's processes hear nothing that comes after version {kube.store.version}"


@action(layer="cluster", breaks=False)
async def api_server_good(stage: Stage) -> str:
    """Everything reaches it and is answered again. Fails if its faults have struck nothing."""
    struck = _end_api_faults(stage)
    require(struck, "nothing was struck by what was bad: the scenario shows nothing")
    return f"the API server answers; {struck} calls and changes were struck"


@action(layer="cluster")
async def watches_drop(stage: Stage) -> str:
    """All watches break. The API server still has the changes that come before they resume."""
    _break_watches(stage)
    return "all watches ended"


@action(layer="cluster")
async def watches_expire(stage: Stage) -> str:
    """All watches break, and the API server no longer has the changes since: 410 Gone."""
    stage.cluster.kube.store.compact()
    _break_watches(stage)
    return "all watches ended, and what was before is forgotten"


def _break_watches(stage: Stage) -> None:
    calls = stage.cluster.kube.calls
    stage.record("watches", {call: calls[call] for call in calls if call.user == CONTROLLER_LEASE})
    stage.cluster.kube.store.hang_up()


@expectation(layer="cluster")
async def watches_resumed(stage: Stage, *, relisted: bool = False) -> str:
    """The controllers' watches that a step broke have begun again. `relisted`: after a new list."""
    before: dict[ApiCall, int] = stage.previous("watches") or {}
    calls, verbs = stage.cluster.kube.calls, {"watch", "list"} if relisted else {"watch"}
    watched = {call.resource for call in before if call.verb == "watch"}
    due = [call for call in before if call.verb in verbs and call.resource in watched]
    require(due, "no step before broke a watch")
    late = sorted({f"{call.verb} {call.resource}" for call in due if calls[call] == before[call]})
    require(not late, f"not begun again: {', '.join(late)}")
    return f"{len(watched)} watches have begun again{' after a new list' if relisted else ''}"


def heal_api_server(stage: Stage) -> str:
    """End all faults of the API server."""
    _end_api_faults(stage)
    return "the API server answers"


def _end_api_faults(stage: Stage) -> int:
    """End the faults. Returns the number of calls and changes that they struck."""
    kube = stage.cluster.kube
    struck = kube.faults.hits + kube.stale_reads.hits + kube.disordered_events.hits
    kube.faults.clear()
    kube.stale_reads.end()
    kube.disordered_events.end()
    return struck


# Controllers without an election.


@action(layer="cluster", needs="single process")
async def controllers_killed(stage: Stage, *, down: Seconds = 1.0) -> str:
    """Rackloom's controllers are killed where they stand. Others begin after `down` seconds."""
    await stage.cluster.controllers.kill(down)
    return f"Rackloom's controllers ended, and others begin after {down:g} s"


@action(layer="cluster", needs="single process")
async def controllers_die(stage: Stage, *, point: Ordinal, lives: Ordinal = 1) -> str:
    """So many `lives` of Rackloom's controllers end at their `point`-th step: before a write, or after it."""
    stage.cluster.controllers.die(point, lives)
    return f"{lives} lives of the controllers will end, each at its step {point}"


@expectation(layer="cluster", needs="single process")
async def controllers_ended(stage: Stage, *, count: Count) -> str:
    """So many lives of Rackloom's controllers have ended."""
    return require(
        stage.cluster.controllers.ended == count,
        f"{stage.cluster.controllers.ended} lives of the controllers have ended",
    )


@action(layer="cluster", needs="single process")
async def controllers_doubled(stage: Stage) -> str:
    """Others begin beside Rackloom's controllers, as when a leader wakes up that was thought dead."""
    stage.cluster.controllers.double()
    return "other controllers work beside the first"


@action(layer="cluster", needs="single process")
async def controllers_single(stage: Stage) -> str:
    """The others end."""
    await stage.cluster.controllers.single()
    return "the other controllers ended"


@action(layer="cluster")
async def controllers_clock_set(stage: Stage, *, by: Number) -> str:
    """The clock of the controllers' machine is set forwards, or backwards."""
    stage.cluster.clock.skew += by
    return f"the clock of the controllers' machine is {stage.cluster.clock.skew:+g} s"


async def heal_controllers(stage: Stage) -> str:
    """One is left, knows the time, and reaches the API server."""
    stage.cluster.clock.skew = 0.0
    if stage.candidates is not None:
        stage.candidates.connect()
    await stage.cluster.controllers.single()
    return "one controller is at work"


# Elected controllers.


@action(layer="cluster", needs="election")
async def leader_killed(stage: Stage, *, down: Seconds = 60.0) -> str:
    """The elected one of Rackloom's controllers is killed where it stands and keeps the Lease.

    `down` seconds later it stands for election again.
    """
    leading = _named(await _elected(stage).kill_leader(down))
    return f"{leading}, which led, ended; it stands for election again after {down:g} s"


@action(layer="cluster", needs="election")
async def leader_cut_off(stage: Stage) -> str:
    """The leader and the API server no longer reach each other. The other replica still reaches that."""
    return f"{_named(_elected(stage).cut_off_leader())}, which led, is cut off from the API server"


@action(layer="cluster", needs="election")
async def leader_connected(stage: Stage) -> str:
    """A replica that was cut off reaches the API server again."""
    _elected(stage).connect()
    return "all replicas reach the API server"


@expectation(layer="cluster", needs="election")
async def leader(stage: Stage, *, changed: bool = False) -> str:
    """The Lease names the leader, and there never were two. `changed`: not that of the last such step."""
    require_one_leader(stage)
    leading, before = _named(_elected(stage).leader), stage.previous("leader")
    lease = await stage.cluster.api.get(LEASE, CONTROLLER_LEASE, DEFAULT_NAMESPACE)
    named = lease["spec"].get("holderIdentity")
    require(leading == named, f"{leading} leads, the Lease names {named}")
    is_new = before is not None and leading != before
    require(is_new or not changed, f"{leading} still leads" if before else "no step before saw who led")
    stage.record("leader", leading)
    return f"{leading} leads, as the Lease says" + (f"; before, {before} did" if changed else "")


def require_one_leader(stage: Stage) -> None:
    """Raise `NotObserved` if two elected controllers were ever at work at once."""
    if stage.candidates is not None and stage.candidates.overlaps:
        raise NotObserved(stage.candidates.overlaps[0])


def _elected(stage: Stage) -> ControllerReplicas:
    assert stage.candidates is not None  # noqa: S101 (else no such step is read)
    return stage.candidates


def _named(leading: str | None) -> str:
    require(leading, "nobody leads")
    return str(leading)
