"""The operator's connection to a site: gRPC over mTLS, and what its refusals mean to a person."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rackloom.cli.output import Output
from rackloom.errors import Refused, Retry, why

SECONDS = 60.0
FIX = "nearest-fix-bin"


@dataclass(frozen=True)
class Connection:
    """Where the admin interface is, and who we are."""

    site: Annotated[str, Parameter(env_var="RACKLOOM_ADMIN_SITE")] = "localhost:1079"
    """HOST:PORT of the admin interface."""
    ca: Annotated[Path | None, Parameter(env_var="RACKLOOM_ADMIN_CA")] = None
    """Certificate authority of the site (PEM)."""
    cert: Annotated[Path | None, Parameter(env_var="RACKLOOM_ADMIN_CERT")] = None
    """Our certificate (PEM)."""
    key: Annotated[Path | None, Parameter(env_var="RACKLOOM_ADMIN_KEY")] = None
    """Key of our certificate (PEM)."""


At = Annotated[Connection, Parameter(name="*")]
HERE = Connection()
Printed = Annotated[Output, Parameter(help="How to print.")]
Reason = Annotated[str, Parameter(name="--reason", help="Why; it is recorded.")]
Domain = Annotated[str, Parameter(help="Domain uuid.")]
MachineId = Annotated[str, Parameter(help="Machine id.")]
Serial = Annotated[str, Parameter(name="--chassis-serial", help="Serial number of the chassis.")]
Url = Annotated[str, Parameter(name="--endpoint", help="https://HOST[:PORT] of its controller.")]
PAGE = 100
"""The server's limit on ids in one call."""


class Client:
    """Calls RPCs of the site by name."""

    def __init__(self, channel: Any) -> None:
        from rackloom.carve.admin import forge_pb2_grpc, operator_pb2_grpc

        self._forge = forge_pb2_grpc.ForgeStub(channel)
        self._operator = operator_pb2_grpc.OperatorStub(channel)

    def forge(self, rpc: str, request: Any) -> Any:
        """The reply of an RPC of upstream's interface. Raises Refused or Retry."""
        return _call(getattr(self._forge, rpc), request)

    def operator(self, rpc: str, request: Any) -> Any:
        """The reply of an RPC of our own interface. Raises Refused or Retry."""
        return _call(getattr(self._operator, rpc), request)


@contextmanager
def connect(at: Connection) -> Iterator[Client]:
    """A client of the site. Refused when a file is missing."""
    import grpc

    credentials = grpc.ssl_channel_credentials(
        _read(at.ca, "--ca", "RACKLOOM_ADMIN_CA"),
        _read(at.key, "--key", "RACKLOOM_ADMIN_KEY"),
        _read(at.cert, "--cert", "RACKLOOM_ADMIN_CERT"),
    )
    # A proxy meant for the web must not see these calls.
    with grpc.secure_channel(at.site, credentials, options=(("grpc.enable_http_proxy", 0),)) as channel:
        yield Client(channel)


def as_dict(message: Any) -> dict[str, Any]:
    """A message as JSON has it, with the field names of the wire; 64-bit numbers are text."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def pages(ids: Sequence[Any]) -> list[Sequence[Any]]:
    """`ids` in parts that one call may ask for."""
    return [ids[start : start + PAGE] for start in range(0, len(ids), PAGE)]


def order(at: Connection, rpc: str, request: Any) -> None:
    """Give an order whose answer is a sentence, and print that."""
    with connect(at) as site:
        print(site.operator(rpc, request).message)


def _read(path: Path | None, option: str, variable: str) -> bytes:
    if path is None:
        raise Refused(f"the admin interface needs {option}", nearest_fix=f"give {option} or set {variable}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(
            f"{path} cannot be read: {why(error)}", nearest_fix=f"give {option} a PEM file"
        ) from error


def _call(method: Any, request: Any) -> Any:
    import grpc

    try:
        return method(request, timeout=SECONDS)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise Retry(f"the site did not answer: {error.details()}", after=1.0) from error
        metadata: Mapping[str, Any] = dict(error.trailing_metadata() or ())
        fix = metadata[FIX].decode() if FIX in metadata else None
        raise Refused(f"{error.details()} ({error.code().name})", nearest_fix=fix) from error
