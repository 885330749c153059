"""Faults of nodes, devices and workloads: each a mutation, its check, and a part of the subject."""

import msgspec
from tests.core.diagnosis.healthy import NOW, clique, node, pci, with_changed, without
from tests.core.diagnosis.ward import NODE, TRAY, of_node

from rackloom.core.allocate.taint_rules import WithheldDevice
from rackloom.core.cluster.domain_objects import ComputeDomainStatus
from rackloom.core.cluster.names import GPU_DRIVER, IMEX_DRIVER
from rackloom.core.cluster.objects import GANG_PLAN, POD, RESOURCE_CLAIM, Condition
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.snapshot import PoolRecord, ReportedCondition


def condition(snapshot, reason, status="False"):
    reported = Condition(
        type="Ready",
        status=status,
        reason=reason,
        message="3 of 4 nodes are ready",
        last_transition_time="2027-01-15T07:00:00Z",
    )
    return with_changed(
        snapshot,
        "compute_domains",
        lambda record: record.uid == "uid-0",
        status=ComputeDomainStatus(conditions=(reported,)),
    )


def mesh_broken(snapshot):
    broken = with_changed(
        snapshot, "meshes", lambda record: record.node == NODE, complete=False, missing=("0 -> 1: INVALID",)
    )
    return condition(broken, "TooFewNodes")


def reported(snapshot, kind, name, **of):
    """A controller or a node reports something about an object."""
    found = Condition(type="Ready", status="False", reason="Refused", message="no room")
    record = ReportedCondition(kind=kind, namespace="team-0", name=name, condition=found, **of)
    return msgspec.structs.replace(snapshot, reported=(record,))


def nic_not_attached(snapshot):
    pods = (f"team-0/worker-{TRAY}",)
    return reported(snapshot, RESOURCE_CLAIM, "rails", device="rail-0", pods=pods)


def node_lost(snapshot):
    lost = with_changed(snapshot, "nodes", of_node, ready=None, ready_since=NOW - 60)
    silent = with_changed(lost, "meshes", lambda record: record.node == NODE, complete=None)
    return condition(silent, "NotAllReady", status="Unknown")


def node_down(snapshot):
    lost = with_changed(snapshot, "nodes", of_node, ready=False, ready_since=NOW - 60)
    return condition(lost, "NotAllReady")


def plugin_dead(snapshot):
    gone = without(snapshot, "pools", lambda record: record.driver == GPU_DRIVER and record.node == NODE)
    return without(gone, "devices", lambda record: record.driver == GPU_DRIVER and record.node == NODE)


def node_deleted(snapshot):
    extra = PoolRecord(driver=IMEX_DRIVER, name="host-gone", node="host-gone")
    return msgspec.structs.replace(snapshot, pools=(*snapshot.pools, extra))


def slow_transfer(snapshot):
    return with_changed(
        snapshot,
        "transfers",
        lambda record: record.node == NODE,
        verdict="fails",
        reason="27.5 GB/s of 50 (misalignment)",
        gigabytes_per_second=27.5,
    )


def nic_down(snapshot):
    """The NIC is down, and its transfer was slow for that reason."""
    down = with_changed(
        snapshot, "devices", lambda record: record.node == NODE and record.partner == pci(1), link="down"
    )
    return slow_transfer(down)


def is_nic(module):
    return lambda device: device.kind == "nic" and device.node == NODE and device.partner == pci(module)


def crossed_nics(snapshot):
    """The pod of one tray has the NIC of a GPU that another pod holds."""
    pod = f"team-0/worker-{TRAY}"
    mine = [use for use in snapshot.uses if pod in use.pods and use.driver not in (GPU_DRIVER, "dra.net")]
    gpu = [use for use in snapshot.uses if pod in use.pods and use.device == "gpu-0"]
    nic = [use for use in snapshot.uses if pod in use.pods and use.device == "pci-0013-03-00-0"]
    others = [use for use in snapshot.uses if pod not in use.pods]
    return msgspec.structs.replace(snapshot, uses=(*others, *mine, *gpu, *nic))


