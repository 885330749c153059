"""`rackloom admin endpoint|browse|credential|machine|instance`: the inventory of the site.

An endpoint names the switch controller of a chassis. `browse` prints a controller's own answers. Credentials
go into the site's secret provider. Machines are listed, imported from a file (all of them or none), deleted,
and compared with the GPUs that their controller shows. `instance` changes which logical partition each GPU of
an instance joins. The given list is the whole desired state, so a GPU that is not in it is detached.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter
from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.fabric.controller import ControllerKind, controller_kind, url_of_kind
from rackloom.cli.admin import (
    DEFAULT_CONNECTION,
    HERE,
    ConnectionParameters,
    MachineId,
    Place,
    RpcCaller,
    Serial,
    Url,
    admin_command,
    as_dict,
    call,
    connect,
    emit_messages,
    find_machine,
    id_pages,
    report,
)
from rackloom.cli.common import FILE, Output, columns, emit, json_text, read_text, with_common_flags
from rackloom.errors import Refused, Undecodable, file_error_text
from rackloom.runtime.foreign_text import decode_json, decode_yaml_document

# Switch controllers and their credentials.


endpoint = App(name="endpoint", help="Switch controllers, by the chassis they speak for.")
credential = App(name="credential", help="Credentials of controllers.")
ControllerKindName = Annotated[
    Literal["nmx-c", "nmx-m"] | None,
    Parameter(help="Its protocol, by default from the address: that of an NMX-M ends in /nmx/v1."),
]
PasswordKind = Annotated[
    Literal["nmx-m"], Parameter(help="nmx-m: the only controllers that take a password.")
]


@endpoint.command(name="show")
@admin_command
def endpoint_show(
    *, chassis_serial: Annotated[str | None, Parameter(help="Only this chassis.")] = None, at: Place = HERE
) -> None:
    """List the switch controller of each chassis."""
    rows = [
        (entry.chassis_serial, str(controller_kind(entry.endpoint)), entry.endpoint)
        for entry in call(at, "ListNvlinkNmxcEndpoints", Empty()).entries
        if chassis_serial in (None, entry.chassis_serial)
    ]
    value = [{"chassis_serial": serial, "endpoint": url, "kind": kind} for serial, kind, url in rows]
    emit(value, at.output, lambda: columns(("CHASSIS SERIAL", "KIND", "ENDPOINT"), rows))


def _add_put_command(verb: str, help_text: str) -> None:
    """`create` and `update` have the same parameters. Only the RPC differs."""

    @admin_command
    def put(*, chassis_serial: Serial, url: Url, kind: ControllerKindName = None, at: Place = HERE) -> None:
        whole = url if kind is None else url_of_kind(url, ControllerKind(kind))
        request = pb.NvlinkNmxcEndpoint(chassis_serial=chassis_serial, endpoint=whole)
        call(at, f"{verb.title()}NvlinkNmxcEndpoint", request)
        report(
            f"{verb}d {chassis_serial} -> {whole}", at.output, chassis_serial=chassis_serial, endpoint=whole
        )

    endpoint.command(put, name=verb, help=help_text)


_add_put_command("create", "Register the controller of a chassis; the site speaks to it at once.")
_add_put_command("update", "Give a chassis another controller, or another address of it.")


@endpoint.command(name="delete")
@admin_command
def endpoint_delete(*, chassis_serial: Serial, at: Place = HERE) -> None:
    """Disconnect from the controller of a chassis. The state that it reported becomes unknown."""
    call(at, "DeleteNvlinkNmxcEndpoint", pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial=chassis_serial))
    report(f"deleted {chassis_serial}", at.output, chassis_serial=chassis_serial)


@with_common_flags
def browse(
    *,
    chassis_serial: Annotated[Serial, Parameter(help="Chassis whose controller is asked.")],
    operation: Annotated[
        Literal["compute-node-info-list", "gpu-info", "gpu-info-list"], Parameter(help="The request to send.")
    ],
    gpu_uid: Annotated[str, Parameter(help="Fabric GUID for gpu-info, decimal or 0x hexadecimal.")] = "0",
    at: ConnectionParameters = DEFAULT_CONNECTION,
) -> None:
    """Print a controller's own answer as JSON."""
    with connect(at) as call_rpc:
        print(browse_controller(call_rpc, chassis_serial, operation, int(gpu_uid, 0)))


