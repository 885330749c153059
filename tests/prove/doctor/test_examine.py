"""A healthy site gives no finding, and each fault of one its own, alone, with both sides and a command."""

import shlex
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prove.picture.healthy import (
    NOW,
    clique,
    domain,
    guid,
    healthy,
    machine,
    node,
    pci,
    serial,
    slot,
    with_changed,
    without,
)

from rackloom.claim.domain.names import GPU_DRIVER, IMEX_DRIVER
from rackloom.claim.domain.objects import Condition, Status
from rackloom.cli.main import app
from rackloom.prove.doctor import names
from rackloom.prove.doctor.examine import examine
from rackloom.prove.doctor.findings import Severity, State
from rackloom.prove.picture.values import Layer, LostPartition, PartitionSeen, PoolSeen
from rackloom.topology.facts import Fact, Source

WELL = healthy(racks=2, trays=4)
TRAY = 1
NODE = node(0, TRAY)
MACHINE = machine(0, TRAY)


def replaced(picture, **fields):
    return msgspec.structs.replace(picture, **fields)


def of_tray(one):
    return one.place.chassis_serial == serial(0) and one.place.slot == slot(TRAY)


def is_module(number):
    return lambda one: of_tray(one) and one.place.module_id == number


def of_node(one):
    return one.name == NODE


def unreachable(picture):
    return with_changed(
        picture,
        "domains",
        lambda one: one.uuid == domain(0),
        unknown_since=NOW - 400,
        problem="GetGpuInfoList: DEADLINE_EXCEEDED",
    )


def split(picture):
    """What NICo allows per GPU; the label goes."""
    other = PartitionSeen(
        domain=domain(0), id=8, name="rl-x", healthy=True, logical="lp-x", default=False, owner="site"
    )
    moved = with_changed(picture, "fabric_gpus", is_module(4), partition=8)
    wished = with_changed(
        moved,
        "instance_gpus",
        lambda one: one.machine == MACHINE and one.module_id == 4,
        logical="lp-x",
    )
    lost = with_changed(wished, "nodes", of_node, clique=None)
    extra = msgspec.structs.replace(picture.logicals[0], id="lp-x", name="other")
    return replaced(lost, partitions=(*picture.partitions, other), logicals=(*picture.logicals, extra))


def swapped(picture):
    """A new tray in the old slot: fabric and records know it, the node's slices are of the old one."""
    new = picture
    for module in range(1, 5):
        new = with_changed(new, "fabric_gpus", is_module(module), guid=0xFFFF_0000 + module)
    keys = tuple(
        msgspec.structs.replace(key, fabric_guid=Fact(0xFFFF_0001 + index, Source.NMX))
        for index, key in enumerate(next(one for one in picture.machines if one.id == MACHINE).gpus)
    )
    return with_changed(new, "machines", lambda one: one.id == MACHINE, gpus=keys)


def partition_lost(picture):
    gone = without(picture, "partitions", lambda one: one.domain == domain(0))
    free = with_changed(gone, "fabric_gpus", lambda one: one.domain == domain(0), partition=None)
    pending = with_changed(
        free,
        "instance_gpus",
        lambda one: one.logical == "lp-0",
        status="Pending",
        problem="the GPU is in no partition yet",
        since=NOW - 600,
    )
    lost = LostPartition(domain=domain(0), name="rl-0", logical="lp-0", seen_at=NOW - 600)
    unlabelled = with_changed(pending, "nodes", lambda one: one.clique == clique(0), clique=None)
    devices = with_changed(unlabelled, "devices", lambda one: one.clique == clique(0), clique=None)
    return replaced(devices, lost_partitions=(lost,))


def foreign(picture, **changes):
    return PartitionSeen(domain=domain(0), id=9, name="by-hand", healthy=True, owner="foreign", **changes)


def taken_by_hand(picture):
    moved = with_changed(picture, "fabric_gpus", of_tray, partition=9)
    pending = with_changed(
        moved,
        "instance_gpus",
        lambda one: one.machine == MACHINE,
        status="Pending",
        problem="the GPU is still in partition by-hand",
        since=NOW - 600,
    )
    relabelled = with_changed(pending, "nodes", of_node, clique=f"{clique(0).rpartition('.')[0]}.9")
    devices = with_changed(
        relabelled,
        "devices",
        lambda one: one.node == NODE and one.clique,
        clique=f"{clique(0).rpartition('.')[0]}.9",
    )
    return replaced(devices, partitions=(*picture.partitions, foreign(picture)))


