"""The acceptance export claims only facts that the snapshot shows."""

import msgspec
import pytest
from tests.core.diagnosis.healthy import NOW, domain, healthy, node, with_changed, without

from rackloom.core.cluster.domain_objects import ComputeDomainStatus
from rackloom.core.cluster.objects import Condition
from rackloom.core.diagnosis import examination
from rackloom.core.diagnosis.acceptance import AcceptanceOutcome, acceptance
from rackloom.core.diagnosis.catalogue import EXPLAINS, Check
from rackloom.core.diagnosis.findings import fails
from rackloom.core.diagnosis.snapshot import Layer, SiteSnapshot

WELL = healthy(racks=2, trays=3)
DECIDED = ("CNP03-01", "SDN13", "SDN15", "SDN16", "SDN21", "SDN25", "SDN26", "SDN27", "K8S24")


def outcomes(snapshot):
    return {result.id: result.outcome for result in acceptance(snapshot).results}


def test_a_healthy_site_passes_what_looking_decides_and_claims_nothing_else():
    found = outcomes(WELL)
    assert {id_ for id_, outcome in found.items() if outcome is AcceptanceOutcome.PASS} == set(DECIDED)
    assert {outcome for id_, outcome in found.items() if id_ not in DECIDED} == {AcceptanceOutcome.NOT_RUN}


def test_every_node_says_its_domain():
    assert {(node.node, node.nvlink_domain_id) for node in acceptance(WELL).nodes} == {
        (node(rack, tray), domain(rack)) for rack in range(2) for tray in range(3)
    }


def test_nothing_seen_passes_nothing():
    assert AcceptanceOutcome.PASS not in outcomes(SiteSnapshot(at=NOW, layers=())).values()


def test_emulated_links_are_no_bandwidth():
    assert (
        outcomes(with_changed(WELL, "transfers", lambda record: True, emulated=True))["SDN26"]
        is AcceptanceOutcome.NOT_RUN
    )


def test_a_simulated_site_passes_nothing_and_still_fails():
    simulated = msgspec.structs.replace(WELL, simulated=(Layer.CLUSTER,))
    reported = acceptance(simulated)
    assert (reported.simulated, acceptance(WELL).simulated) == (True, False)
    assert {result.outcome for result in reported.results} == {AcceptanceOutcome.NOT_RUN}
    (clean,) = (result for result in reported.results if result.id == "SDN27")
    assert clean.evidence[0] == "simulated: cluster"
    assert outcomes(FAILING["SDN21"](simulated))["SDN21"] is AcceptanceOutcome.FAIL


FAILING = {
    "SDN15": lambda snapshot: with_changed(
        snapshot, "instance_gpus", lambda gpu: gpu.machine == "m-0-1", status="Pending", since=NOW - 900
    ),
    "SDN16": lambda snapshot: msgspec.structs.replace(
        with_changed(
            snapshot, "fabric_gpus", lambda gpu: gpu.tray_index == 1 and gpu.domain == domain(0), partition=9
        ),
        partitions=(*snapshot.partitions, msgspec.structs.replace(snapshot.partitions[0], id=9, name="rl-9")),
    ),
    "SDN21": lambda snapshot: with_changed(
        snapshot, "meshes", lambda mesh: mesh.node == node(0, 1), complete=False
    ),
    "SDN25": lambda snapshot: without(snapshot, "meshes", lambda mesh: mesh.node == node(0, 1)),
    "SDN26": lambda snapshot: with_changed(
        snapshot, "transfers", lambda seen: seen.node == node(0, 1), verdict="fails", reason="short"
    ),
    "K8S24": lambda snapshot: with_changed(
        snapshot, "fabric_gpus", lambda gpu: gpu.tray_index == 1 and gpu.domain == domain(0), partition=9
    ),
    "SDN27": lambda snapshot: without(snapshot, "nodes", lambda seen: seen.name == node(0, 1)),
}


@pytest.mark.parametrize("test", FAILING)
def test_a_fault_fails_its_test(test):
    assert outcomes(FAILING[test](WELL))[test] is AcceptanceOutcome.FAIL


def without_power(snapshot, at):
    return with_changed(
        snapshot, "nodes", lambda record: record.name == at, ready=None, ready_since=NOW - 600
    )