@credential.command(name="add")
@admin_command
def credential_add(
    kind: PasswordKind,
    *,
    username: Annotated[str, Parameter(help="The name.")],
    password_file: Annotated[
        Path | None, Parameter(help="File whose first line is the password; asked for where left out.")
    ] = None,
    at: Place = HERE,
) -> None:
    """Store the name and password of a controller in the site's secret provider."""
    request = pb.CredentialCreationRequest(
        credential_type=pb.NmxM, username=username, password=_read_password(password_file)
    )
    call(at, "CreateCredential", request)
    report(f"kept the credential of {kind}", at.output, kind=kind)


@credential.command(name="delete")
@admin_command
def credential_delete(kind: PasswordKind, *, at: Place = HERE) -> None:
    """Delete the stored name and password of a controller."""
    call(at, "DeleteCredential", pb.CredentialDeletionRequest(credential_type=pb.NmxM))
    report(f"forgot the credential of {kind}", at.output, kind=kind)


def browse_controller(call_rpc: RpcCaller, chassis_serial: str, operation: str, gpu_uid: int) -> str:
    """A controller's answer as JSON."""
    name = f"NMXC_BROWSE_OPERATION_{operation.replace('-', '_').upper()}"
    number = pb.NmxcBrowseOperation.Value(name)
    request = pb.NmxcBrowseRequest(chassis_serial=chassis_serial, operation=number, gpu_uid=gpu_uid)
    return str(call_rpc("NmxcBrowse", request).body)


def _read_password(file: Path | None) -> str:
    if file is not None:
        return read_text(file, "write the password on its first line").partition("\n")[0]
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    from getpass import getpass

    return getpass()


# Machines and instances.


machine = App(name="machine", help="Machines and where their GPUs are in the fabric.")
nvlink_info = App(name="nvlink-info", help="The GPU mapping of a machine.")
machine.command(nvlink_info)
instance = App(name="instance", help="Instances of tenants.")
CONFIG_HELP = (
    'JSON: {"gpu_configs": [{"device_instance": 0, "logical_partition_id": "..."}]}; the list is the whole'
    " wish, so a GPU that is not in it is detached."
)


class _MachineRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chassis_serial: str
    slot: int
    tray_index: int
    rack: str
    gpus: int
    id: str = ""


_RECORDS_FIX = "write a list of {chassis_serial, slot, tray_index, rack, gpus}"


class _GpuConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device_instance: int
    logical_partition_id: str


class _InstanceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu_configs: list[_GpuConfig]


@machine.command(name="list")
@admin_command
def machine_list(*, at: Place = HERE) -> None:
    """List the machines with their place, domain and state."""
    with connect(at) as call_rpc:
        ids = call_rpc("FindMachineIds", pb.MachineSearchConfig()).machine_ids
        requests = [pb.MachinesByIdsRequest(machine_ids=page) for page in id_pages(ids)]
        found = [row for request in requests for row in call_rpc("FindMachinesByIds", request).machines]
    heads = ("MACHINE", "CHASSIS SERIAL", "SLOT", "DOMAIN", "GPUS", "STATE")
    emit_messages(found, at.output, heads, _machine_row)


@machine.command(name="import")
@admin_command
def machine_import(
    file: Annotated[
        Path,
        FILE,
        Parameter(help="A list of {chassis_serial, slot, tray_index, rack, gpus, id}; id may be left out."),
    ],
    *,
    at: Place = HERE,
) -> None:
    """Add all machines of a file (JSON or YAML), or none if one is refused."""
    records = [ours.MachineRecord(**msgspec.structs.asdict(record)) for record in _read_records(file)]
    reply = call(at, "ImportMachines", ours.ImportRequest(machines=records))
    rows = [(id_, result) for result in ("created", "unchanged") for id_ in getattr(reply, result)]
    emit(as_dict(reply), at.output, lambda: columns(("MACHINE", "RESULT"), rows))


@machine.command(name="force-delete")
@admin_command
def machine_force_delete(
    *, machine_id: Annotated[str, Parameter(name="--machine", help="Machine id.")], at: Place = HERE
) -> int:
    """Release the workload of a machine and delete the machine. Exit code 1: not done yet, repeat it."""
    reply = call(at, "AdminForceDeleteMachine", pb.AdminForceDeleteMachineRequest(host_query=machine_id))
    if reply.all_done:
        report(f"deleted {machine_id}", at.output, machine=machine_id)
        return 0
    report(
        f"releasing instance {reply.instance_id} of {machine_id}: its GPUs are still to leave the fabric",
        at.output,
        machine=machine_id,
        instance=reply.instance_id,
    )
    return 1


