"""A snapshot of whole racks at work in which everything is as it should be. Tests break one thing in it.

Each layer takes names from a separate space: only the join key ties them.
"""

import msgspec

from rackloom.core.cluster.domain_objects import ComputeDomain, ComputeDomainStatus
from rackloom.core.cluster.names import GPU_DRIVER, IMEX_DRIVER
from rackloom.core.cluster.objects import Condition
from rackloom.core.diagnosis.snapshot import (
    ClaimRecord,
    DeviceRecord,
    DeviceUse,
    FabricGpuRecord,
    ImexMeshRecord,
    InstanceGpuRecord,
    Layer,
    LayerStatus,
    LogicalPartitionRecord,
    MachineRecord,
    MeasuredTransfer,
    NodeRecord,
    NvlinkDomainRecord,
    PartitionRecord,
    PodRecord,
    PoolRecord,
    SiteSnapshot,
    TemplateRecord,
)
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source

NOW = 1_800_000_000.0
TRAYS, GPUS = 18, 4
NIC_DRIVER = "dra.net"
PARTITION = 7
"""Id of the only partition in each rack."""


def domain(rack):
    return f"d0ma1n-{rack}"


def serial(rack):
    return f"CH{rack:03}"


def slot(tray):
    return tray + 1 if tray < 8 else tray + 10


def machine(rack, tray):
    return f"m-{rack}-{tray}"


def node(rack, tray):
    return f"host-{rack * 100 + 99 - tray}"


def guid(rack, tray, module):
    return 0xA000_0000_0000_0000 + (rack << 20) + (tray << 8) + module


def clique(rack):
    return f"c1u57e7-{rack}.{PARTITION}"


def pci(module):
    """The PCI address of a module, which is the same on every machine of a rack."""
    return f"000{module}:01:00.0"


def place(rack, tray, module):
    return SlotKey(serial(rack), slot(tray), module)


def site_key(rack, tray, module):
    return GpuKey(
        place=Fact(place(rack, tray, module), Source.DECLARED),
        fabric_guid=Fact(guid(rack, tray, module), Source.NMX),
    )


def node_key(rack, tray, module):
    return GpuKey(
        place=Fact(place(rack, tray, module), Source.NVML),
        fabric_guid=Fact(guid(rack, tray, module), Source.NVML),
        gpu_uuid=Fact(f"GPU-{rack}-{tray}-{module}", Source.NVML),
        pci_address=Fact(pci(module), Source.SYSFS),
    )


def healthy(racks=2, trays=TRAYS):
    """Each rack is one tenant's instance set, one ComputeDomain and one job with a pod per tray."""
    every = [(rack, tray) for rack in range(racks) for tray in range(trays)]
    gpus = [(rack, tray, module) for rack, tray in every for module in range(1, GPUS + 1)]
    return SiteSnapshot(
        at=NOW,
        layers=tuple(LayerStatus(layer=layer, at=NOW) for layer in Layer),
        domains=tuple(_domain(rack) for rack in range(racks)),
        fabric_gpus=tuple(_fabric_gpu(*gpu) for gpu in gpus),
        partitions=tuple(_partition(rack) for rack in range(racks)),
        logicals=tuple(_logical(rack) for rack in range(racks)),
        machines=tuple(_machine(*at) for at in every),
        instance_gpus=tuple(_requested_gpu(*gpu) for gpu in gpus),
        nodes=tuple(
            NodeRecord(
                name=node(*at), ready=True, clique=clique(at[0]), clique_writer="gpu-feature-discovery"
            )
            for at in every
        ),
        pools=tuple(
            PoolRecord(driver=driver, name=node(*at), node=node(*at))
            for at in every
            for driver in (GPU_DRIVER, IMEX_DRIVER, NIC_DRIVER)
        ),
        devices=tuple(
            device
            for at in every
            for device in (
                _channel(*at),
                *(make(*at, module) for module in range(1, GPUS + 1) for make in (_gpu, _nic)),
            )
        ),
        uses=tuple(use for at in every for use in _uses(*at)),
        compute_domains=tuple(_compute_domain(rack) for rack in range(racks)),
        meshes=tuple(
            ImexMeshRecord(node=node(*at), domain=f"uid-{at[0]}", clique=clique(at[0]), complete=True)
            for at in every
        ),
        daemons_in="rackloom-imex",
        transfers=tuple(_transfer(*gpu) for gpu in gpus if gpu[2] == 1),
        templates=tuple(
            TemplateRecord(namespace=f"team-{rack}", name="channel", domain=f"uid-{rack}")
            for rack in range(racks)
        ),
        claims=tuple(_claim(*at) for at in every),
        pods=tuple(_pod(*at) for at in every),
        tenants={f"tenant-{rack}": f"org-{rack}" for rack in range(racks)},
        vpcs={f"vpc-{rack}": f"net-{rack}" for rack in range(racks)},
    )


def _domain(rack):
    url = f"https://switch-{rack}:9370"
    return NvlinkDomainRecord(uuid=domain(rack), endpoints=(url,), observed_at=NOW - 5, default_policy="none")


def _fabric_gpu(rack, tray, module):
    return FabricGpuRecord(
        domain=domain(rack),
        place=place(rack, tray, module),
        guid=guid(rack, tray, module),
        tray_index=tray,
        healthy=True,
        partition=PARTITION,
    )


