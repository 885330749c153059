"""Pictures of whole racks with workloads on them, every name marked with the tenant that it belongs to."""

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomain,
    ComputeDomainNode,
    ComputeDomainStatus,
    Readiness,
)
from rackloom.core.cluster.objects import Condition
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.snapshot import (
    ClaimRecord,
    DeviceRecord,
    DeviceUse,
    FabricGpuRecord,
    InstanceGpuRecord,
    Layer,
    LayerStatus,
    LogicalPartitionRecord,
    MachineRecord,
    MeasuredTransfer,
    NodeRecord,
    NvlinkDomainRecord,
    PartitionRecord,
    SiteSnapshot,
)
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source
from rackloom.web.model import MapGpu, SiteMap, SiteReading, rack_id
from rackloom.web.places import RackPlaces, findings_at, places_named

AT = 1_790_000_000.0
GPU_DRIVER, NIC_DRIVER = "gpu.rackloom.dev", "nic.rackloom.dev"
GPUS = 4


def snapshot(
    racks: int = 2, trays: int = 18, tenants: tuple[str | None, ...] = (), *, spread: bool = False
) -> SiteSnapshot:
    """Racks of one domain each. `tenants` lists the holders of all trays, rack by rack (None if free).

    A tenant has a logical partition in each rack, or one over all racks (`spread`), which is a finding.
    """
    found = SiteSnapshot(
        at=AT,
        layers=tuple(LayerStatus(layer=layer, at=AT) for layer in Layer),
        tenants={f"{name}-id": name for name in tenants if name},
        vpcs={f"{name}-vpc": f"{name}-network" for name in tenants if name},
        namespaces={f"{name}-ns": name for name in tenants if name},
    )
    parts = [
        _tray(rack, slot, _holder(tenants, rack * trays + slot), _logical_of(rack, spread))
        for rack in range(racks)
        for slot in range(trays)
    ]
    joined = {name: tuple(record for part in parts for record in part[name]) for name in parts[0]}
    domains = tuple(NvlinkDomainRecord(uuid=f"domain-{rack}", observed_at=AT) for rack in range(racks))
    held = {name for name in tenants if name}
    return msgspec.structs.replace(
        found,
        domains=domains,
        partitions=tuple(
            _partition(rack, name, _logical_of(rack, spread))
            for rack in range(racks)
            for name in sorted(held)
        ),
        logicals=tuple(
            _logical(name, _logical_of(rack, spread))
            for name in sorted(held)
            for rack in range(1 if spread else racks)
        ),
        compute_domains=tuple(_compute_domain(name, joined["nodes"]) for name in sorted(held)),
        claims=tuple(_claim(name) for name in sorted(held)),
        **joined,
    )


def examined(seen: SiteSnapshot, at: float = AT, **shown: object) -> SiteReading:
    """The reading of a snapshot that the doctor has examined."""
    return SiteReading(**{"snapshot": seen, "findings": examine(seen), "examined_at": at, **shown})


def findings_on(whole: SiteMap, gpu: MapGpu) -> tuple[Finding, ...]:
    """The findings that mark a GPU of a map."""
    found = whole.findings or ()
    places = places_named(map(RackPlaces, whole.racks), {name for finding in found for name in finding.where})
    address = next(
        (rack_id(rack.name), *spot)
        for rack in whole.racks
        for spot in rack.spots
        if rack.trays[spot[0]][spot[1]] is gpu
    )
    return findings_at(found, places, address)


def _holder(tenants: tuple[str | None, ...], tray: int) -> str | None:
    return tenants[tray % len(tenants)] if tenants else None


def _logical_of(rack: int, spread: bool) -> str:
    return "lp" if spread else f"lp-{rack}"


def _partition(rack: int, name: str, logical: str) -> PartitionRecord:
    number = _number(name)
    return PartitionRecord(
        domain=f"domain-{rack}",
        id=number,
        name=f"{name}-{rack}-nvl",
        healthy=True,
        logical=f"{name}-{logical}",
        owner="site",
    )


def _number(name: str) -> int:
    return sum(name.encode()) % 30000 + 1


def _logical(name: str, logical: str) -> LogicalPartitionRecord:
    return LogicalPartitionRecord(
        id=f"{name}-{logical}", name=f"{name}-training", tenant=f"{name}-id", status="Ready", since=AT - 60
    )


def _claim(name: str) -> ClaimRecord:
    return ClaimRecord(
        namespace=f"{name}-ns", name=f"{name}-channel", domain=f"{name}-uid", allocated=True, reserved_for=()
    )


def _compute_domain(name: str, nodes: tuple[NodeRecord, ...]) -> ComputeDomain:
    members = tuple(
        ComputeDomainNode(name=node.name, ip_address="", clique_id=node.clique or "", status=Readiness.READY)
        for node in nodes
        if node.name.startswith(f"{name}-node")
    )
    return ComputeDomain(
        namespace=f"{name}-ns",
        name=f"{name}-domain",
        uid=f"{name}-uid",
        template=f"{name}-template",
        status=ComputeDomainStatus(
            status=Readiness.READY,
            nodes=members,
            conditions=(Condition(type="Ready", status="True", reason="Ready"),),
        ),
    )