def two_tenants(picture):
    return with_changed(picture, "machines", lambda one: one.id == MACHINE, tenant="tenant-1")


def condition(picture, reason, status="False"):
    told = Condition(
        type="Ready",
        status=status,
        reason=reason,
        message="3 of 4 nodes are ready",
        last_transition_time="2027-01-15T07:00:00Z",
    )
    return with_changed(
        picture, "compute_domains", lambda one: one.uid == "uid-0", status=Status(conditions=(told,))
    )


def mesh_broken(picture):
    broken = with_changed(
        picture, "meshes", lambda one: one.node == NODE, complete=False, missing=("0 -> 1: INVALID",)
    )
    return condition(broken, "TooFewNodes")


def node_lost(picture):
    lost = with_changed(picture, "nodes", of_node, ready=None, ready_since=NOW - 60)
    silent = with_changed(lost, "meshes", lambda one: one.node == NODE, complete=None)
    return condition(silent, "NotAllReady", status="Unknown")


def node_down(picture):
    lost = with_changed(picture, "nodes", of_node, ready=False, ready_since=NOW - 60)
    return condition(lost, "NotAllReady")


def plugin_dead(picture):
    gone = without(picture, "pools", lambda one: one.driver == GPU_DRIVER and one.node == NODE)
    return without(gone, "devices", lambda one: one.driver == GPU_DRIVER and one.node == NODE)


def node_deleted(picture):
    extra = PoolSeen(driver=IMEX_DRIVER, name="host-gone", node="host-gone")
    return replaced(picture, pools=(*picture.pools, extra))


def sick(picture):
    ill = with_changed(picture, "fabric_gpus", is_module(2), healthy=False, problem="NO_NVLINK")
    worse = with_changed(
        ill, "partitions", lambda one: one.domain == domain(0), healthy=False, problem="DEGRADED"
    )
    tainted = ("gpu.nvidia.com/fabric=unhealthy:NoSchedule",)
    return with_changed(
        worse, "devices", lambda one: one.node == NODE and one.name == "gpu-1", taints=tainted
    )


def tray_out(picture):
    gone = without(picture, "fabric_gpus", of_tray)
    away = with_changed(gone, "machines", lambda one: one.id == MACHINE, missing_since=NOW - 30)
    return with_changed(
        away,
        "instance_gpus",
        lambda one: one.machine == MACHINE,
        status="Pending",
        problem="the switch controller does not report this GPU",
        since=NOW - 600,
    )


def slow_transfer(picture):
    return with_changed(
        picture,
        "transfers",
        lambda one: one.node == NODE,
        verdict="fails",
        reason="27.5 GB/s of 50 (misalignment)",
        gigabytes_per_second=27.5,
    )


def nic_down(picture):
    """Its transfer was slow for that reason."""
    down = with_changed(
        picture, "devices", lambda one: one.node == NODE and one.partner == pci(1), link="down"
    )
    return slow_transfer(down)


def is_nic(module):
    return lambda one: one.kind == "nic" and one.node == NODE and one.partner == pci(module)


def crossed_nics(picture):
    """The pod of one tray has the NIC of a GPU that somebody else has."""
    pod = f"team-0/worker-{TRAY}"
    mine = [one for one in picture.uses if pod in one.pods and one.driver not in (GPU_DRIVER, "dra.net")]
    gpu = [one for one in picture.uses if pod in one.pods and one.device == "gpu-0"]
    nic = [one for one in picture.uses if pod in one.pods and one.device == "pci-0013-03-00-0"]
    others = [one for one in picture.uses if pod not in one.pods]
    return replaced(picture, uses=(*others, *mine, *gpu, *nic))


