"""What a plane must look like once it was left alone: L1, L2, L5 and S7."""

from collections.abc import Sequence

from rackloom.carve.plan.values import DEFAULT_PARTITION_ID, DefaultPartition
from rackloom.twin.carving.book import Book
from rackloom.twin.carving.tenants import Broken, Tenant
from rackloom.twin.virtual.plane import SimPlane
from rackloom.twin.virtual.world import SimRack, SimWorld


async def judge_rest(world: SimWorld, plane: SimPlane, book: Book, tenants: Sequence[Tenant]) -> None:
    """Raise Broken unless every wish is served for which there is room, and nothing else is left."""
    full = {rack.name for rack in world.racks if _is_full(rack, _wanted(rack, book))}
    for rack in world.racks:
        _fabric_is_as_wished(world, rack, book)
    for tenant in tenants:
        await _answers_are_good(tenant, world, full)


def _room(rack: SimRack) -> int:
    """Partitions that tenants can have there; the default one stays where it holds GPUs of strangers."""
    return rack.fabric.limits.max_partitions - (DEFAULT_PARTITION_ID in rack.fabric.partitions)


def _free(world: SimWorld, rack: SimRack, wanted: dict[str, set[int]]) -> dict[str, set[int]]:
    """The partitions of trays that the site's policy asks for, by name, while there is room."""
    if world.free_gpus is not DefaultPartition.TRAY:
        return {}
    given = set[int]().union(*wanted.values())
    free: dict[str, set[int]] = {}
    for gpu in rack.fabric.gpus.values():
        if rack.machine_of(gpu.guid) in world.machines and gpu.guid not in given:
            free.setdefault(f"tray-{gpu.chassis_serial}-{gpu.slot}", set()).add(gpu.guid)
    room = max(0, _room(rack) - len(wanted))
    return {name: free[name] for name in sorted(free)[:room]}


def _is_full(rack: SimRack, wanted: dict[str, set[int]]) -> bool:
    return len(wanted) > _room(rack)


def _wanted(rack: SimRack, book: Book) -> dict[str, set[int]]:
    wanted: dict[str, set[int]] = {}
    for gpu in rack.fabric.gpus.values():
        holder = book.on_machine(rack.machine_of(gpu.guid) or "")
        if holder is not None and holder.state == "live" and gpu.module_id - 1 in holder.wishes:
            wanted.setdefault(holder.wishes[gpu.module_id - 1], set()).add(gpu.guid)
    return wanted


def _fabric_is_as_wished(world: SimWorld, rack: SimRack, book: Book) -> None:
    wanted = _wanted(rack, book)
    found: dict[str, set[int]] = {}
    for partition in rack.fabric.partitions.values():
        present = set(partition.guids) & rack.fabric.gpus.keys()
        if partition.id == DEFAULT_PARTITION_ID:
            if known := [guid for guid in present if rack.machine_of(guid) in world.machines]:
                raise Broken(f"L1 {rack.name}: {len(known)} GPUs of the site are in the default partition")
            continue
        found[world.lp_of_name.get(partition.name, partition.name)] = present
    if _is_full(rack, wanted):
        room = _room(rack)
        served = {name: guids for name, guids in wanted.items() if name in found}
        if len(served) < room:
            raise Broken(f"L1 {rack.name}: there is room for {room} partitions, and {len(served)} are served")
        wanted = served
    wanted |= _free(world, rack, wanted)
    if found != wanted:
        raise Broken(f"L1 {rack.name}: wanted are {_told(wanted)}, the fabric has {_told(found)}")


async def _answers_are_good(tenant: Tenant, world: SimWorld, full: set[str]) -> None:
    for one in await tenant.must("GET", "instance?pageSize=100"):
        why = one["statusHistory"][0]["message"]
        if one["status"] != "Ready" and not (
            world.rack_of(one["machineId"]).name in full and "partitions of at most" in why
        ):
            raise Broken(f"L1 {one['name']} is {one['status']}: {why}")
    for one in await tenant.must("GET", "nvlink-logical-partition?pageSize=100"):
        if one["status"] != "Ready":
            raise Broken(f"L1 logical partition {one['name']} is still {one['status']}")


def _told(members: dict[str, set[int]]) -> str:
    return str({name: [f"{guid:x}" for guid in sorted(guids)] for name, guids in sorted(members.items())})