def test_where_a_node_is_silent_no_daemon_of_it_counts():
    """The last report of its daemon is still in the cluster."""
    silent = outcomes(without_power(WELL, node(0, 1)))
    assert (silent["SDN21"], silent["SDN25"]) == (AcceptanceOutcome.UNKNOWN, AcceptanceOutcome.UNKNOWN)
    down = with_changed(WELL, "nodes", lambda record: record.name == node(0, 1), ready=False)
    assert (outcomes(down)["SDN21"], outcomes(down)["SDN25"]) == (
        AcceptanceOutcome.FAIL,
        AcceptanceOutcome.FAIL,
    )


def test_a_domain_that_is_not_ready_has_no_full_matrix():
    reported = Condition(type="Ready", status="False", reason="NodesNotReady", message="host-98 is not ready")
    status = ComputeDomainStatus(conditions=(reported,))
    found = outcomes(
        with_changed(WELL, "compute_domains", lambda record: record.uid == "uid-0", status=status)
    )
    assert (found["SDN21"], found["SDN25"]) == (AcceptanceOutcome.FAIL, AcceptanceOutcome.FAIL)


def test_a_node_that_serves_no_domain_is_judged_by_neither():
    idle = without(WELL, "meshes", lambda record: record.node == node(1, 2))
    idle = without(idle, "pods", lambda record: record.node == node(1, 2))
    found = outcomes(without_power(idle, node(1, 2)))
    assert (found["SDN21"], found["SDN25"]) == (AcceptanceOutcome.PASS, AcceptanceOutcome.PASS)


def test_where_no_daemon_was_read_nobody_knows_of_daemons():
    found = outcomes(msgspec.structs.replace(WELL, meshes=(), daemons_in="rackloom-sytem"))
    assert (found["SDN21"], found["SDN25"]) == (AcceptanceOutcome.UNKNOWN, AcceptanceOutcome.UNKNOWN)


def test_a_silent_controller_leaves_its_tests_unknown():
    silent = with_changed(WELL, "domains", lambda record: True, unknown_since=NOW - 60, problem="no answer")
    found = outcomes(silent)
    assert {found[id_] for id_ in ("CNP03-01", "SDN13", "SDN15", "SDN16", "K8S24")} == {
        AcceptanceOutcome.UNKNOWN
    }


def test_gpus_in_no_partition_at_all_are_not_on_the_same_nvlink():
    assert (
        outcomes(with_changed(WELL, "fabric_gpus", lambda gpu: True, partition=None))["K8S24"]
        is AcceptanceOutcome.FAIL
    )


@pytest.mark.parametrize(
    "less",
    [
        {"layers": tuple(layer for layer in WELL.layers if layer.layer is not Layer.FABRIC)},
        {"layers": tuple(layer for layer in WELL.layers if layer.layer is not Layer.CLUSTER)},
        {"domains": (), "fabric_gpus": (), "partitions": ()},
        {"nodes": (), "pools": (), "devices": (), "uses": (), "claims": (), "pods": ()},
    ],
)
def test_where_nothing_was_seen_nothing_is_clean(less):
    assert outcomes(msgspec.structs.replace(WELL, **less))["SDN27"] is not AcceptanceOutcome.PASS


JUDGED = {
    Check.INTERFACE: ("CNP03-01", "SDN15"),
    Check.PARTITION_THERE: ("CNP03-01", "SDN13"),
    Check.MESH: ("SDN21",),
    Check.DEVICE_THERE: ("SDN27",),
    Check.TRANSFER: ("SDN26",),
}


@pytest.mark.parametrize("cause", EXPLAINS)
def test_what_is_only_a_consequence_still_fails_its_tests(cause, monkeypatch):
    """The page lists it under its cause, but the buyer of the site requires the thing itself."""
    effects = sorted(EXPLAINS[cause])
    found = [fails(effect, "it", "is broken", "mend it", where=("here",)) for effect in (cause, *effects)]
    monkeypatch.setattr(examination, "check_across", lambda *_: found)
    assert len(examination.examine(WELL)) == 1
    reported = outcomes(WELL)
    expected = {id_ for effect in effects for id_ in JUDGED.get(effect, ())}
    assert expected <= {id_ for id_, outcome in reported.items() if outcome is AcceptanceOutcome.FAIL}