def _partition(rack):
    return PartitionRecord(
        domain=domain(rack),
        id=PARTITION,
        name=f"rl-{rack}",
        healthy=True,
        logical=f"lp-{rack}",
        owner="site",
    )


def _logical(rack):
    return LogicalPartitionRecord(
        id=f"lp-{rack}", name=f"job-{rack}", tenant=f"tenant-{rack}", status="Ready"
    )


def _machine(rack, tray):
    return MachineRecord(
        id=machine(rack, tray),
        rack=f"rack-{rack}",
        domain=domain(rack),
        chassis_serial=serial(rack),
        slot=slot(tray),
        tray_index=tray,
        gpus=tuple(site_key(rack, tray, module) for module in range(1, GPUS + 1)),
        status="InUse",
        instance=f"i-{rack}-{tray}",
        tenant=f"tenant-{rack}",
        vpc=f"vpc-{rack}",
    )


def _requested_gpu(rack, tray, module):
    return InstanceGpuRecord(
        instance=f"i-{rack}-{tray}",
        machine=machine(rack, tray),
        module_id=module,
        logical=f"lp-{rack}",
        status="Ready",
        since=NOW - 900,
    )


def _gpu(rack, tray, module):
    name = node(rack, tray)
    return DeviceRecord(
        driver=GPU_DRIVER,
        pool=name,
        name=f"gpu-{module - 1}",
        node=name,
        kind="gpu",
        key=node_key(rack, tray, module),
        clique=clique(rack),
        pcie_root=f"pci000{module}:00",
        numa=(module - 1) // 2,
        partner=f"mlx5_{module - 1}",
        partner_address=f"001{module}:03:00.0",
        partner_class="NODE",
    )


def _nic(rack, tray, module):
    name = node(rack, tray)
    return DeviceRecord(
        driver=NIC_DRIVER,
        pool=name,
        name=f"pci-001{module}-03-00-0",
        node=name,
        kind="nic",
        key=GpuKey(pci_address=Fact(f"001{module}:03:00.0", Source.SYSFS)),
        pcie_root=f"pci001{module}:00",
        numa=(module - 1) // 2,
        partner=pci(module),
        partner_class="NODE",
        link="active",
        gbps=400,
    )


def _channel(rack, tray):
    name = node(rack, tray)
    return DeviceRecord(
        driver=IMEX_DRIVER, pool=name, name="channel-0", node=name, kind="channel", clique=clique(rack)
    )


def _uses(rack, tray):
    name, claim = node(rack, tray), f"team-{rack}/worker-{tray}-devices"
    named = [(IMEX_DRIVER, "channel-0")]
    named += [(GPU_DRIVER, f"gpu-{module - 1}") for module in range(1, GPUS + 1)]
    named += [(NIC_DRIVER, f"pci-001{module}-03-00-0") for module in range(1, GPUS + 1)]
    for driver, device in named:
        yield DeviceUse(
            driver=driver, pool=name, device=device, claim=claim, pods=(f"team-{rack}/worker-{tray}",)
        )


def _compute_domain(rack):
    conditions = (
        Condition(type="Ready", status="True", reason="AllNodesReady", message="all nodes are ready"),
        Condition(type="Degraded", status="False", reason="AllNodesReady"),
    )
    return ComputeDomain(
        namespace=f"team-{rack}",
        name="job",
        uid=f"uid-{rack}",
        template="channel",
        status=ComputeDomainStatus(conditions=conditions),
    )


def _claim(rack, tray):
    return ClaimRecord(
        namespace=f"team-{rack}",
        name=f"worker-{tray}-devices",
        domain=f"uid-{rack}",
        allocated=True,
        reserved_for=(f"pod-{rack}-{tray}",),
    )


def _pod(rack, tray):
    return PodRecord(
        namespace=f"team-{rack}",
        name=f"worker-{tray}",
        uid=f"pod-{rack}-{tray}",
        node=node(rack, tray),
        templates={"devices": "channel"},
        claims={"devices": f"worker-{tray}-devices"},
    )


def _transfer(rack, tray, module):
    return MeasuredTransfer(
        at=NOW - 3600,
        node=node(rack, tray),
        key=GpuKey(gpu_uuid=Fact(f"GPU-{rack}-{tray}-{module}", Source.NVML)),
        device=f"mlx5_{module - 1}:1",
        gigabytes_per_second=48.0,
        verdict="holds",
    )


def with_changed(snapshot, field, which, **changes):
    """The snapshot with changes to the records of `field` for which `which` holds."""
    records = getattr(snapshot, field)
    hit = [record for record in records if which(record)]
    assert hit, f"nothing in {field} is meant"
    kept = tuple(
        msgspec.structs.replace(record, **changes) if which(record) else record for record in records
    )
    return msgspec.structs.replace(snapshot, **{field: kept})


def without(snapshot, field, which):
    """The snapshot without the records of `field` for which `which` holds."""
    records = getattr(snapshot, field)
    kept = tuple(record for record in records if not which(record))
    assert len(kept) < len(records), f"nothing in {field} is meant"
    return msgspec.structs.replace(snapshot, **{field: kept})
