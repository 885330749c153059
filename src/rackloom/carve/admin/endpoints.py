"""RPCs about switch controllers: registration, browsing, NMX-M credentials, and the service version.

Browsing queries the controller and returns its answer as JSON. NMX-M is the only controller that takes a
password, so `CreateCredential` accepts no other type. Upstream's clients call `Version` first, to check the
connection.
"""

from importlib.metadata import version

from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.inventory import endpoints
from rackloom.carve.store.values import invalid, not_found

# Controllers.


DEFAULT_REASON = "asked for through the admin interface"

_BROWSE_RPCS = {
    pb.NMXC_BROWSE_OPERATION_COMPUTE_NODE_INFO_LIST: "GetComputeNodeInfoList",
    pb.NMXC_BROWSE_OPERATION_GPU_INFO: "GetGpuInfoList",
    pb.NMXC_BROWSE_OPERATION_GPU_INFO_LIST: "GetGpuInfoList",
}


async def list_endpoints(deps: AdminDeps, _request: Empty) -> pb.NvlinkNmxcEndpointList:
    """Every chassis with its endpoint, by serial."""
    found = await deps.store.read(endpoints.all_endpoints)
    urls = {serial: endpoint.url for endpoint in found for serial in endpoint.chassis_serials}
    entries = [pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=urls[serial]) for serial in sorted(urls)]
    return pb.NvlinkNmxcEndpointList(entries=entries)


async def create_endpoint(deps: AdminDeps, request: pb.NvlinkNmxcEndpoint) -> pb.NvlinkNmxcEndpoint:
    """Register a controller, which is read at once."""
    return await _put_endpoint(deps, request, exists=False)


async def update_endpoint(deps: AdminDeps, request: pb.NvlinkNmxcEndpoint) -> pb.NvlinkNmxcEndpoint:
    """Give a chassis another address."""
    return await _put_endpoint(deps, request, exists=True)


async def delete_endpoint(deps: AdminDeps, request: pb.DeleteNvlinkNmxcEndpointRequest) -> Empty:
    """Delete the endpoint of a chassis."""
    await deps.change(
        lambda conn: endpoints.delete_chassis_endpoint(
            conn, request.chassis_serial, deps.order(DEFAULT_REASON)
        )
    )
    deps.endpoints_changed()
    return Empty()


async def browse_controller(deps: AdminDeps, request: pb.NmxcBrowseRequest) -> pb.NmxcBrowseResponse:
    """The answer of the controller, as JSON."""
    rpc = _BROWSE_RPCS.get(request.operation)
    if rpc is None:
        raise invalid("operation must be COMPUTE_NODE_INFO_LIST, GPU_INFO or GPU_INFO_LIST")
    one_gpu = request.operation == pb.NMXC_BROWSE_OPERATION_GPU_INFO
    if one_gpu and not request.gpu_uid:
        raise invalid("gpu_uid is needed for GPU_INFO")
    found = await deps.store.read(endpoints.all_endpoints)
    mine = [endpoint for endpoint in found if request.chassis_serial in endpoint.chassis_serials]
    if not mine:
        raise not_found(f"no NMX-C endpoint is registered for chassis {request.chassis_serial}")
    body = await deps.browse(mine[0], rpc, request.gpu_uid if one_gpu else 0)
    return pb.NmxcBrowseResponse(body=body, code=200, headers={"content-type": "application/json"})


async def _put_endpoint(
    deps: AdminDeps, request: pb.NvlinkNmxcEndpoint, *, exists: bool
) -> pb.NvlinkNmxcEndpoint:
    write = endpoints.update_chassis_endpoint if exists else endpoints.create_chassis_endpoint
    if not request.endpoint:
        raise invalid("endpoint must not be empty")
    deps.check_endpoint(request.endpoint)
    await deps.change(
        lambda conn: write(
            conn, request.chassis_serial, request.endpoint, deps.order(DEFAULT_REASON), deps.ids
        )
    )
    deps.endpoints_changed()
    return request


# Credentials.


NMX_M_CREDENTIAL = "nmxm/default/auth"
"""Upstream's path."""


async def create_credential(
    deps: AdminDeps, request: pb.CredentialCreationRequest
) -> pb.CredentialCreationResult:
    """Store the name and password for NMX-M."""
    _check_credential_type(request.credential_type)
    if not request.username or not request.password:
        raise invalid("username and password must not be empty")
    await deps.credentials.keep(
        NMX_M_CREDENTIAL, {"username": request.username, "password": request.password}
    )
    return pb.CredentialCreationResult()


async def delete_credential(
    deps: AdminDeps, request: pb.CredentialDeletionRequest
) -> pb.CredentialDeletionResult:
    """Delete the name and password for NMX-M."""
    _check_credential_type(request.credential_type)
    await deps.credentials.forget(NMX_M_CREDENTIAL)
    return pb.CredentialDeletionResult()


def _check_credential_type(kind: pb.CredentialType.ValueType) -> None:
    if kind != pb.NmxM:
        raise invalid("credential_type must be NmxM: switch controllers take no other password")


# Version.


async def show_version(_deps: AdminDeps, _request: pb.VersionRequest) -> pb.BuildInfo:
    """The version of this service, and nothing about its build or configuration."""
    return pb.BuildInfo(build_version=f"rackloom {version('rackloom')}")
