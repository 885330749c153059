"""One ComputeDomain in a world of objects: decided and carried out until nothing is left to do."""

from rackloom.claim.cluster.observe import snapshot
from rackloom.claim.cluster.reconcile import reconcile
from rackloom.claim.domain.membership import join, with_status
from rackloom.claim.domain.objects import Clique, Readiness, Ref, clique_json, read_status
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, NODE, POD

UID = "cd-1"


def settle(world, settings, make, uid=UID, rounds=10):
    """Decide and carry out until nothing is left; returns all notices."""
    told = []
    for _ in range(rounds):
        decision = reconcile(snapshot(world, uid, settings, make.now), settings)
        if not decision.actions and decision.status is None:
            return told
        told += decision.notices
        world.carry_out(decision, uid)
    raise AssertionError(f"not settled: {decision}")


def status_of(world, name="job"):
    return read_status(world.at(COMPUTE_DOMAIN, "team", name))


def started(world, make, settings, nodes=("n0", "n1"), ready=True):
    """A ComputeDomain whose daemons run on some nodes."""
    world.put(COMPUTE_DOMAIN, make.domain())
    settle(world, settings, make)
    members = Clique(compute_domain=UID, clique_id=make.clique)
    for name in nodes:
        world.put(NODE, make.node(name, UID))
        pod = world.put(POD, make.pod(name, UID, ready=ready))
        ref = Ref(pod["metadata"]["name"], pod["metadata"]["uid"])
        address = pod["status"]["podIP"]
        members = join(members, node=name, ip_address=address, pod=ref, max_nodes=18)
        status = Readiness.READY if ready else Readiness.NOT_READY
        members = with_status(members, node=name, ip_address=address, status=status)
    world.put(COMPUTE_DOMAIN_CLIQUE, clique_json(members, settings.daemon_namespace))
    settle(world, settings, make)


def delete(world, name="job"):
    world.delete(COMPUTE_DOMAIN, world.at(COMPUTE_DOMAIN, "team", name))
