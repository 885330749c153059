"""Which code carries out which step of a scenario."""

from rackloom.claim.kube.api import KubeError
from rackloom.twin.scenario import cluster_values as cluster
from rackloom.twin.scenario import values
from rackloom.twin.scenario.breaking import Breaking
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.cluster_hands import ClusterHands, Kill
from rackloom.twin.scenario.cluster_looking import ClusterLooking
from rackloom.twin.scenario.ground import Ground
from rackloom.twin.scenario.looking import Looking
from rackloom.twin.scenario.player import Do
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
        values.NetworkBad: spoil,
        values.ServiceKilled: kill,
        values.ServiceDies: kill_at,
        values.ClockSet: set_clock,
        values.Heal: heal,
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


def cluster_hands(ground: ClusterGround, kill_controllers: Kill) -> dict[type[Step], Do]:
    """The hands and eyes for the steps that need a cluster."""
    hands, eyes = ClusterHands(ground, kill_controllers), ClusterLooking(ground)

    async def heal(_: values.Heal) -> str:
        return await hands.heal()

    found: dict[type[Step], Do] = {
        cluster.Submit: hands.submit,
        cluster.DeleteObject: hands.delete,
        cluster.NodeLost: hands.lose_node,
        cluster.NodeBack: hands.start_node,
        cluster.NodeReboots: hands.reboot_node,
        cluster.GpuLost: hands.lose_gpu,
        cluster.GpuXid: hands.strike_gpu,
        cluster.NicLinkDown: hands.cut_nic,
        cluster.CliqueLabelByHand: hands.write_label,
        cluster.ImexDaemonKilled: hands.kill_daemon,
        cluster.ApiServerDown: hands.server_down,
        cluster.ApiServerBad: hands.server_bad,
        cluster.ApiServerGood: hands.server_good,
        cluster.WatchesExpire: hands.expire_watches,
        cluster.ControllersKilled: hands.kill_controllers,
        cluster.ExpectObject: eyes.object,
        cluster.ExpectGone: eyes.gone,
        cluster.ExpectPods: eyes.pods,
        cluster.ExpectOneClique: eyes.one_clique,
        cluster.ExpectCliqueLabel: eyes.clique_label,
        cluster.ExpectNode: eyes.node,
        cluster.ExpectDevices: eyes.devices,
        values.Heal: heal,
    }
    return {kind: _answered(do) for kind, do in found.items()}


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
