"""Whether the nodes of a ComputeDomain share memory with each other: they must be in one clique."""

import msgspec
import pytest
from tests.claim.cluster.one_domain import UID, settle, started, status_of

from rackloom.core.cluster.domain_objects import ComputeDomainClique, ObjectRef, Readiness, clique_json
from rackloom.core.cluster.names import ImexIsolation, ImexMode
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, NODE, POD, RESOURCE_CLAIM
from rackloom.core.domains.clique import join_clique, with_daemon_status

ONE, OTHER = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1", "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.2"
MESHED = '{"complete": true, "peers": 1}'


def comes(world, make, settings, name, clique_id, label=""):
    """A node of a clique has a channel of the ComputeDomain, and a READY daemon."""
    world.put(NODE, make.node(name, UID, clique=label or clique_id))
    pod = world.put(POD, make.pod(name, UID, clique=clique_id, mesh=MESHED))
    ref = ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"])
    value = ComputeDomainClique(compute_domain=UID, clique_id=clique_id)
    value = join_clique(value, node=name, ip_address=pod["status"]["podIP"], pod=ref, max_nodes=18)
    value = with_daemon_status(value, node=name, ip_address=pod["status"]["podIP"], status=Readiness.READY)
    world.put(COMPUTE_DOMAIN_CLIQUE, clique_json(value, settings.daemon_namespace))


def spans(world):
    found = status_of(world).condition("SpansCliques")
    return None if found is None else (found.status, found.reason, found.message)


@pytest.fixture
def world(make, settings):
    world = make.world()
    started(world, make, settings)
    return world


def test_nothing_is_said_without_nodes(make, settings):
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    settle(world, settings, make)
    assert spans(world) is None


def test_in_one_clique_all_is_well(world):
    assert spans(world) == ("False", "OneClique", f"all nodes are in clique {ONE}")


def test_a_node_of_another_clique_is_told_though_all_are_ready_and_meshed(world, make, settings):
    for name in ("n0", "n1"):
        world.put(POD, make.pod(name, UID, mesh=MESHED))
    comes(world, make, settings, "n2", OTHER)
    notices = settle(world, settings, make)
    status = status_of(world)
    assert [status.condition(type_).status for type_ in ("Ready", "Meshed")] == ["True", "True"]
    state, reason, message = spans(world)
    assert (state, reason) == ("True", "SeveralCliques")
    assert f"{ONE} (n0, n1); {OTHER} (n2), by IMEX daemons" in message
    assert [notice.reason for notice in notices if notice.warning] == ["SeveralCliques"]
    world.put(NODE, make.node("n2"))
    assert not [notice for notice in settle(world, settings, make) if notice.warning]
    assert spans(world)[0] == "False", "the pod of the other clique has gone"


def test_a_fabric_that_is_partitioned_anew_under_the_job_is_told_by_the_labels(world, make, settings):
    """The daemons entered the nodes' earlier cliques, and do not know of the change."""
    world.put(NODE, make.node("n1", UID, clique=OTHER))
    settle(world, settings, make)
    state, _, message = spans(world)
    assert state == "True"
    assert f"{ONE} (n0); {OTHER} (n1), by node labels" in message


def test_a_node_that_only_its_label_knows_counts_too(world, make, settings):
    world.put(NODE, make.node("n1", UID, clique=None))
    world.put(NODE, make.node("n2", UID, clique=OTHER))
    world.put(NODE, make.node("n0", UID, clique=None))
    settle(world, settings, make)
    assert spans(world)[2].endswith("by daemons and labels")


def test_a_pod_is_counted_where_it_was_sent_before_its_channel_is_prepared(world, make, settings):
    world.put(NODE, make.node("n2", clique=OTHER))
    claim = make.claim(UID, name="c2", pods=("p",), device=("n2", "channel-0"))
    world.put(RESOURCE_CLAIM, claim)
    settle(world, settings, make)
    assert f"{OTHER} (n2)" in spans(world)[2]


def test_unknown_while_the_clique_of_a_node_is(world, make, settings):
    world.put(NODE, make.node("n2", UID, clique=None))
    settle(world, settings, make)
    assert spans(world) == ("Unknown", "CliqueUnknown", "no clique is known of n2")


@pytest.mark.parametrize("others", [False, True])
def test_nodes_without_a_fabric_share_with_nobody(make, settings, others):
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    for name in ("n0", "n1"):
        world.put(NODE, make.node(name, UID, clique=None))
        world.put(POD, make.pod(name, UID, clique=""))
    if others:
        comes(world, make, settings, "n2", ONE)
    settle(world, settings, make)
    expected = ("True", "SeveralCliques") if others else ("False", "NoFabric")
    assert spans(world)[:2] == expected
    assert not others or "(no fabric) (n0, n1)" in spans(world)[2]


def test_the_message_is_bounded(world, make, settings):
    for number in range(40):
        comes(world, make, settings, f"m{number:02}{number % 10}", f"{OTHER}{number:02}")
    settle(world, settings, make)
    assert "and 33 more cliques" in spans(world)[2]
    assert len(spans(world)[2]) < 600


def test_where_the_host_runs_imex_the_nodes_are_those_of_the_pods(make, settings):
    host = msgspec.structs.replace(settings, imex_mode=ImexMode.HOST_MANAGED)
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    for name, clique_id in (("n0", ONE), ("n1", OTHER)):
        world.put(NODE, make.node(name, clique=clique_id))
        world.put(RESOURCE_CLAIM, make.claim(UID, name=name, pods=(name,), device=(name, "channel-0")))
    settle(world, host, make)
    assert spans(world)[:2] == ("True", "SeveralCliques")


def test_a_channel_of_a_clique_cannot_span_two(make, settings):
    channel = msgspec.structs.replace(settings, isolation=ImexIsolation.CHANNEL)
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    world.put(NODE, make.node("n0"))
    settle(world, channel, make)
    assert spans(world) is None
