"""Faults of controllers, fabrics and records: each a mutation, its check, and a part of the subject."""

import msgspec
from tests.core.diagnosis.healthy import (
    NOW,
    PARTITION,
    clique,
    domain,
    guid,
    machine,
    node,
    place,
    serial,
    with_changed,
    without,
)
from tests.core.diagnosis.ward import MACHINE, NODE, TRAY, is_module, of_node, of_tray

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.snapshot import LostPartition, MovedGpu, PartitionRecord, SilentController
from rackloom.topology.join_key import Fact, SlotKey, Source


def unreachable(snapshot):
    return with_changed(
        snapshot,
        "domains",
        lambda record: record.uuid == domain(0),
        unknown_since=NOW - 400,
        problem="GetGpuInfoList: DEADLINE_EXCEEDED",
    )


def gone_for_good(snapshot):
    """The only controller of the domain has been gone for two hours."""
    (url,) = snapshot.domains[0].endpoints
    away = with_changed(
        snapshot, "domains", of_domain, silent=(SilentController(url, NOW - 7200, (serial(0),)),)
    )
    return with_changed(away, "domains", of_domain, unknown_since=NOW - 7200, problem="UNAVAILABLE")


def one_of_two_gone(snapshot):
    other = "https://switch-b:9370"
    (url,) = snapshot.domains[0].endpoints
    silent = (SilentController(other, NOW - 7200, ("SERIAL-B",)),)
    return with_changed(snapshot, "domains", of_domain, endpoints=(url, other), silent=silent)


def unregistered(snapshot):
    """When the controller goes, the records lose its reports."""
    gone = without(snapshot, "domains", of_domain)
    for field in ("fabric_gpus", "partitions"):
        gone = without(gone, field, lambda record: record.domain == domain(0))
    text = f"no switch controller reports domain {domain(0)} any more"
    return with_changed(
        gone,
        "instance_gpus",
        lambda record: record.logical == "lp-0",
        status="Unknown",
        problem=text,
        since=NOW - 600,
    )


def of_domain(record):
    return record.uuid == domain(0)


def split(snapshot):
    """A GPU of the tray in another logical partition, which NICo allows per GPU. The label goes."""
    other = PartitionRecord(
        domain=domain(0), id=8, name="rl-x", healthy=True, logical="lp-x", default=False, owner="site"
    )
    moved = with_changed(snapshot, "fabric_gpus", is_module(4), partition=8)
    wished = with_changed(
        moved,
        "instance_gpus",
        lambda record: record.machine == MACHINE and record.module_id == 4,
        logical="lp-x",
    )
    lost = with_changed(wished, "nodes", of_node, clique=None)
    extra = msgspec.structs.replace(snapshot.logicals[0], id="lp-x", name="other")
    return msgspec.structs.replace(
        lost, partitions=(*snapshot.partitions, other), logicals=(*snapshot.logicals, extra)
    )


def swapped(snapshot):
    """A new tray in the old slot. Fabric and records know it, but the node's slices are of the old one."""
    new = snapshot
    for module in range(1, 5):
        new = with_changed(new, "fabric_gpus", is_module(module), guid=0xFFFF_0000 + module)
    keys = tuple(
        msgspec.structs.replace(key, fabric_guid=Fact(0xFFFF_0001 + index, Source.NMX))
        for index, key in enumerate(next(tray for tray in snapshot.machines if tray.id == MACHINE).gpus)
    )
    return with_changed(new, "machines", lambda record: record.id == MACHINE, gpus=keys)


