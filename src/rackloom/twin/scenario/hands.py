"""Which code carries out which step of a scenario."""

from rackloom.claim.kube.api import KubeError
from rackloom.twin.scenario import cluster_values as cluster
from rackloom.twin.scenario import site_actions as actions
from rackloom.twin.scenario import site_expectations as expectations
from rackloom.twin.scenario import values
from rackloom.twin.scenario.breaking import Breaking
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.cluster_hands import ClusterHands
from rackloom.twin.scenario.cluster_looking import ClusterLooking
from rackloom.twin.scenario.controller_hands import ControllerHands
from rackloom.twin.scenario.gang_looking import GangLooking
from rackloom.twin.scenario.ground import Ground
from rackloom.twin.scenario.leader_hands import LeaderHands
from rackloom.twin.scenario.looking import Looking
from rackloom.twin.scenario.player import Do
from rackloom.twin.scenario.server_hands import ServerHands
from rackloom.twin.scenario.stage import NotSeen, Site
from rackloom.twin.scenario.switch_leaders import SwitchLeaders
from rackloom.twin.scenario.tenants import Tenants
from rackloom.twin.scenario.values import Step


def carve_hands(site: Site) -> dict[type[Step], Do]:
    """The hands and eyes for every step that needs no cluster."""
    tenants = Tenants(site)
    ground = Ground(site.switches, tenants.holder)
    breaking, leaders = Breaking(site, ground, tenants), SwitchLeaders(site, ground)
    return {
        **_asking(tenants),
        **_breaking(site, breaking, leaders),
        **_looking(Looking(site, ground, tenants)),
    }


def _asking(tenants: Tenants) -> dict[type[Step], Do]:
    async def partition(step: actions.MakeLogicalPartition) -> str:
        return f"logical partition {await tenants.make_partition(step.tenant, step.name)}"

    async def vpc(step: actions.MakeVpc) -> str:
        return f"VPC {await tenants.make_vpc(step.tenant, step.name, step.logical_partition)}"

    async def instances(step: actions.MakeInstances) -> str:
        made = await tenants.make_instances(step)
        return f"{len(made)} instances acknowledged, on {', '.join(one.machine for one in made)}"

    async def interfaces(step: actions.SetInterfaces) -> str:
        await tenants.wire(tenants.instance(step.instance), step.logical_partitions)
        return f"{step.instance} is to have {', '.join(name or 'none' for name in step.logical_partitions)}"

    async def release(step: actions.ReleaseInstances) -> str:
        await tenants.release(step.group)
        return f"{len(tenants.groups[step.group])} instances are to go"

    return {
        actions.MakeLogicalPartition: partition,
        actions.MakeVpc: vpc,
        actions.MakeInstances: instances,
        actions.SetInterfaces: interfaces,
        actions.ReleaseInstances: release,
    }


def _breaking(site: Site, breaking: Breaking, leaders: SwitchLeaders) -> dict[type[Step], Do]:
    async def spoil(step: actions.NetworkBad) -> str:
        site.spoil(step.rack - 1, step)
        return f"the network before rack {step.rack}: {step.how}"

    async def kill(step: actions.ServiceKilled) -> str:
        await site.kill(step.down)
        return f"the service ended, and was started again after {step.down:g} s"

    async def kill_at(step: actions.ServiceDies) -> str:
        site.kill_at(step.point)
        return f"the service will end at its write or call number {step.point} from here"

    async def set_clock(step: actions.ClockSet) -> str:
        site.set_clock(step.by)
        return f"the machine's clock is {step.by:+g} s"

    async def move(step: actions.SwitchLeaderMoves) -> str:
        moved = await leaders.move(step)
        breaking.note_answers(step.rack)
        return moved

    async def heal(_: values.Heal) -> str:
        healed = await breaking.heal()
        await leaders.heal()
        return healed

    async def end(_: values.End) -> str:
        return await breaking.end()

    return {
        actions.SwitchStops: breaking.stop_switch,
        actions.SwitchAnswers: breaking.start_switch,
        actions.SwitchRestarts: breaking.restart_switch,
        actions.SwitchClaimsDomain: breaking.claim_domain,
        actions.SwitchLeaderMoves: move,
        actions.SwitchOldLeaderReturns: leaders.return_old,
        actions.SwitchOldLeaderYields: leaders.yield_old,
        actions.SwitchStandbyRegistered: leaders.register_standby,
        actions.SwitchLeaderRegistered: leaders.register_leader,
        actions.SwitchMistreats: breaking.mistreat,
        actions.SwitchHides: breaking.hide,
        actions.TrayPulled: breaking.pull_tray,
        actions.TrayReturned: breaking.return_tray,
        actions.TrayMoved: breaking.move_tray,
        actions.GpuHealthChanges: breaking.change_health,
        actions.PartitionByHand: breaking.make_by_hand,
        actions.PartitionGone: breaking.delete_partition,
        actions.HandLetsGo: breaking.let_go,
        actions.ListReadByHand: breaking.read_list,
        actions.ListWrittenByHand: breaking.write_list,
        actions.SwitchTrayOut: breaking.take_switch_tray,
        actions.SwitchTrayBack: breaking.return_switch_tray,
        actions.NetworkBad: spoil,
        actions.ServiceKilled: kill,
        actions.ServiceDies: kill_at,
        actions.ClockSet: set_clock,
        values.Heal: heal,
        values.End: end,
    }