FAULTS = {
    "controller-unreachable": (unreachable, names.CONTROLLER, domain(0)),
    "paused": (
        lambda one: with_changed(one, "domains", lambda d: d.uuid == domain(0), paused=True),
        names.DOMAIN_PAUSED,
        domain(0),
    ),
    "gpu-sick": (sick, names.GPU_HEALTH, MACHINE),
    "tray-out": (tray_out, names.MACHINE_PRESENT, MACHINE),
    "partition-sick": (
        lambda one: with_changed(one, "partitions", lambda p: p.domain == domain(1), healthy=False),
        names.PARTITION_HEALTH,
        "rl-1",
    ),
    "two-tenants": (two_tenants, names.ISOLATION, "rl-0"),
    "gpu-twice": (
        lambda one: with_changed(one, "fabric_gpus", is_module(1), also=(12,)),
        names.ONE_PARTITION,
        f"{guid(0, TRAY, 1):016x}",
    ),
    "partition-lost": (partition_lost, names.PARTITION_THERE, "rl-0"),
    "partition-foreign": (
        lambda one: replaced(one, partitions=(*one.partitions, foreign(one))),
        names.PARTITION_OWNED,
        "by-hand",
    ),
    "taken-by-hand": (taken_by_hand, names.PARTITION_OWNED, "by-hand"),
    "default-still-there": (
        lambda one: replaced(
            one,
            partitions=(
                *one.partitions,
                PartitionSeen(
                    domain=domain(0), id=32766, name="Default", healthy=True, default=True, owner="default"
                ),
            ),
        ),
        names.DEFAULT_GONE,
        "Default",
    ),
    "not-joined": (
        lambda one: with_changed(
            one,
            "instance_gpus",
            lambda gpu: gpu.machine == MACHINE,
            status="Pending",
            problem="the partition limit is reached",
            since=NOW - 600,
        ),
        names.INTERFACE,
        f"i-0-{TRAY}",
    ),
    "moved-behind-our-back": (
        lambda one: with_changed(one, "fabric_gpus", of_tray, partition=None),
        names.INTERFACE,
        f"i-0-{TRAY}",
    ),
    "unmapped": (
        lambda one: with_changed(
            one,
            "machines",
            lambda m: m.id == MACHINE,
            gpus=tuple(msgspec.structs.replace(key, fabric_guid=None) for key in one.machines[TRAY].gpus),
        ),
        names.MAPPING,
        MACHINE,
    ),
    "tray-swapped": (swapped, names.IDENTITY, serial(0)),
    "tray-split": (split, names.SPLIT, NODE),
    "one-gpu-out": (
        lambda one: with_changed(one, "fabric_gpus", is_module(4), partition=None),
        names.INTERFACE,
        f"i-0-{TRAY}",
    ),
    "one-gpu-taken-by-hand": (
        lambda one: replaced(
            with_changed(one, "fabric_gpus", is_module(4), partition=9),
            partitions=(*one.partitions, foreign(one)),
        ),
        names.PARTITION_OWNED,
        "by-hand",
    ),
    "label-missing": (
        lambda one: with_changed(one, "nodes", of_node, clique=None),
        names.CLIQUE_LABEL,
        NODE,
    ),
    "label-stale": (
        lambda one: with_changed(one, "nodes", of_node, clique="c1u57e7-0.32766"),
        names.CLIQUE_LABEL,
        NODE,
    ),
    "label-of-another-rack": (
        lambda one: with_changed(one, "nodes", of_node, clique=clique(1)),
        names.CLIQUE_LABEL,
        NODE,
    ),
    "second-writer": (
        lambda one: with_changed(one, "nodes", of_node, other_writers=("rackloom-clique-label",)),
        names.CLIQUE_WRITER,
        NODE,
    ),
    "node-silent": (node_lost, names.NODE_READY, NODE),
    "node-down": (node_down, names.NODE_READY, NODE),
    "plugin-dead": (plugin_dead, names.NODE_PUBLISHES, NODE),
    "slice-of-gone-node": (node_deleted, names.SLICE_OF_NODE, "host-gone"),
    "device-tainted": (
        lambda one: with_changed(
            one,
            "devices",
            lambda d: d.node == NODE and d.name == "gpu-0",
            taints=("gpu.nvidia.com/xid=79:NoSchedule",),
        ),
        names.DEVICE_TAINT,
        NODE,
    ),
    "device-withdrawn": (
        lambda one: without(one, "devices", lambda d: d.node == NODE and d.name == "gpu-3"),
        names.DEVICE_THERE,
        f"worker-{TRAY}-devices",
    ),
    "claim-pending": (
        lambda one: with_changed(
            one,
            "claims",
            lambda c: c.name == f"worker-{TRAY}-devices" and c.domain == "uid-0",
            allocated=False,
        ),
        names.CLAIMS,
        f"worker-{TRAY}",
    ),
    "template-misspelt": (
        lambda one: with_changed(
            one, "pods", lambda p: p.uid == f"pod-0-{TRAY}", templates={"devices": "chanel"}, claims={}
        ),
        names.TEMPLATES,
        f"worker-{TRAY}",
    ),
    "domain-not-ready": (lambda one: condition(one, "TooFewNodes"), names.ACTIVE, "team-0/job"),
    "mesh-broken": (mesh_broken, names.MESH, "team-0/job"),
    "nic-down": (nic_down, names.NIC_LINK, NODE),
    "nic-slow": (
        lambda one: with_changed(one, "devices", is_nic(2), gbps=200),
        names.NIC_LINK,
        NODE,
    ),
    "nic-far": (lambda one: with_changed(one, "devices", is_nic(1), numa=1), names.NIC_ALIGNED, NODE),
    "nic-crossed": (crossed_nics, names.NIC_ALIGNED, f"worker-{TRAY}"),
    "transfer-slow": (slow_transfer, names.TRANSFER, NODE),
}


