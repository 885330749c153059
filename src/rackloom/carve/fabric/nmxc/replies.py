"""What a reply says before its content: whether it succeeded, and which domain is speaking.

A call that gRPC reports as OK may still have been refused: the answer is in the return code of the server
header, and a reply without that header says nothing.
"""

import uuid
from typing import Any

import grpc.aio

from rackloom.carve.fabric.nmxc.nmx_c_pb2 import NMX_ST_SUCCESS, ServerHeader, StReturnCode
from rackloom.carve.fabric.ports import FabricRefused, FabricUnavailable

_UNDECIDED = frozenset({"UNDEFINED", "TIMEOUT"})
"""Return codes after which the change may have been made all the same."""

_NOT_DONE = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
"""gRPC statuses by which a server says that it did not act. After any other the outcome is unknown."""


def require_success(rpc: str, reply: Any) -> ServerHeader:
    """The header of `reply`, any NMX-C response, if it says success.

    Raises FabricRefused with the return code's name (StReturnCode without its prefix), FabricUnavailable
    where the reply leaves open what happened.
    """
    if not reply.HasField("server_header"):
        raise FabricUnavailable(f"{rpc}: the reply has no server header")
    header: ServerHeader = reply.server_header
    code = header.return_code
    if code == NMX_ST_SUCCESS:
        return header
    name = code_name(code)
    if name in _UNDECIDED:
        raise FabricUnavailable(f"{rpc}: the controller answered {name}")
    raise FabricRefused(name, f"{rpc}: the controller answered {name}")


def code_name(code: StReturnCode.ValueType) -> str:
    """Name of a return code, as `RESOURCE_IN_USE`; the number itself where it is not a published one."""
    try:
        return StReturnCode.Name(code).removeprefix("NMX_ST_")
    except ValueError:
        return str(code)


def domain_of(header: ServerHeader) -> str:
    """Domain uuid in lower case. Raises FabricUnavailable unless it is a uuid that names something."""
    try:
        domain = uuid.UUID(header.domain_uuid)
    except ValueError:
        domain = uuid.UUID(int=0)
    if domain.int == 0:
        raise FabricUnavailable(f"Hello: domain uuid {header.domain_uuid!r} names no domain")
    return str(domain)


def from_status(rpc: str, error: grpc.aio.AioRpcError) -> FabricUnavailable | FabricRefused:
    """What a failed call means to the caller of `execute`."""
    message = f"{rpc}: {error.code().name}: {error.details()}"
    if error.code() in _NOT_DONE:
        return FabricRefused(error.code().name, message)
    return FabricUnavailable(message)