def _looking(eyes: Looking) -> dict[type[Step], Do]:
    return {
        expectations.ExpectInstances: eyes.instances,
        expectations.ExpectReleased: eyes.released,
        expectations.ExpectInterface: eyes.interface,
        expectations.ExpectLogicalPartition: eyes.partition,
        expectations.ExpectDomain: eyes.domain,
        expectations.ExpectReadAgain: eyes.read_again,
        expectations.ExpectTogether: eyes.together,
        expectations.ExpectAlone: eyes.alone,
        expectations.ExpectPartitions: eyes.partitions,
        expectations.ExpectUntouched: eyes.untouched,
        expectations.ExpectInvariants: eyes.invariants,
        expectations.ExpectFinding: eyes.finding,
        expectations.ExpectNoFinding: eyes.no_finding,
    }


def cluster_hands(ground: ClusterGround) -> dict[type[Step], Do]:
    """The hands and eyes for the steps that need a cluster."""
    nodes, server = ClusterHands(ground), ServerHands(ground.kube)
    controllers = ControllerHands(ground.stage)

    async def heal(_: values.Heal) -> str:
        return "; ".join([await server.heal(), await controllers.heal(), await nodes.heal()])

    found: dict[type[Step], Do] = {
        **_of_nodes(nodes),
        **_of_the_server(server),
        **_of_controllers(controllers),
        **_seen_of(ClusterLooking(ground)),
        **_seen_of_gangs(GangLooking(ground)),
        values.Heal: heal,
    }
    if ground.stage.candidates is not None:
        found |= _of_the_leader(LeaderHands(ground.stage.candidates, ground.api))
    return {kind: _answered(do) for kind, do in found.items()}


def _of_nodes(hands: ClusterHands) -> dict[type[Step], Do]:
    return {
        cluster.Submit: hands.submit,
        cluster.DeleteObject: hands.delete,
        cluster.NodeLost: hands.lose_node,
        cluster.NodeBack: hands.start_node,
        cluster.NodeReboots: hands.reboot_node,
        cluster.GpuLost: hands.lose_gpu,
        cluster.GpuXid: hands.strike_gpu,
        cluster.NicLinkDown: hands.cut_nic,
        cluster.CliqueLabelByHand: hands.write_label,
        cluster.CliqueLabelLags: hands.lag_label,
        cluster.FabricState: hands.set_state,
        cluster.ImexDaemonKilled: hands.kill_daemon,
        cluster.ImexAddressesSwapped: hands.swap_addresses,
    }


def _of_the_server(hands: ServerHands) -> dict[type[Step], Do]:
    return {
        cluster.ApiServerDown: hands.down,
        cluster.ApiServerBad: hands.bad,
        cluster.ApiServerStale: hands.stale,
        cluster.ApiServerGood: hands.good,
        cluster.WatchesDrop: hands.drop_watches,
        cluster.WatchesExpire: hands.expire_watches,
    }


def _of_controllers(hands: ControllerHands) -> dict[type[Step], Do]:
    return {
        cluster.ControllersKilled: hands.kill,
        cluster.ControllersDie: hands.die,
        cluster.ControllersDoubled: hands.double,
        cluster.ControllersSingle: hands.single,
        cluster.ControllersClockSet: hands.set_clock,
        cluster.ExpectControllersEnded: hands.ended,
    }


def _of_the_leader(hands: LeaderHands) -> dict[type[Step], Do]:
    return {
        cluster.LeaderKilled: hands.kill,
        cluster.LeaderCutOff: hands.cut_off,
        cluster.LeaderConnected: hands.connect,
        cluster.ExpectLeader: hands.leader,
        expectations.ExpectInvariants: hands.one_at_a_time,
        values.End: hands.one_at_a_time,
    }


def _seen_of(eyes: ClusterLooking) -> dict[type[Step], Do]:
    return {
        cluster.ExpectImexMesh: eyes.imex_mesh,
        cluster.ExpectGpus: eyes.gpus,
        cluster.ExpectObject: eyes.object,
        cluster.ExpectCondition: eyes.condition,
        cluster.ExpectGone: eyes.gone,
        cluster.ExpectPods: eyes.pods,
        cluster.ExpectOneClique: eyes.one_clique,
        cluster.ExpectCliqueLabel: eyes.clique_label,
        cluster.ExpectNode: eyes.node,
        cluster.ExpectDevices: eyes.devices,
    }


def _seen_of_gangs(eyes: GangLooking) -> dict[type[Step], Do]:
    return {cluster.ExpectGang: eyes.gang, cluster.ExpectReserved: eyes.reserved}


def both(first: dict[type[Step], Do], second: dict[type[Step], Do]) -> dict[type[Step], Do]:
    """The hands of two layers; what both know is done by one after the other."""
    shared = {kind: _in_turn(first[kind], second[kind]) for kind in first.keys() & second.keys()}
    return {**first, **second, **shared}


def _in_turn(first: Do, second: Do) -> Do:
    async def do(step: Step) -> str:
        return f"{await first(step)}; {await second(step)}"

    return do


def _answered(do: Do) -> Do:
    async def ask(step: Step) -> str:
        try:
            return await do(step)
        except KubeError as error:
            raise NotSeen(f"the API server says {error.code} {error.reason}: {error.message}") from error

    return ask
