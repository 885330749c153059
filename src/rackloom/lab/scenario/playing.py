"""Playing a scenario: its steps in order of time, each with what was observed.

Each step type has a handler. A handler of an action does it and returns what happened; a handler of an
expectation looks once, changes nothing, and returns what it saw or raises `NotObserved`.
`site_handlers` and `cluster_handlers` hold the handlers of the two layers; a step that both know (heal,
invariants) is done by one after the other.

The player waits for a step's time, carries it out, and repeats an expectation until it holds or its
time is over. The last look begins after the deadline, so that a slow look is not missed. It stops at
the first step that does not come about. After the last step it checks that every fault that was asked
for has struck something.

`play_while_running` ends the play when the site under it ends. `render_step` and `render_summary` print
the transcript.
"""

import asyncio
import textwrap
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from rackloom.claim.kube.api import KubeError
from rackloom.errors import Refused
from rackloom.lab.scenario import (
    cluster_actions,
    cluster_expectations,
    control_plane,
    model,
    site_expectations,
    site_faults,
    stage,
    switch_leaders,
)
from rackloom.lab.scenario import tenants as scenario_tenants
from rackloom.lab.scenario.cluster_actions import NodeFaults
from rackloom.lab.scenario.cluster_expectations import ClusterProbes, GangProbes
from rackloom.lab.scenario.control_plane import ApiServerFaults, ControllerFaults, LeaderFaults
from rackloom.lab.scenario.model import Action, End, Expectation, NotObserved, Scenario, Speed, Step
from rackloom.lab.scenario.site_expectations import SiteProbes
from rackloom.lab.scenario.site_faults import SiteFaults
from rackloom.lab.scenario.stage import ClusterTruth, FabricTruth, SiteControl
from rackloom.lab.scenario.switch_leaders import LeaderMoves
from rackloom.lab.scenario.tenants import ScenarioTenants

# The player.


POLL_SECONDS: dict[Speed, float] = {"real": 0.05, "virtual": 0.5}
"""Seconds between two looks at the same thing."""

StepHandler = Callable[[Any], Awaitable[str]]
"""Carries out a step, or looks once; returns what was observed, or raises NotSeen."""


class PlayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step that was played. Times are seconds since the site first answered."""

    step: int
    began: float
    ended: float
    what: str
    ok: bool
    seen: str


class PlayedScenario(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario that was played; ok only if every step came about and every expectation was observed."""

    scenario: str
    title: str
    speed: Speed
    ok: bool
    expected: int
    """Expectations in the file."""
    observed: int
    """Of these, how many were seen."""
    lines: tuple[PlayedStep, ...]


async def play_steps(
    scenario: Scenario, speed: Speed, hands: dict[type[Step], StepHandler], tell: Callable[[PlayedStep], None]
) -> PlayedScenario:
    """Play every step with its hand, up to the first that does not come about.

    An end that does not come about (a fault that struck nothing) has a line of its own.
    """
    player = _Player(POLL_SECONDS[speed], hands)
    lines: list[PlayedStep] = []
    for number, step in enumerate(scenario.steps, 1):
        lines.append(await player.play(number, step))
        tell(lines[-1])
        if not lines[-1].ok:
            break
    else:
        end = await player.play(len(lines) + 1, End())
        if not end.ok:
            lines.append(end)
            tell(end)
    expected = sum(isinstance(step, Expectation) for step in scenario.steps)
    observed = sum(
        line.ok and isinstance(step, Expectation) for line, step in zip(lines, scenario.steps, strict=False)
    )
    return PlayedScenario(
        scenario=scenario.name,
        title=scenario.title,
        speed=speed,
        ok=len(lines) == len(scenario.steps) and all(line.ok for line in lines),
        expected=expected,
        observed=observed,
        lines=tuple(lines),
    )


