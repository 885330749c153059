"""RPCs about switch controllers: which there are, and what one of them says."""

from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.site import endpoint_registry, endpoints
from rackloom.carve.site.problems import invalid, not_found

REASON = "asked for through the admin interface"

_BROWSE = {
    pb.NMXC_BROWSE_OPERATION_COMPUTE_NODE_INFO_LIST: "GetComputeNodeInfoList",
    pb.NMXC_BROWSE_OPERATION_GPU_INFO: "GetGpuInfoList",
    pb.NMXC_BROWSE_OPERATION_GPU_INFO_LIST: "GetGpuInfoList",
}


async def list_all(deps: AdminDeps, _request: Empty) -> pb.NvlinkNmxcEndpointList:
    """Every chassis with its endpoint, by serial."""
    found = await deps.store.read(endpoints.every)
    urls = {serial: one.url for one in found for serial in one.chassis_serials}
    entries = [pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=urls[serial]) for serial in sorted(urls)]
    return pb.NvlinkNmxcEndpointList(entries=entries)


async def create(deps: AdminDeps, request: pb.NvlinkNmxcEndpoint) -> pb.NvlinkNmxcEndpoint:
    """Register a controller; it is spoken to at once."""
    return await _put(deps, request, exists=False)


async def update(deps: AdminDeps, request: pb.NvlinkNmxcEndpoint) -> pb.NvlinkNmxcEndpoint:
    """Give a chassis another address."""
    return await _put(deps, request, exists=True)


async def delete(deps: AdminDeps, request: pb.DeleteNvlinkNmxcEndpointRequest) -> Empty:
    """Stop speaking to a controller."""
    await deps.change(lambda conn: endpoint_registry.delete(conn, request.chassis_serial, deps.order(REASON)))
    deps.endpoints_changed()
    return Empty()


async def browse(deps: AdminDeps, request: pb.NmxcBrowseRequest) -> pb.NmxcBrowseResponse:
    """What the controller itself answers, as JSON."""
    rpc = _BROWSE.get(request.operation)
    if rpc is None:
        raise invalid("operation must be COMPUTE_NODE_INFO_LIST, GPU_INFO or GPU_INFO_LIST")
    one_gpu = request.operation == pb.NMXC_BROWSE_OPERATION_GPU_INFO
    if one_gpu and not request.gpu_uid:
        raise invalid("gpu_uid is needed for GPU_INFO")
    found = await deps.store.read(endpoints.every)
    mine = [one for one in found if request.chassis_serial in one.chassis_serials]
    if not mine:
        raise not_found(f"no NMX-C endpoint is registered for chassis {request.chassis_serial}")
    body = await deps.browse(mine[0], rpc, request.gpu_uid if one_gpu else 0)
    return pb.NmxcBrowseResponse(body=body, code=200, headers={"content-type": "application/json"})


async def _put(deps: AdminDeps, request: pb.NvlinkNmxcEndpoint, *, exists: bool) -> pb.NvlinkNmxcEndpoint:
    write = endpoint_registry.update if exists else endpoint_registry.create
    if not request.endpoint:
        raise invalid("endpoint must not be empty")
    deps.check_endpoint(request.endpoint)
    await deps.change(
        lambda conn: write(conn, request.chassis_serial, request.endpoint, deps.order(REASON), deps.ids)
    )
    deps.endpoints_changed()
    return request
