"""How the plugin and its devices are, for kubelet and for probes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from rackloom.claim.node.plugin import Plugin
from rackloom.claim.node.rpc import generic, serialized
from rackloom.claim.node.values import DeviceHealth, Health
from rackloom.claim.node.wire import dra_v1_pb2, dra_v1_pb2_grpc, registration_pb2, registration_pb2_grpc
from rackloom.claim.node.wire import health_v1alpha1_pb2 as wire

LOOK_SECONDS = 10.0
"""Between two looks at the devices."""
TIMEOUT_SECONDS = 60
"""A device that was not looked at for so long is unknown to kubelet."""
PROBE_SECONDS = 5.0
_STATUS = {
    Health.HEALTHY: wire.HEALTHY,
    Health.UNHEALTHY: wire.UNHEALTHY,
    Health.UNKNOWN: wire.UNKNOWN,
}


def device_health_handler(plugin: Plugin) -> grpc.GenericRpcHandler:
    """The DRAResourceHealth service: all devices at once, again at every look."""

    async def watch(_request: Any, _context: Any) -> AsyncIterator[wire.NodeWatchResourcesResponse]:
        while True:
            yield wire.NodeWatchResourcesResponse(devices=[_told(one) for one in await plugin.health()])
            await asyncio.sleep(LOOK_SECONDS)

    method = grpc.unary_stream_rpc_method_handler(
        watch,
        request_deserializer=wire.NodeWatchResourcesRequest.FromString,
        response_serializer=serialized,
    )
    return grpc.method_handlers_generic_handler("v1alpha1.DRAResourceHealth", {"NodeWatchResources": method})


def probe_handler(is_serving: Callable[[], Any]) -> grpc.GenericRpcHandler:
    """The standard health service for the names "" and "liveness"; `is_serving` is a coroutine function."""

    async def check(request: Any, context: Any) -> Any:
        if request.service not in ("", "liveness"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        serving = await is_serving()
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if serving else status.NOT_SERVING)

    return generic("grpc.health.v1.Health", {"Check": (check, health_pb2.HealthCheckRequest)})


async def answers_kubelet(registrar: Path, dra: Path) -> bool:
    """Whether a call on each of the plugin's own sockets comes back, as kubelet's would."""
    try:
        async with grpc.aio.insecure_channel(f"unix:{registrar}") as channel:
            registration = registration_pb2_grpc.RegistrationStub(channel)
            await registration.GetInfo(registration_pb2.InfoRequest(), timeout=PROBE_SECONDS)
        async with grpc.aio.insecure_channel(f"unix:{dra}") as channel:
            plugin = dra_v1_pb2_grpc.DRAPluginStub(channel)
            await plugin.NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest(), timeout=PROBE_SECONDS)
    except grpc.aio.AioRpcError:
        return False
    return True


def _told(one: DeviceHealth) -> wire.DeviceHealth:
    return wire.DeviceHealth(
        device=wire.DeviceIdentifier(pool_name=one.pool, device_name=one.device),
        health=_STATUS[one.health],
        last_updated_time=int(one.observed_at),
        health_check_timeout_seconds=TIMEOUT_SECONDS,
        message=one.message,
    )