FAULTS = {
    "label-missing": (
        lambda snapshot: with_changed(snapshot, "nodes", of_node, clique=None),
        Check.CLIQUE_LABEL,
        NODE,
    ),
    "label-stale": (
        lambda snapshot: with_changed(snapshot, "nodes", of_node, clique="c1u57e7-0.32766"),
        Check.CLIQUE_LABEL,
        NODE,
    ),
    "label-of-another-rack": (
        lambda snapshot: with_changed(snapshot, "nodes", of_node, clique=clique(1)),
        Check.CLIQUE_LABEL,
        NODE,
    ),
    "second-writer": (
        lambda snapshot: with_changed(snapshot, "nodes", of_node, other_writers=("rackloom-clique-label",)),
        Check.CLIQUE_WRITER,
        NODE,
    ),
    "node-silent": (node_lost, Check.NODE_READY, NODE),
    "node-down": (node_down, Check.NODE_READY, NODE),
    "plugin-dead": (plugin_dead, Check.NODE_PUBLISHES, NODE),
    "slice-of-gone-node": (node_deleted, Check.SLICE_OF_NODE, "host-gone"),
    "device-tainted": (
        lambda snapshot: with_changed(
            snapshot,
            "devices",
            lambda d: d.node == NODE and d.name == "gpu-0",
            taints=("gpu.nvidia.com/xid=79:NoSchedule",),
        ),
        Check.DEVICE_TAINT,
        "rack-0/slot-2/gpu-0",
    ),
    "device-tainted-by-a-rule": (
        lambda snapshot: with_changed(
            snapshot,
            "devices",
            lambda d: d.node == NODE and d.name == "gpu-0",
            taints=("example.com/checked:NoSchedule",),
            rules=("quarantine",),
        ),
        Check.DEVICE_TAINT,
        "rack-0/slot-2/gpu-0",
    ),
    "device-withdrawn": (
        lambda snapshot: without(snapshot, "devices", lambda d: d.node == NODE and d.name == "gpu-3"),
        Check.DEVICE_THERE,
        f"worker-{TRAY}-devices",
    ),
    "claim-withheld": (
        lambda snapshot: with_changed(
            snapshot,
            "claims",
            lambda c: c.name == f"worker-{TRAY}-devices" and c.domain == "uid-0",
            allocated=False,
            withheld=(WithheldDevice("quarantine", NODE, GPU_DRIVER, "gpu-0"),),
        ),
        Check.CLAIMS,
        f"worker-{TRAY}",
    ),
    "claim-pending": (
        lambda snapshot: with_changed(
            snapshot,
            "claims",
            lambda c: c.name == f"worker-{TRAY}-devices" and c.domain == "uid-0",
            allocated=False,
        ),
        Check.CLAIMS,
        f"worker-{TRAY}",
    ),
    "template-misspelt": (
        lambda snapshot: with_changed(
            snapshot, "pods", lambda p: p.uid == f"pod-0-{TRAY}", templates={"devices": "chanel"}, claims={}
        ),
        Check.TEMPLATES,
        f"worker-{TRAY}",
    ),
    "gang-without-room": (
        lambda snapshot: reported(snapshot, GANG_PLAN, "train"),
        Check.GANG,
        "team-0/train",
    ),
    "nic-not-attached": (nic_not_attached, Check.PREPARED, "team-0/rails"),
    "pod-before-its-domain": (
        lambda snapshot: reported(snapshot, POD, f"worker-{TRAY}"),
        Check.CLAIMS,
        f"worker-{TRAY}",
    ),
    "pod-in-another-rack": (
        lambda snapshot: with_changed(snapshot, "pods", lambda p: p.uid == f"pod-0-{TRAY}", node=node(1, 0)),
        Check.ONE_CLIQUE,
        "team-0/job",
    ),
    "daemon-of-another-clique": (
        lambda snapshot: with_changed(snapshot, "meshes", lambda m: m.node == NODE, clique=clique(1)),
        Check.ONE_CLIQUE,
        "team-0/job",
    ),
    "domain-not-ready": (lambda snapshot: condition(snapshot, "TooFewNodes"), Check.ACTIVE, "team-0/job"),
    "mesh-broken": (mesh_broken, Check.MESH, "team-0/job"),
    "nic-down": (nic_down, Check.NIC_LINK, "rack-0/slot-2/nic-0"),
    "nic-slow": (
        lambda snapshot: with_changed(snapshot, "devices", is_nic(2), gbps=200),
        Check.NIC_LINK,
        "rack-0/slot-2/nic-1",
    ),
    "nic-untold": (
        lambda snapshot: with_changed(snapshot, "devices", is_nic(2), link="unknown"),
        Check.NIC_LINK,
        "rack-0/slot-2/nic-1",
    ),
    "nic-far": (
        lambda snapshot: with_changed(snapshot, "devices", is_nic(1), numa=1),
        Check.NIC_ALIGNED,
        "rack-0/slot-2/gpu-0",
    ),
    "nic-crossed": (crossed_nics, Check.NIC_ALIGNED, f"worker-{TRAY}"),
    "transfer-slow": (slow_transfer, Check.TRANSFER, NODE),
}
