"""One ComputeDomain in a world of objects: decided and carried out until nothing is left to do."""

from rackloom.core.cluster.domain_objects import (
    ComputeDomainClique,
    ObjectRef,
    Readiness,
    clique_json,
    read_compute_domain_status,
)
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, NODE, POD
from rackloom.core.domains.clique import join_clique, with_daemon_status
from rackloom.core.domains.observe import take_domain_snapshot
from rackloom.core.domains.reconcile import reconcile_domain

UID = "cd-1"


def settle(world, settings, make, uid=UID, rounds=10):
    """Decide and carry out until nothing is left. Returns all notices."""
    notices = []
    for _ in range(rounds):
        decision = reconcile_domain(take_domain_snapshot(world, uid, settings, make.now))
        if not decision.actions and decision.status is None:
            return notices
        notices += decision.notices
        world.carry_out(decision, uid)
    raise AssertionError(f"not settled: {decision}")


def status_of(world, name="job"):
    return read_compute_domain_status(world.at(COMPUTE_DOMAIN, "team", name))


def started(world, make, settings, nodes=("n0", "n1"), ready=True):
    """A ComputeDomain whose daemons run on some nodes."""
    world.put(COMPUTE_DOMAIN, make.domain())
    settle(world, settings, make)
    members = ComputeDomainClique(compute_domain=UID, clique_id=make.clique)
    for name in nodes:
        world.put(NODE, make.node(name, UID))
        pod = world.put(POD, make.pod(name, UID, ready=ready))
        ref = ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"])
        address = pod["status"]["podIP"]
        members = join_clique(members, node=name, ip_address=address, pod=ref, max_nodes=18)
        status = Readiness.READY if ready else Readiness.NOT_READY
        members = with_daemon_status(members, node=name, ip_address=address, status=status)
    world.put(COMPUTE_DOMAIN_CLIQUE, clique_json(members, settings.daemon_namespace))
    settle(world, settings, make)


def delete(world, name="job"):
    world.delete(COMPUTE_DOMAIN, world.at(COMPUTE_DOMAIN, "team", name))
