"""The printed form of findings for people."""

import msgspec
from inline_snapshot import snapshot
from tests.core.diagnosis.healthy import NOW, TRAYS, domain, healthy, machine, node, with_changed

from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.report import MOST_FINDINGS, MOST_LINES, render_findings
from rackloom.core.diagnosis.snapshot import Layer

WELL = healthy(racks=2, trays=2)


def test_the_worst_is_first_with_both_sides_and_its_fix_on_a_line_of_its_own():
    shared = with_changed(WELL, "machines", lambda record: record.id == machine(0, 1), tenant="tenant-1")
    broken = with_changed(
        shared,
        "domains",
        lambda record: record.uuid == domain(1),
        unknown_since=NOW - 90,
        problem="GetPartitionInfoList: UNAVAILABLE",
    )
    assert render_findings(broken, examine(broken)) == snapshot("""\
examined:
  fabric: 2 domains, 16 GPUs, 2 partitions, read 2027-01-15T08:00:00Z
  site: 4 machines, 2 logical partitions, read 2027-01-15T08:00:00Z
  cluster: 4 nodes, 2 ComputeDomains, devices: 4 channel, 16 gpu, 16 nic, read 2027-01-15T08:00:00Z
  transfer: 4 transfers, read 2027-01-15T08:00:00Z

CRITICAL  Two tenants share a partition: partition rl-0
  affects pod team-0/worker-0, pod team-0/worker-1, tenant org-0, tenant org-1
  tenants apart: partition rl-0: GPUs of tenants org-0 and org-1 share memory in it
    switch controller: partition 7 holds rack-0/slot-1/gpu-0, rack-0/slot-1/gpu-1, rack-0/slot-1/gpu-2\
 and 1 more
    records: these are tenant org-0's
    switch controller: partition 7 holds rack-0/slot-2/gpu-0, rack-0/slot-2/gpu-1, rack-0/slot-2/gpu-2\
 and 1 more
    records: these are tenant org-1's
  1. rackloom admin plan d0ma1n-0 --to plan.json
     safe: prints what would be done, and does none of it
  note: read it, then: rackloom admin apply plan.json
  runbook: rackloom doctor --runbook tenants-apart

UNKNOWN   The switch controller of rack-1 cannot be believed or read  since 2027-01-15T07:58:30Z
  switch controller: domain d0ma1n-1: GetPartitionInfoList: UNAVAILABLE
    asked through https://switch-1:9370
    records: instances in it: 2
  1. rackloom admin domain show d0ma1n-1
     safe: only reads
  note: then see to the switch tray of https://switch-1:9370
  runbook: rackloom doctor --runbook switch-controller

2 findings: 1 critical, 1 unknown; begin with: Two tenants share a partition: partition rl-0\
""")


def test_a_layer_that_was_read_in_part_says_what_is_missing():
    why = "Node n9 is left out: its shape: status.conditions: expected a list, got a map"
    layers = tuple(
        msgspec.structs.replace(layer, problem=why) if layer.layer is Layer.CLUSTER else layer
        for layer in WELL.layers
    )
    text = render_findings(msgspec.structs.replace(WELL, layers=layers), ())
    assert text.splitlines()[3].endswith(f"read 2027-01-15T08:00:00Z; {why}")


def test_long_evidence_is_counted():
    lost = with_changed(WELL, "fabric_gpus", lambda record: record.domain == domain(0), partition=None)
    text = render_findings(lost, examine(lost))
    assert len(text.splitlines()) < 60
    assert "all holds" not in text


def test_what_somebody_named_cannot_steer_a_terminal():
    message = {"unknown_since": NOW - 90, "problem": "a\x1b[2Jb\u202ec\nd"}
    broken = with_changed(WELL, "domains", lambda record: record.uuid == domain(1), **message)
    text = render_findings(broken, examine(broken))
    assert "a?[2Jb?c?d" in text


def test_of_very_many_findings_the_worst_are_told_and_the_rest_counted():
    site = healthy(racks=2, trays=TRAYS)
    sick = tuple(
        msgspec.structs.replace(gpu, healthy=False, problem=f"XID {at}")
        for at, gpu in enumerate(site.fabric_gpus)
    )
    many = msgspec.structs.replace(site, fabric_gpus=sick)
    reported = render_findings(many, examine(many)).splitlines()
    assert sum(line.startswith("  1. ") for line in reported) == MOST_FINDINGS
    assert reported[-4:] == [
        f"and {len(sick) - MOST_FINDINGS} more, whole with --json:",
        f"  {len(sick) - MOST_FINDINGS} error  GPU health",
        "",
        f"{len(sick)} findings: {len(sick)} error; begin with: {examine(many)[0].title}",
    ]


def test_what_is_said_of_many_is_said_once():
    unlabelled = with_changed(healthy(racks=1, trays=9), "nodes", lambda record: True, clique=None)
    quiet = msgspec.structs.replace(unlabelled, compute_domains=())
    found = examine(quiet)
    reported = render_findings(quiet, found).splitlines()
    assert len(found) == 9
    assert sum(line.startswith("  1. ") for line in reported) == 1
    assert "  and the same of node host-92, node host-93, node host-94, node host-95 and 4 more" in reported


def test_consequences_of_one_kind_are_on_one_line():
    hand = with_changed(
        healthy(racks=1, trays=9), "partitions", lambda record: True, owner="foreign", logical=None
    )
    reported = render_findings(hand, examine(hand)).splitlines()
    (line,) = (text for text in reported if text.startswith("    GPU in its partition: instance "))
    assert line.endswith(" and 5 more")


def test_what_is_simulated_says_so():
    site = msgspec.structs.replace(healthy(racks=1, trays=2), simulated=(Layer.CLUSTER,))
    lines = render_findings(site, ()).splitlines()
    assert [line.split(":")[0] for line in lines if "simulated" in line] == [
        "  cluster (simulated)",
        "what is simulated says nothing of real machines",
    ]


def test_what_is_alike_is_told_once_with_the_fix_of_each():
    alike = with_changed(
        WELL, "nodes", lambda record: record.name in (node(0, 0), node(0, 1)), other_writers=("me",)
    )
    reported = render_findings(alike, examine(alike))
    fixes = {
        line.split(" -o yaml")[0].split()[-1] for line in reported.splitlines() if "kubectl get node" in line
    }
    assert fixes == {node(0, 0), node(0, 1)}
    assert reported.count("the same of") == 1


def test_of_many_fixes_the_first_are_told_and_the_others_counted():
    alike = with_changed(healthy(racks=1), "nodes", lambda record: True, other_writers=("me",))
    reported = render_findings(alike, examine(alike)).splitlines()
    assert sum("kubectl get node" in line for line in reported) == 1 + MOST_LINES
    assert f"    and {TRAYS - 1 - MOST_LINES} more" in reported