def _tray(rack: int, slot: int, holder: str | None, logical: str) -> dict[str, list[object]]:
    who = holder or "free"
    node, machine = f"{who}-node-{rack}-{slot}", f"{who}-machine-{rack}-{slot}"
    keys = [_key(rack, slot, module, who) for module in range(1, GPUS + 1)]
    clique = f"domain-{rack}.{_number(holder)}" if holder else None
    found: dict[str, list[object]] = {
        "fabric_gpus": [_fabric_gpu(rack, slot, key, holder) for key in keys],
        "machines": [_machine(rack, slot, machine, keys, holder)],
        "nodes": [NodeRecord(name=node, ready=True, ready_since=AT - 600, clique=clique)],
        "devices": [device for n, key in enumerate(keys) for device in _devices(node, n, key, clique, who)],
        "instance_gpus": [],
        "uses": [],
        "transfers": [],
    }
    if holder:
        found["instance_gpus"] = [_wanted(machine, module, holder, logical) for module in range(1, GPUS + 1)]
        found["uses"] = _uses(node, holder)
        found["transfers"] = [_transfer(node, keys[0])]
    return found


def _key(rack: int, slot: int, module: int, who: str) -> GpuKey:
    guid = (rack << 32) + (slot << 8) + module
    return GpuKey(
        place=Fact(SlotKey(f"serial-{rack}", slot, module), Source.NMX),
        fabric_guid=Fact(guid, Source.NMX),
        gpu_uuid=Fact(f"GPU-{who}-{rack}-{slot}-{module}", Source.NVML),
        pci_address=Fact(f"0000:{module:02x}:00.0", Source.SYSFS),
    )


def _fabric_gpu(rack: int, slot: int, key: GpuKey, holder: str | None) -> FabricGpuRecord:
    assert key.place is not None
    assert key.fabric_guid is not None
    return FabricGpuRecord(
        domain=f"domain-{rack}",
        place=key.place.value,
        guid=key.fabric_guid.value,
        tray_index=slot,
        healthy=True,
        partition=_number(holder) if holder else None,
    )


def _machine(rack: int, slot: int, name: str, keys: list[GpuKey], holder: str | None) -> MachineRecord:
    return MachineRecord(
        id=name,
        rack=f"rack-{rack:02}",
        domain=f"domain-{rack}",
        chassis_serial=f"serial-{rack}",
        slot=slot,
        tray_index=slot,
        gpus=tuple(GpuKey(place=key.place, fabric_guid=key.fabric_guid) for key in keys),
        status="Ready",
        instance=f"{name}-instance" if holder else None,
        held_since=AT - 60 if holder else None,
        tenant=f"{holder}-id" if holder else None,
        vpc=f"{holder}-vpc" if holder else None,
    )


def _devices(node: str, number: int, key: GpuKey, clique: str | None, who: str) -> list[DeviceRecord]:
    assert key.pci_address is not None
    root = f"pci0000:{number:02x}"
    gpu = DeviceRecord(
        driver=GPU_DRIVER,
        pool=node,
        name=f"gpu-{number}",
        node=node,
        kind="gpu",
        key=GpuKey(fabric_guid=key.fabric_guid, gpu_uuid=key.gpu_uuid, pci_address=key.pci_address),
        clique=clique,
        pcie_root=root,
        numa=number // 2,
    )
    nic = DeviceRecord(
        driver=NIC_DRIVER,
        pool=node,
        name=f"{who}-nic-{number}",
        node=node,
        kind="nic",
        pcie_root=root,
        numa=number // 2,
        partner=key.pci_address.value,
        link="up",
    )
    return [gpu, nic]


def _wanted(machine: str, module: int, holder: str, logical: str) -> InstanceGpuRecord:
    return InstanceGpuRecord(
        instance=f"{machine}-instance",
        machine=machine,
        module_id=module,
        logical=f"{holder}-{logical}",
        status="Ready",
        since=AT - 60,
    )


def _uses(node: str, holder: str) -> list[DeviceUse]:
    pods = (f"{holder}-ns/{holder}-worker-{node}",)
    gpus = [
        DeviceUse(
            driver=GPU_DRIVER,
            pool=node,
            device=f"gpu-{n}",
            claim=f"{holder}-ns/{holder}-gpus",
            pods=pods,
            since=AT - 50,
            jobs=(f"Job {holder}-ns/{holder}-job",),
        )
        for n in range(GPUS)
    ]
    channel = DeviceUse(
        driver=names.IMEX_DRIVER,
        pool=node,
        device="channel-7",
        claim=f"{holder}-ns/{holder}-channel",
        pods=pods,
        since=AT - 50,
    )
    return [*gpus, channel]


def _transfer(node: str, key: GpuKey) -> MeasuredTransfer:
    return MeasuredTransfer(
        at=AT - 300,
        node=node,
        key=GpuKey(gpu_uuid=key.gpu_uuid, pci_address=key.pci_address),
        device="mlx5_0:1",
        gigabytes_per_second=46.2,
        verdict="holds",
    )
