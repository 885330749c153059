"""`rackloom admin`: the operator's commands at a site, and their connection to it.

The connection is gRPC over mTLS. Address and certificates come from options or from environment
variables. A call times out after 60 s. UNAVAILABLE becomes `Retry`. Every other status becomes `Refused`,
with the nearest fix, which the server sends as trailing metadata. These calls do not use the web proxy of
the environment.

The commands themselves are in `admin_inventory`, `admin_partitions`, `admin_reservations`, `admin_import`
and `admin_audit`. They are named here by import path and imported when one is called, because the protobuf
modules take time to load.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import App, Parameter

from rackloom.cli.common import Format, Output, columns, emit, with_common_flags
from rackloom.errors import Misuse, Refused, Retry, file_error_text
from rackloom.serving.request_log import asked

# The connection.


CALL_SECONDS = 60.0
REPLY_BYTES = 256 * 1024 * 1024
"""A reply about a whole site exceeds gRPC's default limit (4 MiB)."""
FIX_METADATA = "nearest-fix-bin"


@dataclass(frozen=True)
class Connection:
    """Address of the admin interface, and the client certificate."""

    site: Annotated[str, Parameter(env_var="RACKLOOM_ADMIN_SITE")] = "localhost:1079"
    """HOST:PORT of the admin interface."""
    ca: Annotated[Path | None, Parameter(env_var="RACKLOOM_ADMIN_CA")] = None
    """Certificate authority of the site (PEM)."""
    cert: Annotated[Path | None, Parameter(env_var="RACKLOOM_ADMIN_CERT")] = None
    """Our certificate (PEM)."""
    key: Annotated[Path | None, Parameter(env_var="RACKLOOM_ADMIN_KEY")] = None
    """Key of our certificate (PEM)."""


@dataclass(frozen=True)
class Place(Connection):
    """The connection of a command, and how the command prints its answer."""

    output: Format = "table"


ConnectionParameters = Annotated[Connection, Parameter(name="*")]
DEFAULT_CONNECTION = Connection()
HERE = Place()
Reason = Annotated[str, Parameter(name="--reason", help="The reason, which is recorded.")]
Domain = Annotated[str, Parameter(help="Domain uuid.")]
MachineId = Annotated[str, Parameter(help="Machine id, name of its tray, or fabric GUID of a GPU.")]
Serial = Annotated[str, Parameter(name="--chassis-serial", help="Serial number of the chassis.")]
Url = Annotated[str, Parameter(name="--endpoint", help="https://HOST[:PORT] of its controller.")]
T = TypeVar("T")


def admin_command(function: Callable[..., T]) -> Callable[..., T]:
    """Replace the parameter `at` of a command by the options of `Place` and the flags of every command."""
    own = inspect.signature(function)
    options = {"at": (ConnectionParameters, DEFAULT_CONNECTION), "output": (Output, "table")}

    @wraps(function)
    def run(*args: Any, at: Connection = DEFAULT_CONNECTION, output: Format = "table", **others: Any) -> T:
        return function(*args, at=Place(**vars(at), output=output), **others)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]
    parameters = [parameter for name, parameter in own.parameters.items() if name != "at"]
    run.__signature__ = own.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
    run.__annotations__ = function.__annotations__ | {each.name: each.annotation for each in added}
    return with_common_flags(run)


PAGE_SIZE = 100
"""The server's limit on ids in one call."""


RpcCaller = Callable[[str, Any], Any]
"""Calls an RPC by name with a request, and returns the reply. Raises Refused or Retry."""


@contextmanager
def connect(at: Connection) -> Iterator[RpcCaller]:
    """Connect for RPCs of upstream's and our interface. Raises Refused if a file is missing."""
    import grpc

    from rackloom.carve.admin import forge_pb2_grpc, operator_pb2_grpc

    credentials = grpc.ssl_channel_credentials(
        _read_pem(at.ca, "--ca", "RACKLOOM_ADMIN_CA"),
        _read_pem(at.key, "--key", "RACKLOOM_ADMIN_KEY"),
        _read_pem(at.cert, "--cert", "RACKLOOM_ADMIN_CERT"),
    )
    # A proxy meant for the web must not see these calls.
    options = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", REPLY_BYTES))
    with grpc.secure_channel(at.site, credentials, options=options) as channel:
        ours, upstream = operator_pb2_grpc.OperatorStub(channel), forge_pb2_grpc.ForgeStub(channel)

        # No RPC has the same name in both interfaces.
        def call_rpc(rpc: str, request: Any) -> Any:
            with asked("CALL", at.site, rpc):
                return _call_rpc(getattr(ours, rpc, None) or getattr(upstream, rpc), request)

        yield call_rpc


def call(at: Connection, rpc: str, request: Any) -> Any:
    """Open a connection for a single RPC and return the reply."""
    with connect(at) as call_rpc:
        return call_rpc(rpc, request)