def test_a_healthy_site_gives_no_finding():
    assert examine(healthy(racks=3)) == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_finding_with_both_sides_and_a_command(fault):
    break_it, check, subject = FAULTS[fault]
    found = examine(break_it(WELL))
    assert [one.check for one in found] == [check], found
    (finding,) = found
    assert subject in finding.subject
    assert finding.state is not State.HOLDS
    assert finding.evidence
    assert finding.message
    assert finding.fix.split()[0] in ("rackloom", "kubectl"), finding.fix


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fix_of_our_own_is_a_command_that_can_be_pasted(fault):
    (finding,) = examine(FAULTS[fault][0](WELL))
    words = shlex.split(finding.fix, comments=True)
    if words[0] == "rackloom":
        app.parse_args(words[1:], print_error=False, exit_on_error=False)


def test_tenants_that_share_memory_are_the_worst():
    found = examine(
        with_changed(
            unreachable(two_tenants(WELL)), "domains", lambda d: d.uuid == domain(0), unknown_since=None
        )
    )
    assert found[0].severity is Severity.CRITICAL
    assert "org-0 and org-1" in found[0].message


SEEN_ANYWAY = (names.DOMAIN_PAUSED, names.TRANSFER)
"""These rest on records of our own, which no silence of others makes doubtful."""


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=3, unique=True))
def test_layers_that_cannot_be_read_never_fail(faults):
    """Nobody knows whether what was once seen is still so."""
    picture = WELL
    for fault in faults:
        try:
            picture = FAULTS[fault][0](picture)
        except AssertionError:
            continue  # The fault needs what another one took away.
    silent = with_changed(picture, "domains", lambda one: True, unknown_since=NOW - 60, problem="no answer")
    lost = [
        msgspec.structs.replace(one, unknown_since=NOW) if one.layer is Layer.CLUSTER else one
        for one in silent.layers
    ]
    found = examine(replaced(silent, layers=tuple(lost)))
    assert {one.check for one in found} >= {names.LAYER, names.CONTROLLER}
    assert all(one.state is State.UNKNOWN for one in found if one.check not in SEEN_ANYWAY)


def test_a_layer_that_was_not_asked_adds_nothing():
    layers = tuple(one for one in WELL.layers if one.layer is not Layer.CLUSTER)
    alone = replaced(
        WELL, layers=layers, nodes=(), devices=(), pools=(), uses=(), pods=(), claims=(), meshes=()
    )
    assert examine(replaced(alone, compute_domains=(), templates=())) == ()


def test_each_gpu_is_looked_at_as_often_in_many_racks_as_in_one():
    """Every index is made once per picture, so the calls grow with the records and not with their pairs."""

    def calls(racks):
        picture, made = healthy(racks=racks, trays=2), 0

        def count(frame, event, argument):
            nonlocal made
            made += event == "call"

        sys.setprofile(count)
        try:
            found = examine(picture)
        finally:
            sys.setprofile(None)
        assert found == ()
        return made

    assert calls(16) < 17 * calls(1)


def test_a_machine_without_a_controller_is_told_the_option_that_exists():
    alone = with_changed(healthy(), "machines", lambda one: one.id == machine(0, 0), domain="")
    fixes = [one.fix for one in examine(alone) if one.check == names.MACHINE_PRESENT]
    assert fixes == [
        f"rackloom admin endpoint create --chassis-serial {serial(0)} --endpoint https://SWITCH-CONTROLLER:9370"
    ]


def test_a_name_from_the_fabric_is_one_word_of_the_fix():
    name = "x; reboot"
    foreign = with_changed(
        healthy(), "partitions", lambda one: one.domain == domain(0), owner="foreign", name=name
    )
    fixes = [one.fix for one in examine(foreign) if one.check == names.PARTITION_OWNED]
    assert name in shlex.split(fixes[0])
