"""`rackloom admin machine` and `instance`: what sits where, and what runs there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin_client import HERE, At, Client, MachineId, Printed, as_dict, connect, pages
from rackloom.cli.admin_endpoints import ask
from rackloom.cli.output import columns, emit
from rackloom.errors import Refused, why

machine = App(name="machine", help="Machines and where their GPUs are in the fabric.")
nvlink_info = App(name="nvlink-info", help="The GPU mapping of a machine.")
machine.command(nvlink_info)
instance = App(name="instance", help="Instances of tenants.")
CONFIG = (
    'JSON: {"gpu_configs": [{"device_instance": 0, "logical_partition_id": "..."}]}; the list is the whole'
    " wish, so a GPU that is not in it is detached."
)


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chassis_serial: str
    slot: int
    tray_index: int
    rack: str
    gpus: int
    id: str = ""


_RECORDS = "write a list of {chassis_serial, slot, tray_index, rack, gpus}"


class _GpuConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device_instance: int
    logical_partition_id: str


class _InstanceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu_configs: list[_GpuConfig]


@machine.command(name="list")
def machine_list(*, at: At = HERE, output: Printed = "table") -> None:
    """List the machines with their place, domain and state."""
    with connect(at) as site:
        ids = site.forge("FindMachineIds", pb.MachineSearchConfig()).machine_ids
        found = [one for page in pages(ids) for one in _machines(site, page)]
    heads = ("MACHINE", "CHASSIS SERIAL", "SLOT", "DOMAIN", "GPUS", "STATE")
    emit(
        [as_dict(one) for one in found], output, lambda: columns(heads, [_machine_row(one) for one in found])
    )


@machine.command(name="import")
def machine_import(
    file: Annotated[
        Path,
        Parameter(help="A list of {chassis_serial, slot, tray_index, rack, gpus, id}; id may be left out."),
    ],
    *,
    at: At = HERE,
    output: Printed = "table",
) -> None:
    """Add the machines of a file (JSON or YAML); all of them or none."""
    records = [ours.MachineRecord(**msgspec.structs.asdict(one)) for one in _records(file)]
    with connect(at) as site:
        reply = site.operator("ImportMachines", ours.ImportRequest(machines=records))
    rows = [(one, "created") for one in reply.created] + [(one, "unchanged") for one in reply.unchanged]
    emit(as_dict(reply), output, lambda: columns(("MACHINE", "RESULT"), rows))


@machine.command(name="force-delete")
def machine_force_delete(*, machine_id: Annotated[str, Parameter(name="--machine")], at: At = HERE) -> int:
    """Release what runs on a machine and forget the machine. Exit code 1: not done yet, ask again."""
    with connect(at) as site:
        request = pb.AdminForceDeleteMachineRequest(host_query=machine_id)
        reply = site.forge("AdminForceDeleteMachine", request)
    if reply.all_done:
        print(f"deleted {machine_id}")
        return 0
    print(f"releasing instance {reply.instance_id} of {machine_id}: its GPUs are still to leave the fabric")
    return 1


@nvlink_info.command(name="show")
def nvlink_info_show(machine_id: MachineId, *, at: At = HERE, output: Printed = "json") -> None:
    """Show the GPU mapping of a machine, and in which partition each GPU was last seen."""
    with connect(at) as site:
        found = _machine(site, machine_id)
    value = {
        "nvlink_info": as_dict(found.nvlink_info),
        "nvlink_status_observation": as_dict(found.nvlink_status_observation)
        if found.HasField("nvlink_status_observation")
        else None,
    }
    emit(value, output, lambda: _gpu_table(found))


@nvlink_info.command(name="populate")
def nvlink_info_populate(
    machine_id: MachineId,
    *,
    update_db: Annotated[
        bool, Parameter(negative="", help="Also write it into the records, as a repair.")
    ] = False,
    at: At = HERE,
) -> None:
    """Ask the controller for the GPU mapping of a machine and print it. The site does so by itself."""
    with connect(at) as site:
        known = _machine(site, machine_id).nvlink_info
        body = msgspec.json.decode(ask(site, known.chassis_serial, "gpu-info-list", 0))
        info = _observed_info(body, known)
        print(msgspec.json.format(msgspec.json.encode(as_dict(info)), indent=2).decode())
        if update_db:
            request = pb.UpdateMachineNvLinkInfoRequest(nvlink_info=info)
            request.machine_id.id = machine_id
            site.forge("UpdateMachineNvLinkInfo", request)


@instance.command(name="update-nvlink-config")
def instance_update(
    *,
    instance_id: Annotated[str, Parameter(name=["--instance", "-i"], help="Instance id.")],
    config: Annotated[str, Parameter(help=CONFIG)],
    at: At = HERE,
    output: Printed = "table",
) -> None:
    """Change which logical partition each GPU of an instance joins."""
    try:
        wished = msgspec.json.decode(config, type=_InstanceConfig)
    except msgspec.DecodeError as error:
        fix = 'use {"gpu_configs": [{"device_instance": 0, "logical_partition_id": "..."}]}'
        raise Refused(f"--config: {error}", nearest_fix=fix) from error
    request = pb.InstanceConfigUpdateRequest()
    request.instance_id.value = instance_id
    request.config.nvlink.SetInParent()
    for one in wished.gpu_configs:
        entry = request.config.nvlink.gpu_configs.add(device_instance=one.device_instance)
        entry.logical_partition_id.value = one.logical_partition_id
    with connect(at) as site:
        after = site.forge("UpdateInstanceConfig", request)
    gpus = after.config.nvlink.gpu_configs
    rows = [(one.device_instance, one.logical_partition_id.value) for one in gpus]
    emit(as_dict(after), output, lambda: columns(("GPU", "LOGICAL PARTITION ID"), rows))


def _machines(site: Client, ids: Sequence[Any]) -> list[Any]:
    return list(site.forge("FindMachinesByIds", pb.MachinesByIdsRequest(machine_ids=ids)).machines)


def _machine(site: Client, machine_id: str) -> Any:
    request = pb.MachinesByIdsRequest()
    request.machine_ids.add(id=machine_id)
    found = site.forge("FindMachinesByIds", request).machines
    if not found:
        raise Refused(f"there is no machine {machine_id}", nearest_fix="see: rackloom admin machine list")
    return found[0]


def _machine_row(one: Any) -> tuple[object, ...]:
    info = one.nvlink_info
    slot = info.gpus[0].slot_id if info.gpus else "-"
    return one.id.id, info.chassis_serial, slot, info.domain_uuid.value or "-", len(info.gpus), one.state


def _gpu_table(found: Any) -> str:
    seen = {one.guid: one for one in found.nvlink_status_observation.gpu_status}
    known = found.HasField("nvlink_status_observation")
    rows = []
    for gpu in found.nvlink_info.gpus:
        status = seen.get(gpu.guid)
        at = status.domain_id.value if status else ""
        logical = status.logical_partition_id.value if status else ""
        guid = f"{gpu.guid:#x}" if gpu.guid else "-"
        rows.append((gpu.device_id - 1, guid, at or _absent(known), logical or _absent(known)))
    return columns(("GPU", "GUID", "DOMAIN", "LOGICAL PARTITION ID"), rows)


def _absent(known: bool) -> str:
    return "-" if known else "unknown"


def _observed_info(body: dict[str, Any], known: Any) -> pb.MachineNVLinkInfo:
    """The GPUs of the machine's slot in a controller's GPU list."""
    slot = str(known.gpus[0].slot_id) if known.gpus else "0"
    info = pb.MachineNVLinkInfo(chassis_serial=known.chassis_serial)
    info.domain_uuid.value = body["server_header"]["domain_uuid"]
    for gpu in body.get("gpu_info_list", ()):
        at = gpu["loc"]
        if (at.get("chassis_serial_number"), at["location"].get("slot_id", "0")) == (
            known.chassis_serial,
            slot,
        ):
            info.gpus.add(
                tray_index=int(at.get("tray_index", 0)),
                slot_id=int(slot),
                device_id=int(gpu["gpu_id"]),
                guid=int(gpu["gpu_uid"]),
            )
    if not info.gpus:
        raise Refused(f"the controller shows no GPU in slot {slot} of {known.chassis_serial}")
    return info


def _records(file: Path) -> list[_Record]:
    import yaml

    try:
        content = file.read_bytes()
        if file.suffix in (".yaml", ".yml"):
            return msgspec.convert(yaml.safe_load(content), list[_Record])
        return msgspec.json.decode(content, type=list[_Record])
    except OSError as error:
        raise Refused(f"{file} cannot be read: {why(error)}", nearest_fix=_RECORDS) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        told = " ".join(str(error).split())  # Errors of YAML are drawn over lines.
        raise Refused(f"{file} is not a list of machines: {told}", nearest_fix=_RECORDS) from error