def emit_messages(
    found: Sequence[Any],
    output: Format,
    heads: Sequence[str],
    row: Callable[[Any], Sequence[object]],
    *,
    tenant: str | None = None,
) -> None:
    """Print protobuf messages as a table with a row each, or as JSON or YAML.

    `tenant` is the organisation that was listed. An empty result is reported on standard error with its name,
    because a misspelt organisation would look like an empty one.
    """
    emit([as_dict(message) for message in found], output, lambda: columns(heads, map(row, found)))
    if tenant and not found:
        print(f"nothing here is of organisation {tenant}", file=sys.stderr)


def as_dict(message: Any) -> dict[str, Any]:
    """A message as JSON with the field names of the wire. 64-bit numbers are text."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def timestamp(at: datetime | None) -> Any:
    """A time as a message, or None for None. A time without a zone is UTC."""
    from google.protobuf.timestamp_pb2 import Timestamp

    if at is None:
        return None
    found = Timestamp()
    found.FromDatetime(at if at.tzinfo else at.replace(tzinfo=UTC))
    return found


def utc_time(seconds: float) -> str:
    """A time in the format of tables."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def id_pages(ids: Sequence[Any]) -> list[Sequence[Any]]:
    """Split `ids` into pages that the server accepts in one call."""
    return [ids[start : start + PAGE_SIZE] for start in range(0, len(ids), PAGE_SIZE)]


def send_order(at: Place, rpc: str, request: Any) -> None:
    """Call an RPC of our interface that replies with a sentence, and print the sentence."""
    report(call(at, rpc, request).message, at.output)


def find_machine(call_rpc: RpcCaller, name: str) -> Any:
    """The only machine that `name` matches, in any form of a name."""
    from rackloom.carve.admin import forge_pb2 as pb

    request = pb.MachinesByIdsRequest()
    request.machine_ids.add(id=name)
    found = call_rpc("FindMachinesByIds", request).machines
    if len(found) != 1:
        why = f"there are several machines {name}" if found else f"there is no machine {name}"
        raise Refused(why, nearest_fix="see: rackloom admin machine list")
    return found[0]


def order_tray(at: Place, rpc: str, name: str, reason: str) -> None:
    """Call an RPC for the tray that `name` matches in any form, and print the sentence of the reply."""
    from rackloom.carve.admin import operator_pb2 as ours

    with connect(at) as call_rpc:
        request = ours.TrayRequest(machine_id=find_machine(call_rpc, name).id.id, reason=reason)
        report(call_rpc(rpc, request).message, at.output)


def report(message: str, output: Format, **fields: str) -> None:
    """Print the outcome as a sentence, or as JSON or YAML with `fields`."""
    emit({"message": message, **fields}, output, lambda: message)


def _read_pem(path: Path | None, option: str, variable: str) -> bytes:
    if path is None:
        raise Misuse(f"the admin interface needs {option}", nearest_fix=f"give {option} or set {variable}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(
            f"{path} cannot be read: {file_error_text(error)}", nearest_fix=f"give {option} a PEM file"
        ) from error


def _call_rpc(method: Any, request: Any) -> Any:
    import grpc

    try:
        return method(request, timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise Retry(f"the site did not answer: {error.details()}", after=1.0) from error
        metadata: Mapping[str, Any] = dict(error.trailing_metadata() or ())
        fix = metadata[FIX_METADATA].decode() if FIX_METADATA in metadata else None
        raise Refused(f"{error.details()} ({error.code().name})", nearest_fix=fix) from error


# The commands.


app = App(name="admin", help="Operate a site: switch controllers, machines, partitions, plans.")
# Each module is imported when its command is called: every command would pay for the imports of the others.
_COMMANDS = {
    "endpoint": ("admin_inventory:endpoint", "Switch controllers, by the chassis they speak for."),
    "browse": ("admin_inventory:browse", "Print what a controller itself answers, as JSON."),
    "credential": ("admin_inventory:credential", "Credentials of controllers."),
    "machine": ("admin_inventory:machine", "Machines and where their GPUs are in the fabric."),
    "instance": ("admin_inventory:instance", "Instances of tenants."),
    "logical-partition": ("admin_partitions:logical", "Logical partitions of tenants."),
    "partition": ("admin_partitions:partition", "Physical partitions, as the switch controllers show them."),
    "plan": ("admin_partitions:plan", "Show what would be done to a domain now."),
    "apply": ("admin_partitions:apply", "Carry out a plan."),
    "domain": ("admin_partitions:domain", "Show, pause and resume NVLink domains."),
    "reservation": ("admin_reservations:app", "Trays that wait for an organisation until a time."),
    "tray": ("admin_partitions:tray", "Cordon and drain trays."),
    "import": ("admin_import:app", "Take over what another control plane has run."),
    "audit": ("admin_audit:app", "Who requested what, and what came of it."),
}
for _name, (_where, _help) in _COMMANDS.items():
    app.command(f"rackloom.cli.{_where}", name=_name, help=_help)
