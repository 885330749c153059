"""Readings of NICo and of a site with trays of four GPUs in one domain, and variants of them."""

import msgspec

from rackloom.core.takeover.records import (
    NicoAllocation,
    NicoInstance,
    NicoInstanceType,
    NicoInterface,
    NicoLogicalPartition,
    NicoQuota,
    NicoReading,
    NicoSite,
    NicoTenant,
    NicoVpc,
    ShownPartition,
    SiteMachine,
    SiteReading,
)

DOMAIN = "00000000-0000-4000-8000-00000000d001"


def uuid(number):
    return f"00000000-0000-4000-a000-{number:012x}"


TENANT, TYPE, ALLOCATION, QUOTA, PARTITION, VPC = map(uuid, range(1, 7))


def guid(tray, device):
    return str((0xDB << 56) + tray * 16 + device)


def nico_interface(tray, device, **changes):
    fields = {"id": uuid(1000 + tray * 16 + device), "device": device, "logical_partition": PARTITION}
    return NicoInterface(**(fields | {"status": "Ready", "guid": guid(tray, device)} | changes))


def nico_instance(tray, **changes):
    fields = {
        "id": uuid(100 + tray),
        "org": "acme",
        "name": f"job-{tray}",
        "description": None,
        "status": "Ready",
        "vpc": VPC,
        "type_id": TYPE,
        "machine": f"tray-{tray}",
        "interfaces": tuple(nico_interface(tray, device) for device in range(4)),
        "extra": {"labels": {"job": "a"}},
    }
    return NicoInstance(**(fields | changes))


def nico_reading(**changes):
    """One organisation with one of each, and two instances that share a logical partition."""
    quota = NicoQuota(id=QUOTA, type_id=TYPE, machines=2)
    gpus = {"type": "GPU", "name": "NVIDIA GB200", "count": 4, "deviceType": "NVLink"}
    named = {"org": "acme", "description": None}
    fields = {
        "site": NicoSite(id=uuid(9), name="old"),
        "tenants": (NicoTenant(id=TENANT, org="acme"),),
        "types": (NicoInstanceType(id=TYPE, name="gb200", description=None, labels={}, capabilities=[gpus]),),
        "allocations": (NicoAllocation(id=ALLOCATION, name="all", quotas=(quota,), **named),),
        "logical_partitions": (NicoLogicalPartition(id=PARTITION, name="train", status="Ready", **named),),
        "vpcs": (
            NicoVpc(id=VPC, name="net", status="Ready", logical_partition=PARTITION, extra={}, **named),
        ),
        "instances": (nico_instance(0), nico_instance(1)),
    }
    return NicoReading(**(fields | changes))


def site_machine(tray, **changes):
    fields = {
        "id": f"tray-{tray}",
        "domain": DOMAIN,
        "chassis_serial": "C1",
        "slot": tray,
        "type_id": None,
        "instance": None,
        "is_cordoned": False,
        "gpus": {device + 1: guid(tray, device) for device in range(4)},
    }
    return SiteMachine(**(fields | changes))


def all_guids(*trays):
    return tuple(guid(tray, device) for tray in trays for device in range(4))


def shown_partition(guids, **changes):
    fields = {"domain": DOMAIN, "name": f"{PARTITION}{','.join(guids)}"[:240], "number": 1}
    fields |= {"owner": "foreign", "logical_partition": None, "is_guid_based": True, "guids": tuple(guids)}
    return ShownPartition(**(fields | changes))


def site_reading(**changes):
    """A site without records, with three trays, and the partition of the two instances."""
    fields = {
        "id": uuid(20),
        "name": "new",
        "tenants": {},
        "types": {},
        "allocations": (),
        "logical_partitions": (),
        "vpcs": (),
        "instances": (),
        "machines": tuple(map(site_machine, range(3))),
        "partitions": (shown_partition(all_guids(0, 1)),),
        "unreadable": (),
        "imported": frozenset(),
    }
    return SiteReading(**(fields | changes))


def replaced(reading, field, index, **changes):
    """The reading with other values in one entry of a list."""
    entries = list(getattr(reading, field))
    entries[index] = msgspec.structs.replace(entries[index], **changes)
    return msgspec.structs.replace(reading, **{field: tuple(entries)})
