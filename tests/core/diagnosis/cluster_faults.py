"""Faults of nodes, devices and workloads: each a mutation, its check, and a part of the subject."""

import msgspec
from tests.core.diagnosis.healthy import NOW, clique, node, pci, with_changed, without
from tests.core.diagnosis.ward import NODE, TRAY, of_node

from rackloom.core.diagnosis import catalogue
from rackloom.core.diagnosis.snapshot import PoolRecord
from rackloom.core.domains.compute_domain import ComputeDomainStatus, Condition
from rackloom.core.domains.names import GPU_DRIVER, IMEX_DRIVER


def condition(picture, reason, status="False"):
    told = Condition(
        type="Ready",
        status=status,
        reason=reason,
        message="3 of 4 nodes are ready",
        last_transition_time="2027-01-15T07:00:00Z",
    )
    return with_changed(
        picture,
        "compute_domains",
        lambda one: one.uid == "uid-0",
        status=ComputeDomainStatus(conditions=(told,)),
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
    extra = PoolRecord(driver=IMEX_DRIVER, name="host-gone", node="host-gone")
    return msgspec.structs.replace(picture, pools=(*picture.pools, extra))


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
    mine = [use for use in picture.uses if pod in use.pods and use.driver not in (GPU_DRIVER, "dra.net")]
    gpu = [use for use in picture.uses if pod in use.pods and use.device == "gpu-0"]
    nic = [use for use in picture.uses if pod in use.pods and use.device == "pci-0013-03-00-0"]
    others = [use for use in picture.uses if pod not in use.pods]
    return msgspec.structs.replace(picture, uses=(*others, *mine, *gpu, *nic))


FAULTS = {
    "label-missing": (
        lambda one: with_changed(one, "nodes", of_node, clique=None),
        catalogue.CLIQUE_LABEL,
        NODE,
    ),
    "label-stale": (
        lambda one: with_changed(one, "nodes", of_node, clique="c1u57e7-0.32766"),
        catalogue.CLIQUE_LABEL,
        NODE,
    ),
    "label-of-another-rack": (
        lambda one: with_changed(one, "nodes", of_node, clique=clique(1)),
        catalogue.CLIQUE_LABEL,
        NODE,
    ),
    "second-writer": (
        lambda one: with_changed(one, "nodes", of_node, other_writers=("rackloom-clique-label",)),
        catalogue.CLIQUE_WRITER,
        NODE,
    ),
    "node-silent": (node_lost, catalogue.NODE_READY, NODE),
    "node-down": (node_down, catalogue.NODE_READY, NODE),
    "plugin-dead": (plugin_dead, catalogue.NODE_PUBLISHES, NODE),
    "slice-of-gone-node": (node_deleted, catalogue.SLICE_OF_NODE, "host-gone"),
    "device-tainted": (
        lambda one: with_changed(
            one,
            "devices",
            lambda d: d.node == NODE and d.name == "gpu-0",
            taints=("gpu.nvidia.com/xid=79:NoSchedule",),
        ),
        catalogue.DEVICE_TAINT,
        NODE,
    ),
    "device-withdrawn": (
        lambda one: without(one, "devices", lambda d: d.node == NODE and d.name == "gpu-3"),
        catalogue.DEVICE_THERE,
        f"worker-{TRAY}-devices",
    ),
    "claim-pending": (
        lambda one: with_changed(
            one,
            "claims",
            lambda c: c.name == f"worker-{TRAY}-devices" and c.domain == "uid-0",
            allocated=False,
        ),
        catalogue.CLAIMS,
        f"worker-{TRAY}",
    ),
    "template-misspelt": (
        lambda one: with_changed(
            one, "pods", lambda p: p.uid == f"pod-0-{TRAY}", templates={"devices": "chanel"}, claims={}
        ),
        catalogue.TEMPLATES,
        f"worker-{TRAY}",
    ),
    "pod-in-another-rack": (
        lambda one: with_changed(one, "pods", lambda p: p.uid == f"pod-0-{TRAY}", node=node(1, 0)),
        catalogue.ONE_CLIQUE,
        "team-0/job",
    ),
    "daemon-of-another-clique": (
        lambda one: with_changed(one, "meshes", lambda m: m.node == NODE, clique=clique(1)),
        catalogue.ONE_CLIQUE,
        "team-0/job",
    ),
    "domain-not-ready": (lambda one: condition(one, "TooFewNodes"), catalogue.ACTIVE, "team-0/job"),
    "mesh-broken": (mesh_broken, catalogue.MESH, "team-0/job"),
    "nic-down": (nic_down, catalogue.NIC_LINK, NODE),
    "nic-slow": (
        lambda one: with_changed(one, "devices", is_nic(2), gbps=200),
        catalogue.NIC_LINK,
        NODE,
    ),
    "nic-untold": (
        lambda one: with_changed(one, "devices", is_nic(2), link="unknown"),
        catalogue.NIC_LINK,
        NODE,
    ),
    "nic-far": (lambda one: with_changed(one, "devices", is_nic(1), numa=1), catalogue.NIC_ALIGNED, NODE),
    "nic-crossed": (crossed_nics, catalogue.NIC_ALIGNED, f"worker-{TRAY}"),
    "transfer-slow": (slow_transfer, catalogue.TRANSFER, NODE),
}
