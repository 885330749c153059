"""A healthy site has no finding. Each fault gives exactly one, with both sides and a command."""

import shlex

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.diagnosis import cluster_faults, fabric_faults
from tests.core.diagnosis.fabric_faults import two_tenants, unreachable
from tests.core.diagnosis.healthy import NOW, domain, healthy, machine, node, serial, with_changed
from tests.core.diagnosis.ward import WELL

from rackloom.cli.main import app
from rackloom.core.cluster.domain_objects import ComputeDomainStatus
from rackloom.core.cluster.objects import Condition
from rackloom.core.diagnosis.catalogue import SITE_CHECKS, Check
from rackloom.core.diagnosis.checks.fabric import AWAY_SECONDS
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import CheckState, Severity
from rackloom.core.diagnosis.snapshot import Layer, LostPartition, SilentController

FAULTS = fabric_faults.FAULTS | cluster_faults.FAULTS


def test_a_healthy_site_gives_no_finding():
    assert examine(healthy(racks=3)) == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_finding_with_both_sides_and_a_command(fault):
    break_it, check, subject = FAULTS[fault]
    found = examine(break_it(WELL))
    assert [finding.check for finding in found] == [check], found
    (finding,) = found
    assert subject in finding.subject
    assert finding.state is not CheckState.HOLDS
    assert finding.evidence
    assert finding.message
    assert finding.fix.split()[0] in ("rackloom", "kubectl"), finding.fix


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fix_of_our_own_is_a_command_that_can_be_pasted(fault):
    (finding,) = examine(FAULTS[fault][0](WELL))
    words = shlex.split(finding.fix, comments=True)
    if words[0] == "rackloom":
        app.parse_args(words[1:], print_error=False, exit_on_error=False)


def test_every_check_has_a_fault_that_shows_it():
    assert {check for _, check, _ in FAULTS.values()} | {Check.LAYER} == set(SITE_CHECKS)


def test_an_issuer_without_keys_is_unknown_and_names_no_part():
    lost = msgspec.structs.replace(WELL, issuers={"https://dex": "keys were read never: it is down"})
    (found,) = examine(lost)
    assert (found.check, found.state) == (Check.LAYER, CheckState.UNKNOWN)
    assert (found.title, found.where) == ("Issuer https://dex cannot be read", ())


def test_nodes_of_a_cluster_that_cannot_be_read_are_named():
    lost = with_changed(
        WELL, "layers", lambda layer: layer.layer is Layer.CLUSTER, unknown_since=NOW - 9, problem="away"
    )
    (found,) = examine(lost)
    assert (found.check, found.since) == (Check.LAYER, NOW - 9)
    assert set(found.where) == {f"node {record.name}" for record in WELL.nodes}


def test_a_link_of_which_its_driver_says_nothing_is_not_down():
    (found,) = examine(FAULTS["nic-untold"][0](WELL))
    assert found.state is CheckState.UNKNOWN


def test_one_controller_of_two_is_less_bad_than_none():
    found = [examine(FAULTS[name][0](WELL))[0] for name in ("one-controller-of-two-gone", "controller-gone")]
    assert [finding.severity for finding in found] == [Severity.WARNING, Severity.ERROR]


def test_a_controller_that_may_come_back_is_not_given_up():
    (url,) = WELL.domains[0].endpoints
    silent = (SilentController(url, NOW - AWAY_SECONDS + 1, (serial(0),)),)
    away = with_changed(unreachable(WELL), "domains", lambda record: record.uuid == domain(0), silent=silent)
    assert [finding.check for finding in examine(away)] == [Check.CONTROLLER]


