"""Which code carries out which step of a scenario."""

from rackloom.claim.kube.api import KubeError
from rackloom.twin.scenario import cluster_values as cluster
from rackloom.twin.scenario import values
from rackloom.twin.scenario.breaking import Breaking
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.cluster_hands import ClusterHands
from rackloom.twin.scenario.cluster_looking import ClusterLooking
from rackloom.twin.scenario.controller_hands import ControllerHands
from rackloom.twin.scenario.ground import Ground
from rackloom.twin.scenario.looking import Looking
from rackloom.twin.scenario.player import Do
from rackloom.twin.scenario.server_hands import ServerHands
from rackloom.twin.scenario.stage import NotSeen, Site
from rackloom.twin.scenario.tenants import Tenants
from rackloom.twin.scenario.values import Step


def carve_hands(site: Site) -> dict[type[Step], Do]:
    """The hands and eyes for every step that needs no cluster."""
    tenants = Tenants(site)
    ground = Ground(site.switches, tenants.holder)
    breaking = Breaking(site, ground, tenants)
    return {**_asking(tenants), **_breaking(site, breaking), **_looking(Looking(site, ground, tenants))}


def _asking(tenants: Tenants) -> dict[type[Step], Do]:
    async def partition(step: values.MakeLogicalPartition) -> str:
        return f"logical partition {await tenants.make_partition(step.tenant, step.name)}"

    async def vpc(step: values.MakeVpc) -> str:
        return f"VPC {await tenants.make_vpc(step.tenant, step.name, step.logical_partition)}"

    async def instances(step: values.MakeInstances) -> str:
        made = await tenants.make_instances(step)
        return f"{len(made)} instances acknowledged, on {', '.join(one.machine for one in made)}"

    async def interfaces(step: values.SetInterfaces) -> str:
        await tenants.wire(tenants.instance(step.instance), step.logical_partitions)
        return f"{step.instance} is to have {', '.join(name or 'none' for name in step.logical_partitions)}"

    async def release(step: values.ReleaseInstances) -> str:
        await tenants.release(step.group)
        return f"{len(tenants.groups[step.group])} instances are to go"

    return {
        values.MakeLogicalPartition: partition,
        values.MakeVpc: vpc,
        values.MakeInstances: instances,
        values.SetInterfaces: interfaces,
        values.ReleaseInstances: release,
    }


def _breaking(site: Site, breaking: Breaking) -> dict[type[Step], Do]:
    async def spoil(step: values.NetworkBad) -> str:
        site.spoil(step.rack - 1, step)
        return f"the network before rack {step.rack}: {step.how}"

    async def kill(step: values.ServiceKilled) -> str:
        await site.kill(step.down)
        return f"the service ended, and was started again after {step.down:g} s"

    async def kill_at(step: values.ServiceDies) -> str:
        site.kill_at(step.point)
        return f"the service will end at its write or call number {step.point} from here"

    async def set_clock(step: values.ClockSet) -> str:
        site.set_clock(step.by)
        return f"the machine's clock is {step.by:+g} s"

    async def heal(_: values.Heal) -> str:
        return await breaking.heal()

    async def end(_: values.End) -> str:
        return await breaking.end()

    return {
        values.SwitchStops: breaking.stop_switch,
        values.SwitchAnswers: breaking.start_switch,
        values.SwitchRestarts: breaking.restart_switch,
        values.SwitchClaimsDomain: breaking.claim_domain,
        values.SwitchMistreats: breaking.mistreat,
        values.SwitchHides: breaking.hide,
        values.TrayPulled: breaking.pull_tray,
        values.TrayReturned: breaking.return_tray,
        values.GpuHealthChanges: breaking.change_health,
        values.PartitionByHand: breaking.make_by_hand,
        values.PartitionGone: breaking.delete_partition,
        values.HandLetsGo: breaking.let_go,
        values.ListReadByHand: breaking.read_list,
        values.ListWrittenByHand: breaking.write_list,
        values.SwitchTrayOut: breaking.take_switch_tray,
        values.SwitchTrayBack: breaking.return_switch_tray,
        values.NetworkBad: spoil,
        values.ServiceKilled: kill,
        values.ServiceDies: kill_at,
        values.ClockSet: set_clock,
        values.Heal: heal,
        values.End: end,
    }


def _looking(eyes: Looking) -> dict[type[Step], Do]:
    return {
        values.ExpectInstances: eyes.instances,
        values.ExpectReleased: eyes.released,
        values.ExpectInterface: eyes.interface,
        values.ExpectLogicalPartition: eyes.partition,
        values.ExpectDomain: eyes.domain,
        values.ExpectReadAgain: eyes.read_again,
        values.ExpectTogether: eyes.together,
        values.ExpectAlone: eyes.alone,
        values.ExpectPartitions: eyes.partitions,
        values.ExpectUntouched: eyes.untouched,
        values.ExpectInvariants: eyes.invariants,
        values.ExpectFinding: eyes.finding,
        values.ExpectNoFinding: eyes.no_finding,
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
        values.Heal: heal,
    }
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


def _seen_of(eyes: ClusterLooking) -> dict[type[Step], Do]:
    return {
        cluster.ExpectImexMesh: eyes.imex_mesh,
        cluster.ExpectGpus: eyes.gpus,
        cluster.ExpectObject: eyes.object,
        cluster.ExpectGone: eyes.gone,
        cluster.ExpectPods: eyes.pods,
        cluster.ExpectOneClique: eyes.one_clique,
        cluster.ExpectCliqueLabel: eyes.clique_label,
        cluster.ExpectNode: eyes.node,
        cluster.ExpectDevices: eyes.devices,
    }


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