def partition_lost(snapshot):
    gone = without(snapshot, "partitions", lambda record: record.domain == domain(0))
    free = with_changed(gone, "fabric_gpus", lambda record: record.domain == domain(0), partition=None)
    pending = with_changed(
        free,
        "instance_gpus",
        lambda record: record.logical == "lp-0",
        status="Pending",
        problem="the GPU is in no partition yet",
        since=NOW - 600,
    )
    lost = LostPartition(domain=domain(0), name="rl-0", logical="lp-0", seen_at=NOW - 600)
    unlabelled = with_changed(pending, "nodes", lambda record: record.clique == clique(0), clique=None)
    devices = with_changed(unlabelled, "devices", lambda record: record.clique == clique(0), clique=None)
    return msgspec.structs.replace(devices, lost_partitions=(lost,))


def foreign(snapshot, **changes):
    return PartitionRecord(domain=domain(0), id=9, name="by-hand", healthy=True, owner="foreign", **changes)


def taken_by_hand(snapshot):
    moved = with_changed(snapshot, "fabric_gpus", of_tray, partition=9)
    pending = with_changed(
        moved,
        "instance_gpus",
        lambda record: record.machine == MACHINE,
        status="Pending",
        problem="the GPU is still in partition by-hand",
        since=NOW - 600,
    )
    relabelled = with_changed(pending, "nodes", of_node, clique=f"{clique(0).rpartition('.')[0]}.9")
    devices = with_changed(
        relabelled,
        "devices",
        lambda record: record.node == NODE and record.clique,
        clique=f"{clique(0).rpartition('.')[0]}.9",
    )
    return msgspec.structs.replace(devices, partitions=(*snapshot.partitions, foreign(snapshot)))


def two_tenants(snapshot):
    return with_changed(snapshot, "machines", lambda record: record.id == MACHINE, tenant="tenant-1")


def sick(snapshot):
    ill = with_changed(snapshot, "fabric_gpus", is_module(2), healthy=False, problem="NO_NVLINK")
    worse = with_changed(
        ill, "partitions", lambda record: record.domain == domain(0), healthy=False, problem="DEGRADED"
    )
    tainted = ("gpu.nvidia.com/fabric=unhealthy:NoSchedule",)
    return with_changed(
        worse, "devices", lambda record: record.node == NODE and record.name == "gpu-1", taints=tainted
    )


def tray_out(snapshot):
    gone = without(snapshot, "fabric_gpus", of_tray)
    away = with_changed(gone, "machines", lambda record: record.id == MACHINE, missing_since=NOW - 30)
    return with_changed(
        away,
        "instance_gpus",
        lambda record: record.machine == MACHINE,
        status="Pending",
        problem="the switch controller does not report this GPU",
        since=NOW - 600,
    )


def moved_to_nobody(snapshot):
    """The tray of an instance sits in a slot without a machine. Its node has not looked since."""
    away = with_changed(snapshot, "machines", lambda record: record.id == MACHINE, missing_since=NOW - 30)
    for module in range(1, 5):
        there = SlotKey(serial(0), 40, module)
        away = with_changed(away, "fabric_gpus", is_module(module), place=there)
    return with_changed(
        away,
        "instance_gpus",
        lambda record: record.machine == MACHINE,
        status="Pending",
        problem="the switch controller does not report this GPU",
        since=NOW - 600,
    )


def exchanged(snapshot):
    """Two trays of one tenant sit in each other's slots. The controller, records and nodes know it."""
    seats = {place(0, tray, module): (tray, module) for tray in (TRAY, TRAY + 1) for module in range(1, 5)}
    other = {at: place(0, 2 * TRAY + 1 - tray, module) for at, (tray, module) in seats.items()}

    def rekeyed(key):
        there = None if key.place is None else other.get(key.place.value)
        return key if there is None else msgspec.structs.replace(key, place=Fact(there, key.place.source))

    now = msgspec.structs.replace
    machines = {tray.id: tray for tray in snapshot.machines}
    first, second = machines[MACHINE], machines[machine(0, TRAY + 1)]
    held = {
        tray.id: now(tray, gpus=tuple(map(rekeyed, of.gpus)))
        for tray, of in ((first, second), (second, first))
    }
    left = tuple(
        MovedGpu(machine=machine(0, tray), module_id=module, guid=guid(0, tray, module), since=NOW - 60)
        for tray, module in seats.values()
        if tray == TRAY
    )
    return now(
        snapshot,
        machines=tuple(held.get(tray.id, tray) for tray in snapshot.machines),
        fabric_gpus=tuple(now(gpu, place=other.get(gpu.place, gpu.place)) for gpu in snapshot.fabric_gpus),
        devices=tuple(now(device, key=rekeyed(device.key)) for device in snapshot.devices),
        moved_gpus=left,
    )