async def play_while_running(
    work: "asyncio.Task[None]", playing: Coroutine[Any, Any, PlayedScenario]
) -> PlayedScenario:
    """Play beside what the site runs on. Raises what ends that: nothing is observed of a stage that fell."""
    task = asyncio.create_task(playing)
    await asyncio.wait((task, work), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        work.result()
        raise RuntimeError("what the scenario is played on has ended")
    return task.result()


class _Player:
    def __init__(self, look_again: float, hands: dict[type[Step], StepHandler]) -> None:
        self._look_again = look_again
        self._hands = hands
        self._start = asyncio.get_running_loop().time()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def play(self, number: int, step: Step) -> PlayedStep:
        if step.at is not None:
            await asyncio.sleep(max(0.0, step.at - self._now()))
        began = self._now()
        try:
            ok, seen = True, await self._come_about(step)
        except NotObserved as missing:
            ok, seen = False, str(missing)
        except Refused as refused:
            ok, seen = False, f"refused: {refused}"
        return PlayedStep(
            step=number,
            began=round(began, 3),
            ended=round(self._now(), 3),
            what=describe_step(step),
            ok=ok,
            seen=seen,
        )

    async def _come_about(self, step: Step) -> str:
        hand = self._hands[type(step)]
        if not isinstance(step, Expectation):
            return await hand(step)
        seen = await self._until(lambda: hand(step), self._now() + step.within)
        return await self._stays(lambda: hand(step), seen, step.stays) if step.stays else seen

    async def _until(self, look: Callable[[], Awaitable[str]], deadline: float) -> str:
        """Look until it is seen. The last look begins after the deadline: a slow one is not missed."""
        while True:
            late = self._now() >= deadline
            try:
                return await look()
            except NotObserved:
                if late:
                    raise
            await asyncio.sleep(self._look_again)

    async def _stays(self, look: Callable[[], Awaitable[str]], seen: str, seconds: float) -> str:
        until = self._now() + seconds
        while self._now() < until:
            await asyncio.sleep(self._look_again)
            try:
                seen = await look()
            except NotObserved as missing:
                raise NotObserved(f"it did not stay so for {seconds:g} s: {missing}") from missing
        return f"{seen}; for {seconds:g} s"


def describe_step(step: Step) -> str:
    """A step in one line: its kind, and what its file says of it."""
    if isinstance(step, End):
        return "the end"
    shown = msgspec.to_builtins(step)
    kind = shown.pop("do" if isinstance(step, Action) else "expect")
    unsaid = {field.encode_name: field.default for field in msgspec.structs.fields(step)}
    fields = [f"{key} {_one_line(value)}" for key, value in shown.items() if value != unsaid[key]]
    verb = "" if isinstance(step, Action) else "expect "
    return " ".join([f"{verb}{kind}", *fields])


def _one_line(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_one_line, value))
    first, *others = str(value).strip().splitlines() or [""]
    return f"{first}..." if others else first


# The transcript.


TRANSCRIPT_WIDTH = 110
_INDENT = " " * 17