@pytest.mark.parametrize(
    ("limit", "used", "state"),
    [
        (1024, 921, None),  # 103 are free: a tenth
        (1024, 922, CheckState.FAILS),
        (1024, 1024, CheckState.FAILS),
        (1024, 1030, CheckState.FAILS),
        (1024, None, CheckState.UNKNOWN),
        (None, None, None),
    ],
)
def test_multicast_groups_run_out_when_less_than_a_tenth_is_free(limit, used, state):
    def shown(snapshot, **more):
        changed = {"multicast_limit": limit, "multicast_used": used, **more}
        return examine(with_changed(snapshot, "domains", lambda d: d.uuid == domain(0), **changed))

    found = [finding for finding in shown(WELL) if finding.check == Check.MULTICAST]
    assert [finding.state for finding in found] == [state] * (state is not None)
    # A lost reading is no evidence of the present.
    lost = shown(WELL, unknown_since=NOW - 400)
    assert Check.MULTICAST not in {finding.check for finding in lost}


def test_the_factory_partition_is_the_cause_when_it_has_all_multicast_groups():
    full = with_changed(
        FAULTS["default-still-there"][0](WELL),
        "domains",
        lambda d: d.uuid == domain(0),
        multicast_limit=1024,
        multicast_used=1024,
    )
    (found,) = examine(full)
    assert found.check == Check.DEFAULT_GONE
    assert found.consequences == (f"{Check.MULTICAST}: domain {domain(0)}",)
    factory = msgspec.structs.replace(
        full, partitions=tuple(partition for partition in full.partitions if partition.default)
    )
    checks = {finding.check for finding in examine(factory)}
    assert Check.MULTICAST not in checks, "alone in its domain it keeps no groups from others"


def test_tenants_that_share_memory_are_the_worst():
    found = examine(
        with_changed(
            unreachable(two_tenants(WELL)), "domains", lambda d: d.uuid == domain(0), unknown_since=None
        )
    )
    assert found[0].severity is Severity.CRITICAL
    assert "org-0 and org-1" in found[0].message


def test_a_lost_partition_concerns_the_machines_of_its_domain_alone():
    """A logical partition may span domains, and a machine in another domain waits for another reason."""
    spanning = with_changed(WELL, "instance_gpus", lambda record: record.logical == "lp-1", logical="lp-0")
    lost = LostPartition(domain=domain(0), name="old", logical="lp-0", seen_at=NOW - 600)
    (found,) = (
        finding
        for finding in examine(msgspec.structs.replace(spanning, lost_partitions=(lost,)))
        if finding.check == Check.PARTITION_THERE
    )
    assert f"machine {machine(0, 0)}" in found.where
    assert f"machine {machine(1, 0)}" not in found.where


SEEN_ANYWAY = (
    Check.CONTROLLER_AWAY,
    Check.DOMAIN_PAUSED,
    Check.LOGICAL_SPREAD,
    Check.TRANSFER,
)
"""These rest on our records, which stay certain when other layers are silent."""


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=3, unique=True))
def test_layers_that_cannot_be_read_never_fail(faults):
    """Facts that were once seen may no longer hold."""
    snapshot = WELL
    for fault in faults:
        try:
            snapshot = FAULTS[fault][0](snapshot)
        except (AssertionError, ValueError):
            continue  # The fault needs a record that another one took away.
    silent = with_changed(
        snapshot, "domains", lambda record: True, unknown_since=NOW - 60, problem="no answer"
    )
    lost = [
        msgspec.structs.replace(layer, unknown_since=NOW) if layer.layer is Layer.CLUSTER else layer
        for layer in silent.layers
    ]
    found = examine(msgspec.structs.replace(silent, layers=tuple(lost)))
    assert {finding.check for finding in found} >= {Check.LAYER, Check.CONTROLLER}
    assert all(finding.state is CheckState.UNKNOWN for finding in found if finding.check not in SEEN_ANYWAY)


def test_a_logical_partition_in_two_domains_says_both_with_what_is_there():
    (found,) = examine(FAULTS["logical-partition-spread"][0](WELL))
    assert (found.severity, found.since) == (Severity.WARNING, NOW - 60)
    assert found.evidence == (
        f"records: 4 instances in domain {domain(0)}, on m-0-0, m-0-1, m-0-2 and 1 more",
        f"records: 1 instance in domain {domain(1)}, on m-1-0",
    )