def names_forgotten(snapshot):
    """The switch still has the partition but not its name, so no recorded partition is found."""
    nameless = with_changed(
        snapshot,
        "partitions",
        lambda record: record.domain == domain(0),
        name="",
        logical=None,
        owner="foreign",
    )
    lost = LostPartition(domain=domain(0), name="rl-0", logical="lp-0", seen_at=NOW - 60)
    return msgspec.structs.replace(nameless, lost_partitions=(lost,))


def spread(snapshot):
    """The first tray of the second rack joined the first rack's logical partition for lack of room."""
    there = machine(1, 0)
    wished = with_changed(snapshot, "instance_gpus", lambda record: record.machine == there, logical="lp-0")
    other = PartitionRecord(
        domain=domain(1), id=8, name="rl-0b", healthy=True, logical="lp-0", default=False, owner="site"
    )
    moved = with_changed(
        wished,
        "fabric_gpus",
        lambda record: record.place in {place(1, 0, module) for module in range(1, 5)},
        partition=8,
    )
    label = f"{clique(1).rpartition('.')[0]}.8"
    mine = with_changed(
        moved, "machines", lambda record: record.id == there, tenant="tenant-0", held_since=NOW - 60
    )
    dated = with_changed(mine, "machines", lambda record: record.id == machine(0, 0), held_since=NOW - 900)
    named = with_changed(dated, "nodes", lambda record: record.name == node(1, 0), clique=label)
    devices = with_changed(
        named, "devices", lambda record: record.node == node(1, 0) and record.clique is not None, clique=label
    )
    pod = "team-1/worker-0"
    devices = without(devices, "uses", lambda record: pod in record.pods)
    for field, name in (("pods", "worker-0"), ("claims", "worker-0-devices")):
        devices = without(
            devices, field, lambda record, name=name: (record.namespace, record.name) == ("team-1", name)
        )
    idle = without(devices, "meshes", lambda record: record.node == node(1, 0))
    return msgspec.structs.replace(idle, partitions=(*snapshot.partitions, other))