@nvlink_info.command(name="show")
@with_common_flags
def nvlink_info_show(
    machine_id: MachineId, *, at: ConnectionParameters = DEFAULT_CONNECTION, output: Output = "json"
) -> None:
    """Show the GPU mapping of a machine, and the partition in which each GPU was last seen."""
    with connect(at) as call_rpc:
        found = find_machine(call_rpc, machine_id)
    observed = found.nvlink_status_observation if found.HasField("nvlink_status_observation") else None
    value = {
        "nvlink_info": as_dict(found.nvlink_info),
        "nvlink_status_observation": None if observed is None else as_dict(observed),
    }
    emit(value, output, lambda: _gpu_table(found))


@nvlink_info.command(name="populate")
@with_common_flags
def nvlink_info_populate(
    machine_id: MachineId,
    *,
    update_db: Annotated[
        bool, Parameter(negative="", help="Also write it into the records, as a repair.")
    ] = False,
    at: ConnectionParameters = DEFAULT_CONNECTION,
) -> None:
    """Read the GPU mapping of a machine from its controller now, as the site does regularly, and print it."""
    with connect(at) as call_rpc:
        found = find_machine(call_rpc, machine_id)
        known = found.nvlink_info
        body = decode_json(
            browse_controller(call_rpc, known.chassis_serial, "gpu-info-list", 0), "the controller"
        )
        info = _observed_info(body, known)
        print(json_text(as_dict(info)))
        if update_db:
            request = pb.UpdateMachineNvLinkInfoRequest(nvlink_info=info)
            request.machine_id.id = found.id.id
            call_rpc("UpdateMachineNvLinkInfo", request)


@instance.command(name="update-nvlink-config")
@admin_command
def instance_update(
    *,
    instance_id: Annotated[str, Parameter(name=["--instance", "-i"], help="Instance id.")],
    config: Annotated[str, Parameter(help=CONFIG_HELP)],
    at: Place = HERE,
) -> None:
    """Change which logical partition each GPU of an instance joins."""
    try:
        wanted = decode_json(config, "--config", _InstanceConfig)
    except Undecodable as error:
        fix = 'use {"gpu_configs": [{"device_instance": 0, "logical_partition_id": "..."}]}'
        raise Refused(f"--config: {error.reason}", nearest_fix=fix) from error
    request = pb.InstanceConfigUpdateRequest()
    request.instance_id.value = instance_id
    request.config.nvlink.SetInParent()
    for gpu_config in wanted.gpu_configs:
        entry = request.config.nvlink.gpu_configs.add(device_instance=gpu_config.device_instance)
        entry.logical_partition_id.value = gpu_config.logical_partition_id
    after = call(at, "UpdateInstanceConfig", request)
    gpus = after.config.nvlink.gpu_configs
    rows = [(f"gpu-{gpu.device_instance}", gpu.logical_partition_id.value) for gpu in gpus]
    emit(as_dict(after), at.output, lambda: columns(("GPU", "LOGICAL PARTITION ID"), rows))


def _machine_row(row: Any) -> tuple[object, ...]:
    info = row.nvlink_info
    slot = info.gpus[0].slot_id if info.gpus else "-"
    return (
        row.id.id,
        info.chassis_serial,
        slot,
        info.domain_uuid.value or "-",
        len(info.gpus),
        row.state,
    )


def _gpu_table(found: Any) -> str:
    by_guid = {gpu.guid: gpu for gpu in found.nvlink_status_observation.gpu_status}
    known = found.HasField("nvlink_status_observation")
    rows = []
    for gpu in found.nvlink_info.gpus:
        status = by_guid.get(gpu.guid)
        at = status.domain_id.value if status else ""
        logical = status.logical_partition_id.value if status else ""
        guid = f"{gpu.guid:#x}" if gpu.guid else "-"
        name, absent = f"gpu-{gpu.device_id - 1}", "-" if known else "unknown"
        rows.append((name, guid, at or absent, logical or absent))
    return columns(("GPU", "GUID", "DOMAIN", "LOGICAL PARTITION ID"), rows)


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


def _read_records(file: Path) -> list[_MachineRecord]:

    try:
        content = file.read_bytes()
        if file.suffix in (".yaml", ".yml"):
            return msgspec.convert(decode_yaml_document(content, file.name), list[_MachineRecord])
        return decode_json(content, file.name, list[_MachineRecord])
    except OSError as error:
        raise Refused(f"{file} cannot be read: {file_error_text(error)}", nearest_fix=_RECORDS_FIX) from error
    except ValueError as error:
        # A YAML error spans several lines.
        message = " ".join(str(getattr(error, "reason", error)).split())
        raise Refused(f"{file} is not a list of machines: {message}", nearest_fix=_RECORDS_FIX) from error