def render_step(played: PlayedStep) -> str:
    """One step: when it began, how it went, what was seen."""
    mark = "ok    " if played.ok else "FAILED"
    seen = textwrap.fill(played.seen, TRANSCRIPT_WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return f"{played.began:8.1f}s {mark} {played.what}\n{seen}"


def render_summary(played: PlayedScenario) -> str:
    """What came of it all."""
    seconds = played.lines[-1].ended if played.lines else 0.0
    verdict = "as it must be" if played.ok else "NOT as it must be"
    return (
        f"{played.scenario}: {played.observed} of {played.expected} expectations observed"
        f" in {seconds:.1f} s of {played.speed} time: {verdict}"
    )


# Which code carries out which step type.


def site_handlers(site: SiteControl) -> dict[type[Step], StepHandler]:
    """The hands and eyes for every step that needs no cluster."""
    tenants = ScenarioTenants(site)
    ground = FabricTruth(site.switches, tenants.holder)
    breaking, leaders = SiteFaults(site, ground, tenants), LeaderMoves(site, ground)
    return {
        **_tenant_handlers(tenants),
        **_site_fault_handlers(site, breaking, leaders),
        **_site_probe_handlers(SiteProbes(site, ground, tenants)),
    }


def _tenant_handlers(tenants: ScenarioTenants) -> dict[type[Step], StepHandler]:
    async def partition(step: scenario_tenants.MakeLogicalPartition) -> str:
        return f"logical partition {await tenants.make_partition(step.tenant, step.name)}"

    async def vpc(step: scenario_tenants.MakeVpc) -> str:
        return f"VPC {await tenants.make_vpc(step.tenant, step.name, step.logical_partition)}"

    async def instances(step: scenario_tenants.MakeInstances) -> str:
        made = await tenants.make_instances(step)
        return f"{len(made)} instances acknowledged, on {', '.join(one.machine for one in made)}"

    async def interfaces(step: scenario_tenants.SetInterfaces) -> str:
        await tenants.wire(tenants.instance(step.instance), step.logical_partitions)
        return f"{step.instance} is to have {', '.join(name or 'none' for name in step.logical_partitions)}"

    async def release(step: scenario_tenants.ReleaseInstances) -> str:
        await tenants.release(step.group)
        return f"{len(tenants.groups[step.group])} instances are to go"

    return {
        scenario_tenants.MakeLogicalPartition: partition,
        scenario_tenants.MakeVpc: vpc,
        scenario_tenants.MakeInstances: instances,
        scenario_tenants.SetInterfaces: interfaces,
        scenario_tenants.ReleaseInstances: release,
    }


def _site_fault_handlers(
    site: SiteControl, breaking: SiteFaults, leaders: LeaderMoves
) -> dict[type[Step], StepHandler]:
    async def spoil(step: stage.NetworkBad) -> str:
        site.spoil(step.rack - 1, step)
        return f"the network before rack {step.rack}: {step.how}"

    async def kill(step: site_faults.ServiceKilled) -> str:
        await site.kill(step.down)
        return f"the service ended, and was started again after {step.down:g} s"

    async def kill_at(step: site_faults.ServiceDies) -> str:
        site.kill_at(step.point)
        return f"the service will end at its write or call number {step.point} from here"

    async def set_clock(step: site_faults.ClockSet) -> str:
        site.set_clock(step.by)
        return f"the machine's clock is {step.by:+g} s"

    async def move(step: switch_leaders.SwitchLeaderMoves) -> str:
        moved = await leaders.move(step)
        breaking.note_answers(step.rack)
        return moved

    async def heal(_: model.Heal) -> str:
        healed = await breaking.heal()
        await leaders.heal()
        return healed

    async def end(_: model.End) -> str:
        return await breaking.end()

    return {
        site_faults.SwitchStops: breaking.stop_switch,
        site_faults.SwitchAnswers: breaking.start_switch,
        site_faults.SwitchRestarts: breaking.restart_switch,
        site_faults.SwitchClaimsDomain: breaking.claim_domain,
        switch_leaders.SwitchLeaderMoves: move,
        switch_leaders.SwitchOldLeaderReturns: leaders.return_old,
        switch_leaders.SwitchOldLeaderYields: leaders.yield_old,
        switch_leaders.SwitchStandbyRegistered: leaders.register_standby,
        switch_leaders.SwitchLeaderRegistered: leaders.register_leader,
        site_faults.SwitchMistreats: breaking.mistreat,
        site_faults.SwitchHides: breaking.hide,
        site_faults.TrayPulled: breaking.pull_tray,
        site_faults.TrayReturned: breaking.return_tray,
        site_faults.TrayMoved: breaking.move_tray,
        site_faults.GpuHealthChanges: breaking.change_health,
        site_faults.PartitionByHand: breaking.make_by_hand,
        site_faults.PartitionGone: breaking.delete_partition,
        site_faults.HandLetsGo: breaking.let_go,
        site_faults.ListReadByHand: breaking.read_list,
        site_faults.ListWrittenByHand: breaking.write_list,
        site_faults.SwitchTrayOut: breaking.take_switch_tray,
        site_faults.SwitchTrayBack: breaking.return_switch_tray,
        stage.NetworkBad: spoil,
        site_faults.ServiceKilled: kill,
        site_faults.ServiceDies: kill_at,
        site_faults.ClockSet: set_clock,
        model.Heal: heal,
        model.End: end,
    }


def _site_probe_handlers(eyes: SiteProbes) -> dict[type[Step], StepHandler]:
    return {
        site_expectations.ExpectInstances: eyes.instances,
        site_expectations.ExpectReleased: eyes.released,
        site_expectations.ExpectInterface: eyes.interface,
        site_expectations.ExpectLogicalPartition: eyes.partition,
        site_expectations.ExpectDomain: eyes.domain,
        site_expectations.ExpectReadAgain: eyes.read_again,
        site_expectations.ExpectTogether: eyes.together,
        site_expectations.ExpectAlone: eyes.alone,
        site_expectations.ExpectPartitions: eyes.partitions,
        site_expectations.ExpectUntouched: eyes.untouched,
        site_expectations.ExpectInvariants: eyes.invariants,
        site_expectations.ExpectFinding: eyes.finding,
        site_expectations.ExpectNoFinding: eyes.no_finding,
    }


def cluster_handlers(ground: ClusterTruth) -> dict[type[Step], StepHandler]:
    """The hands and eyes for the steps that need a cluster."""
    nodes, server = NodeFaults(ground), ApiServerFaults(ground.kube)
    controllers = ControllerFaults(ground.stage)

    async def heal(_: model.Heal) -> str:
        return "; ".join([await server.heal(), await controllers.heal(), await nodes.heal()])

    found: dict[type[Step], StepHandler] = {
        **_node_handlers(nodes),
        **_api_server_handlers(server),
        **_controller_handlers(controllers),
        **_cluster_probe_handlers(ClusterProbes(ground)),
        **_gang_probe_handlers(GangProbes(ground)),
        model.Heal: heal,
    }
    if ground.stage.candidates is not None:
        found |= _leader_handlers(LeaderFaults(ground.stage.candidates, ground.api))
    return {kind: _errors_as_not_observed(do) for kind, do in found.items()}


def _node_handlers(hands: NodeFaults) -> dict[type[Step], StepHandler]:
    return {
        cluster_actions.Submit: hands.submit,
        cluster_actions.DeleteObject: hands.delete,
        cluster_actions.NodeLost: hands.lose_node,
        cluster_actions.NodeBack: hands.start_node,
        cluster_actions.NodeReboots: hands.reboot_node,
        cluster_actions.GpuLost: hands.lose_gpu,
        cluster_actions.GpuXid: hands.strike_gpu,
        cluster_actions.NicLinkDown: hands.cut_nic,
        cluster_actions.CliqueLabelByHand: hands.write_label,
        cluster_actions.CliqueLabelLags: hands.lag_label,
        cluster_actions.GpuFabricState: hands.set_state,
        cluster_actions.ImexDaemonKilled: hands.kill_daemon,
        cluster_actions.ImexAddressesSwapped: hands.swap_addresses,
    }


def _api_server_handlers(hands: ApiServerFaults) -> dict[type[Step], StepHandler]:
    return {
        control_plane.ApiServerDown: hands.down,
        control_plane.ApiServerBad: hands.bad,
        control_plane.ApiServerStale: hands.stale,
        control_plane.ApiServerGood: hands.good,
        control_plane.WatchesDrop: hands.drop_watches,
        control_plane.WatchesExpire: hands.expire_watches,
    }


def _controller_handlers(hands: ControllerFaults) -> dict[type[Step], StepHandler]:
    return {
        control_plane.ControllersKilled: hands.kill,
        control_plane.ControllersDie: hands.die,
        control_plane.ControllersDoubled: hands.double,
        control_plane.ControllersSingle: hands.single,
        control_plane.ControllersClockSet: hands.set_clock,
        control_plane.ExpectControllersEnded: hands.ended,
    }


def _leader_handlers(hands: LeaderFaults) -> dict[type[Step], StepHandler]:
    return {
        control_plane.LeaderKilled: hands.kill,
        control_plane.LeaderCutOff: hands.cut_off,
        control_plane.LeaderConnected: hands.connect,
        control_plane.ExpectLeader: hands.leader,
        site_expectations.ExpectInvariants: hands.one_at_a_time,
        model.End: hands.one_at_a_time,
    }


def _cluster_probe_handlers(eyes: ClusterProbes) -> dict[type[Step], StepHandler]:
    return {
        cluster_expectations.ExpectImexMesh: eyes.imex_mesh,
        cluster_expectations.ExpectGpus: eyes.gpus,
        cluster_expectations.ExpectObject: eyes.object,
        cluster_expectations.ExpectCondition: eyes.condition,
        cluster_expectations.ExpectGone: eyes.gone,
        cluster_expectations.ExpectPods: eyes.pods,
        cluster_expectations.ExpectOneClique: eyes.one_clique,
        cluster_expectations.ExpectCliqueLabel: eyes.clique_label,
        cluster_expectations.ExpectNode: eyes.node,
        cluster_expectations.ExpectDevices: eyes.devices,
    }


def _gang_probe_handlers(eyes: GangProbes) -> dict[type[Step], StepHandler]:
    return {cluster_expectations.ExpectGang: eyes.gang, cluster_expectations.ExpectReserved: eyes.reserved}


def combine_handlers(
    first: dict[type[Step], StepHandler], second: dict[type[Step], StepHandler]
) -> dict[type[Step], StepHandler]:
    """The hands of two layers; what both know is done by one after the other."""
    shared = {kind: _one_after_other(first[kind], second[kind]) for kind in first.keys() & second.keys()}
    return {**first, **second, **shared}


def _one_after_other(first: StepHandler, second: StepHandler) -> StepHandler:
    async def do(step: Step) -> str:
        return f"{await first(step)}; {await second(step)}"

    return do


def _errors_as_not_observed(do: StepHandler) -> StepHandler:
    async def ask(step: Step) -> str:
        try:
            return await do(step)
        except KubeError as error:
            raise NotObserved(f"the API server says {error.code} {error.reason}: {error.message}") from error

    return ask