FAULTS = {
    "logical-partition-spread": (spread, Check.LOGICAL_SPREAD, "job-0"),
    "controller-unreachable": (unreachable, Check.CONTROLLER, domain(0)),
    "controller-gone": (gone_for_good, Check.CONTROLLER_AWAY, domain(0)),
    "one-controller-of-two-gone": (one_of_two_gone, Check.CONTROLLER_AWAY, "https://switch-b:9370"),
    "controller-unregistered": (unregistered, Check.CONTROLLER_AWAY, domain(0)),
    "paused": (
        lambda snapshot: with_changed(snapshot, "domains", lambda d: d.uuid == domain(0), paused=True),
        Check.DOMAIN_PAUSED,
        domain(0),
    ),
    "gpu-sick": (sick, Check.GPU_HEALTH, "rack-0/slot-2/gpu-1"),
    "gpu-of-unknown-health": (
        lambda snapshot: with_changed(snapshot, "fabric_gpus", is_module(2), healthy=None),
        Check.GPU_HEALTH,
        domain(0),
    ),
    "gpu-not-listed": (
        lambda snapshot: without(snapshot, "fabric_gpus", is_module(2)),
        Check.MACHINE_PRESENT,
        "rack-0/slot-2/gpu-1",
    ),
    "switch-tray-out": (
        lambda snapshot: with_changed(
            snapshot,
            "fabric_gpus",
            lambda gpu: gpu.domain == domain(0),
            healthy=False,
            problem="DEGRADED_BANDWIDTH",
        ),
        Check.GPU_HEALTH,
        f"16 GPUs of domain {domain(0)}",
    ),
    "tray-moved-to-nobody": (moved_to_nobody, Check.TRAY_PLACE, MACHINE),
    "trays-exchanged": (exchanged, Check.TRAY_PLACE, MACHINE),
    "tray-out": (tray_out, Check.MACHINE_PRESENT, MACHINE),
    "partition-sick": (
        lambda snapshot: with_changed(snapshot, "partitions", lambda p: p.domain == domain(1), healthy=False),
        Check.PARTITION_HEALTH,
        "rl-1",
    ),
    "two-tenants": (two_tenants, Check.ISOLATION, "rl-0"),
    "gpu-twice": (
        lambda snapshot: with_changed(snapshot, "fabric_gpus", is_module(1), also=(12,)),
        Check.ONE_PARTITION,
        "rack-0/slot-2/gpu-0",
    ),
    "partition-lost": (partition_lost, Check.PARTITION_THERE, "rl-0"),
    "partition-foreign": (
        lambda snapshot: msgspec.structs.replace(
            snapshot, partitions=(*snapshot.partitions, foreign(snapshot))
        ),
        Check.PARTITION_OWNED,
        "by-hand",
    ),
    "taken-by-hand": (taken_by_hand, Check.PARTITION_OWNED, "by-hand"),
    "default-still-there": (
        lambda snapshot: msgspec.structs.replace(
            snapshot,
            partitions=(
                *snapshot.partitions,
                PartitionRecord(
                    domain=domain(0), id=32766, name="Default", healthy=True, default=True, owner="default"
                ),
            ),
        ),
        Check.DEFAULT_GONE,
        "Default",
    ),
    "multicast-groups-run-out": (
        lambda snapshot: with_changed(
            snapshot, "domains", of_domain, multicast_limit=1024, multicast_used=922
        ),
        Check.MULTICAST,
        domain(0),
    ),
    "not-joined": (
        lambda snapshot: with_changed(
            snapshot,
            "instance_gpus",
            lambda gpu: gpu.machine == MACHINE,
            status="Pending",
            problem="the partition limit is reached",
            since=NOW - 600,
        ),
        Check.INTERFACE,
        f"i-0-{TRAY}",
    ),
    "moved-behind-our-back": (
        lambda snapshot: with_changed(snapshot, "fabric_gpus", of_tray, partition=None),
        Check.INTERFACE,
        f"i-0-{TRAY}",
    ),
    "unmapped": (
        lambda snapshot: with_changed(
            snapshot,
            "machines",
            lambda m: m.id == MACHINE,
            gpus=tuple(
                msgspec.structs.replace(key, fabric_guid=None) for key in snapshot.machines[TRAY].gpus
            ),
        ),
        Check.MAPPING,
        MACHINE,
    ),
    "tray-swapped": (swapped, Check.IDENTITY, "rack-0/slot-2/gpu-3"),
    "tray-split": (split, Check.SPLIT, NODE),
    "names-forgotten": (names_forgotten, Check.PARTITION_OWNED, f"partition {PARTITION} without a name"),
    "one-gpu-out": (
        lambda snapshot: with_changed(snapshot, "fabric_gpus", is_module(4), partition=None),
        Check.INTERFACE,
        f"i-0-{TRAY}",
    ),
    "one-gpu-taken-by-hand": (
        lambda snapshot: msgspec.structs.replace(
            with_changed(snapshot, "fabric_gpus", is_module(4), partition=9),
            partitions=(*snapshot.partitions, foreign(snapshot)),
        ),
        Check.PARTITION_OWNED,
        "by-hand",
    ),
}