def test_it_is_so_since_the_second_domain_got_its_first():
    spread = FAULTS["logical-partition-spread"][0](WELL)
    (found,) = examine(with_changed(spread, "machines", lambda record: True, held_since=NOW - 300))
    assert found.since == NOW - 300
    unsaid = with_changed(spread, "machines", lambda record: record.domain == domain(0), held_since=None)
    assert [finding.since for finding in examine(unsaid)] == [None]


def test_a_label_by_hand_hides_no_pod_that_is_in_another_rack():
    astray = FAULTS["pod-in-another-rack"][0](WELL)
    found = examine(
        with_changed(astray, "nodes", lambda record: record.name == node(0, 0), clique="c1u57e7-0.32766")
    )
    assert [finding.check for finding in found] == [Check.CLIQUE_LABEL, Check.ONE_CLIQUE]


def test_a_mesh_of_which_nobody_was_heard_is_unknown():
    unheard = msgspec.structs.replace(WELL, meshes=(), daemons_in="rackloom-sytem")
    found = examine(unheard)
    assert [(finding.check, finding.state) for finding in found] == [(Check.MESH, CheckState.UNKNOWN)] * 2
    assert "in namespace rackloom-sytem" in found[0].message


def test_daemons_of_a_warm_clique_are_heard_of_for_all_who_use_it():
    warm = with_changed(WELL, "meshes", lambda record: True, domain="kept-warm")
    assert examine(warm) == ()


def test_where_hosts_run_imex_nobody_here_hears_of_daemons():
    reported = Condition(type="Ready", status="Unknown", reason="HostManaged", message="hosts run it")
    status = ComputeDomainStatus(conditions=(reported,))
    by_host = with_changed(WELL, "compute_domains", lambda record: True, status=status)
    found = examine(msgspec.structs.replace(by_host, meshes=()))
    assert {finding.check for finding in found} == {Check.ACTIVE}


def test_a_dark_rack_of_tenants_comes_before_a_nic():
    dark = examine(FAULTS["transfer-slow"][0](FAULTS["controller-unreachable"][0](WELL)))
    assert [finding.check for finding in dark] == [Check.CONTROLLER, Check.TRANSFER]
    assert "records: instances in it: 4" in dark[0].evidence


def test_a_layer_that_was_not_asked_adds_nothing():
    layers = tuple(layer for layer in WELL.layers if layer.layer is not Layer.CLUSTER)
    alone = msgspec.structs.replace(
        WELL, layers=layers, nodes=(), devices=(), pools=(), uses=(), pods=(), claims=(), meshes=()
    )
    assert examine(msgspec.structs.replace(alone, compute_domains=(), templates=())) == ()


def test_a_machine_without_a_controller_is_told_the_option_that_exists():
    alone = with_changed(healthy(), "machines", lambda record: record.id == machine(0, 0), domain="")
    fixes = [finding.fix for finding in examine(alone) if finding.check == Check.MACHINE_PRESENT]
    assert fixes == [
        f"rackloom admin endpoint create --chassis-serial {serial(0)} --endpoint https://SWITCH-CONTROLLER:9370"
    ]


def test_a_name_from_the_fabric_is_one_word_of_the_fix():
    name = "x; reboot"
    foreign = with_changed(
        healthy(), "partitions", lambda record: record.domain == domain(0), owner="foreign", name=name
    )
    fixes = [finding.fix for finding in examine(foreign) if finding.check == Check.PARTITION_OWNED]
    assert name in shlex.split(fixes[0])


def test_a_device_that_is_not_ready_follows_from_its_node() -> None:
    (found,) = examine(cluster_faults.nic_not_attached(cluster_faults.node_down(WELL)))
    assert found.check == Check.NODE_READY
    assert f"{Check.PREPARED}: ResourceClaim team-0/rails" in found.consequences
