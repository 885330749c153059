"""A simulated NMX-M as an ASGI application: the REST interface `/nmx/v1` over several fabrics.

It serves the collections for partitioning: chassis, compute nodes, GPUs, partitions and operations.
Services, ports, switches, metrics and KPIs are not simulated.

The id of an entity is a digest that cannot be joined to a GUID by accident. A partition
that is deleted and created again gets a new entity id. Changes are asynchronous: a request is accepted
with an operation id, and the operation takes `seconds`, half of them before the change and half after
it. It may fail, stall, or be cancelled. A member list is replaced as a whole (PUT), so a concurrent
writer can lose an update, as on a real NMX-M.

`NmxmService` checks the basic credentials, applies the next fault for the request, and then routes it.
"""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rackloom.core.partitions.domain import GpuHealth, PartitionHealth
from rackloom.lab.switches.fabric import (
    MAX_NAME,
    FabricGpu,
    FabricPartition,
    FabricRefusal,
    FabricSnapshot,
    SimulatedFabric,
)
from rackloom.lab.switches.faults import NmxmFault, NmxmFaults

# Entities: the JSON documents of the REST interface.


Json = dict[str, Any]
CREATED = "2026-01-01T00:00:00Z"
"""Every entity's: the simulation has no idea of the time of day."""

_GPU_HEALTH = {GpuHealth.DEGRADED_BANDWIDTH: "DEGRADED_BW"}


def list_chassis(fabric: SimulatedFabric) -> list[Json]:
    """Every chassis with a GPU in it."""
    numbers = {gpu.chassis_id: gpu.chassis_serial for gpu in fabric.gpus.values()}
    return [
        _named_entity(f"chassis {fabric.domain} {number}")
        | {"DomainUUID": fabric.domain, "InternalID": number, "SerialNumber": numbers[number]}
        for number in sorted(numbers)
    ]


def list_nodes(fabric: SimulatedFabric) -> list[Json]:
    """Every tray with a GPU in it."""
    trays = {gpu.host_id: gpu for gpu in fabric.gpus.values()}
    return [
        _named_entity(f"node {fabric.domain} {host_id}")
        | {"DomainUUID": fabric.domain, "LocationInfo": _tray_location(trays[host_id]), "Health": "HEALTHY"}
        for host_id in sorted(trays)
    ]


def list_gpus(fabric: SimulatedFabric) -> list[Json]:
    """Every GPU, by slot."""
    return [_gpu_entity(fabric, gpu, partition) for gpu, partition in fabric.gpus_by_slot()]


def partition_entity(fabric: SimulatedFabric, fabric_partition: FabricPartition, entity: str) -> Json:
    """One partition, its members by entity or by location, depending on its type."""
    if fabric_partition.guid_based:
        members: list[Any] = [gpu_entity_id(guid) for guid in fabric_partition.guids]
    else:
        members = [_gpu_location(fabric, gpu) for gpu in fabric.present_members(fabric_partition)]
    return {
        "ID": entity,
        "PartitionID": fabric_partition.id,
        "Name": fabric_partition.name,
        "Type": "ID_BASED" if fabric_partition.guid_based else "LOCATION_BASED",
        "Health": PartitionHealth(fabric_partition.health).name,
        "Members": members or None,
        "CreatedAt": CREATED,
        "UpdatedAt": CREATED,
    }


def gpu_entity_id(guid: int) -> str:
    """The id of a GPU."""
    return entity_digest(f"gpu {guid}")


def entities_of_gpus(fabrics: Iterable[SimulatedFabric]) -> Iterator[tuple[str, SimulatedFabric, int]]:
    """Entity, fabric and GUID of every GPU that is there or that a partition names."""
    for fabric in fabrics:
        for guid in sorted(fabric.known_guids()):
            yield gpu_entity_id(guid), fabric, guid


def entity_digest(what: str) -> str:
    """24 hexadecimal digits."""
    return hashlib.blake2b(what.encode(), digest_size=12).hexdigest()


def _named_entity(what: str) -> Json:
    return {"ID": entity_digest(what), "Name": what, "CreatedAt": CREATED, "UpdatedAt": CREATED}


def _gpu_entity(fabric: SimulatedFabric, gpu: FabricGpu, held_by: int) -> Json:
    return {
        "ID": gpu_entity_id(gpu.guid),
        "DomainUUID": fabric.domain,
        "LocationInfo": _tray_location(gpu),
        "DeviceUID": gpu.guid,
        "DeviceID": gpu.module_id,
        "DevicePcieID": 0,
        "SystemUID": 0,
        "VendorID": 0,
        "ALIDList": [],
        "PortIDList": [],
        "PartitionID": held_by,
        "Health": _GPU_HEALTH.get(gpu.health, gpu.health.name),
    }


def _tray_location(gpu: FabricGpu) -> Json:
    return {
        "ChassisID": gpu.chassis_id,
        "ChassisSerialNumber": gpu.chassis_serial,
        "SlotID": gpu.slot,
        "TrayIndex": gpu.tray_index,
        "HostID": gpu.host_id,
    }


def _gpu_location(fabric: SimulatedFabric, gpu: FabricGpu) -> Json:
    return {
        "DomainUUID": fabric.domain,
        "ChassisID": gpu.chassis_id,
        "SlotID": gpu.slot,
        "HostID": gpu.host_id,
        "DeviceID": gpu.module_id,
    }


# Entity ids of partitions, and asynchronous operations.


class PartitionEntities:
    """The partitions of several fabrics with their entity ids: one that is made again has another id."""

    def __init__(self, fabrics: Iterable[SimulatedFabric]) -> None:
        self._fabrics = tuple(fabrics)
        self._entities: dict[tuple[str, int, str], str] = {}
        self._made = 0
        self._shown = self.now()
        self.before = self._shown
        """All partitions as they were before the newest change."""
        for fabric in self._fabrics:
            fabric.on_change(self._changed)

    def now(self) -> list[Json]:
        """All partitions as they are."""
        present = {
            (fabric.domain, partition.id, partition.name): (fabric, partition)
            for fabric, partition in self._every()
        }
        for gone in self._entities.keys() - present.keys():
            del self._entities[gone]
        for key in [key for key in present if key not in self._entities]:
            self._made += 1
            self._entities[key] = entity_digest(f"partition {self._made}")
        return [
            partition_entity(fabric, partition, self._entities[key])
            for key, (fabric, partition) in present.items()
        ]

    def find(self, entity: str) -> tuple[SimulatedFabric, FabricPartition] | None:
        """The partition of this id."""
        for fabric, partition in self._every():
            if self._entities.get((fabric.domain, partition.id, partition.name)) == entity:
                return fabric, partition
        return None

    def _every(self) -> Iterator[tuple[SimulatedFabric, FabricPartition]]:
        for fabric in self._fabrics:
            for partition in fabric.snapshot().partitions:
                yield fabric, partition

    def _changed(self, _: FabricSnapshot) -> None:
        self.before, self._shown = self._shown, self.now()


class NmxmOperations:
    """Changes that were accepted. Each takes `seconds`, half of them before it is done."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._known: dict[str, Json] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resumed = asyncio.Event()

    def begin(self, request: Json, change: Callable[[], int], fault: NmxmFault) -> str:
        """Accept `change`, and carry it out in the background."""
        entity = entity_digest(f"operation {len(self._known)}")
        self._known[entity] = {
            "ID": entity,
            "Status": "pending",
            "Percentage": 0.0,
            "CurrentStep": "",
            "Request": request | {"Cancellable": True},
            "CreatedAt": CREATED,
            "UpdatedAt": CREATED,
        }
        self._tasks[entity] = asyncio.create_task(self._run(entity, change, fault))
        return entity

    def all(self) -> list[Json]:
        """Every operation."""
        return list(self._known.values())

    def find(self, entity: str) -> Json | None:
        """The operation of this id."""
        return self._known.get(entity)

    def cancel(self, entity: str) -> bool:
        """Cancel an operation. False if it has ended."""
        if self._known[entity]["Status"] not in ("pending", "in-progress"):
            return False
        self._tasks[entity].cancel()
        self._end(entity, "cancelled")
        return True

    def resume(self) -> None:
        """Let the operations that are stalled now go on, late as they are."""
        self._resumed.set()
        self._resumed = asyncio.Event()

    async def close(self) -> None:
        """Cancel all running operations."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, entity: str, change: Callable[[], int], fault: NmxmFault) -> None:
        # The change happens in the middle of the operation: readers may see it before it is completed.
        await asyncio.sleep(self.seconds / 2)
        self._known[entity]["Status"] = "in-progress"
        if fault.stalls:
            await self._resumed.wait()
        if fault.fails:
            self._end(entity, "failed", fault.fails)
            return
        try:
            number = change()
        except FabricRefusal as refusal:
            self._end(entity, "failed", refusal.code)
            return
        await asyncio.sleep(self.seconds / 2)
        self._end(entity, "completed", data={"PartitionID": number})

    def _end(self, entity: str, status: str, error: str = "", data: Any = None) -> None:
        result = {"Data": data, "Error": error, "Details": f"simulated: {error}" if error else ""}
        self._known[entity] |= {"Status": status, "Percentage": 100.0, "Result": result}


# The ASGI application.


NMXM_BASE = "/nmx/v1"
SIMULATED_HEADERS = {"Server": "rackloom-twin (simulated NMX-M)"}
NAME_LENGTH = MAX_NAME - 11
"""NMX-M takes names of up to 244 characters, NMX-C of up to 255."""


class NmxmProblem(Exception):
    """An answer that refuses."""

    def __init__(self, status: int, code: str, description: str) -> None:
        super().__init__(description)
        body = {"httpErrorCode": status, "customErrorCode": code, "description": description}
        self.reply = _json_reply(body, status)


class NmxmService:
    """Answers for `fabrics`, to clients with `username` and `password`. Operations take `seconds`.

    `faults` are applied to requests. The fabrics may be changed from outside at any time.
    """

    def __init__(
        self,
        fabrics: Sequence[SimulatedFabric],
        *,
        username: str,
        password: str,
        seconds: float = 0.0,
    ) -> None:
        self.faults = NmxmFaults()
        self.username, self.password = username, password
        self.operations = NmxmOperations(seconds)
        self._fabrics = fabrics
        self._partitions = PartitionEntities(fabrics)
        routes = [
            Route(f"{NMXM_BASE}/partitions/{{id}}", self._on_partition, methods=["GET", "PUT", "DELETE"]),
            Route(f"{NMXM_BASE}/operations/{{id}}", self._on_operation, methods=["GET", "DELETE"]),
            Route(f"{NMXM_BASE}/{{collection}}/count", self._count, methods=["GET"]),
            Route(f"{NMXM_BASE}/{{collection}}", self._on_collection, methods=["GET", "POST"]),
        ]
        self._app = Starlette(routes=routes, exception_handlers={NmxmProblem: _handle_problem})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or apply its fault."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        collection = scope["path"].removeprefix(NMXM_BASE).strip("/").split("/")[0]
        fault = self.faults.take(f"{scope['method']} {collection}")
        scope["fault"] = fault
        app: ASGIApp = self._app
        if not self._is_known(request):
            app = NmxmProblem(401, "unauthorized", "name or password").reply
        elif fault.status:
            app = NmxmProblem(fault.status, "fault", "asked for by a test").reply
        elif fault.garbage:
            app = Response("<html>", media_type="text/html")
        elif fault.drop_reply:
            send = _LostReply(send)
        await app(scope, receive, send)

    def _is_known(self, request: Request) -> bool:
        kind, _, credentials = request.headers.get("authorization", "").partition(" ")
        expected = base64.b64encode(f"{self.username}:{self.password}".encode())
        return kind.lower() == "basic" and secrets.compare_digest(credentials.encode(), expected)

    async def _on_collection(self, request: Request) -> Response:
        name = request.path_params["collection"]
        if request.method == "POST":
            if name != "partitions":
                raise NmxmProblem(404, "not-found", f"nothing is made in {name}")
            return await self._create(request)
        listed = self._list(name)
        if name == "partitions" and self.faults.lag:
            self.faults.lag -= 1
            listed = self._partitions.before
        if name == "partitions":
            hidden = self.faults.hidden_partitions
            listed = [entity for entity in listed if entity["PartitionID"] not in hidden]
        if name == "gpus":
            listed = [entity for entity in listed if entity["DeviceUID"] not in self.faults.hidden_gpus]
        return _json_reply(listed)

    async def _count(self, request: Request) -> Response:
        return _json_reply({"total": len(self._list(request.path_params["collection"]))})

    def _list(self, name: str) -> list[Json]:
        kinds: dict[str, Callable[[SimulatedFabric], list[Json]]] = {
            "chassis": list_chassis,
            "compute-nodes": list_nodes,
            "gpus": list_gpus,
        }
        if name == "partitions":
            return self._partitions.now()
        if name == "operations":
            return self.operations.all()
        if name not in kinds:
            raise NmxmProblem(404, "not-found", f"{name} is not simulated")
        return [entity for fabric in self._fabrics for entity in kinds[name](fabric)]

    async def _create(self, request: Request) -> Response:
        body = await _read_body(request, {"Name", "Members"})
        name = body["Name"]
        if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
            raise NmxmProblem(400, "bad-request", "Name")
        if any(partition["Name"] == name for partition in self._partitions.now()):
            raise NmxmProblem(409, "conflict", f"a partition named {name} exists")
        fabric, guids = self._members(body["Members"])
        if fabric is None:
            raise NmxmProblem(400, "bad-request", "a new partition needs members")
        return self._accept(request, body, lambda: fabric.create(name, guids))

    async def _on_partition(self, request: Request) -> Response:
        entity = request.path_params["id"]
        found = self._partitions.find(entity)
        if found is None:
            raise NmxmProblem(404, "not-found", f"no partition {entity}")
        fabric, partition = found
        if request.method == "GET":
            return _json_reply(partition_entity(fabric, partition, entity))
        if request.method == "DELETE":
            return self._accept(request, None, lambda: fabric.delete(self._number(entity)))
        body = await _read_body(request, {"Members"})
        if not partition.guid_based:
            raise NmxmProblem(409, "conflict", "the type of a partition is fixed")
        members_fabric, guids = self._members(body["Members"])
        if members_fabric not in (None, fabric):
            raise NmxmProblem(409, "conflict", "members of another domain")
        return self._accept(request, body, lambda: fabric.replace(self._number(entity), guids))

    async def _on_operation(self, request: Request) -> Response:
        entity = request.path_params["id"]
        found = self.operations.find(entity)
        if found is None:
            raise NmxmProblem(404, "not-found", f"no operation {entity}")
        if request.method == "GET":
            return _json_reply(found)
        if not self.operations.cancel(entity):
            raise NmxmProblem(409, "conflict", f"operation {entity} has ended")
        return self._accept(request, None, lambda: 0)

    def _number(self, entity: str) -> int:
        """The partition's number when the change is carried out: it may be gone by then."""
        found = self._partitions.find(entity)
        if found is None:
            raise FabricRefusal("PARTITION_ID_NOT_IN_USE")
        return found[1].id

    def _members(self, wanted: Any) -> tuple[SimulatedFabric | None, list[int]]:
        """The fabric and the GUIDs that a list of members names."""
        if wanted in (None, []):
            return None, []
        if not isinstance(wanted, list) or not all(isinstance(guid, str) for guid in wanted):
            raise NmxmProblem(400, "bad-request", "members by location are not simulated")
        if len(set(wanted)) != len(wanted):
            raise NmxmProblem(400, "bad-request", "a member twice")
        known = {entity: (fabric, guid) for entity, fabric, guid in entities_of_gpus(self._fabrics)}
        if not set(wanted) <= known.keys():
            raise NmxmProblem(404, "not-found", "GPUs do not exist")
        fabrics = {known[guid][0].domain: known[guid][0] for guid in wanted}
        if len(fabrics) != 1:
            raise NmxmProblem(409, "conflict", "members of several domains")
        return fabrics.popitem()[1], [known[guid][1] for guid in wanted]

    def _accept(self, request: Request, body: Any, change: Callable[[], int]) -> Response:
        asked = {"Method": request.method.lower(), "URI": request.url.path, "Body": body}
        fault: NmxmFault = request.scope["fault"]
        entity = self.operations.begin(asked, change, fault)
        return _json_reply({"operationId": entity}, 202, Location=f"{NMXM_BASE}/operations/{entity}")


class _LostReply:
    """Lets an answer begin and breaks off: the client cannot know the result."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            await self._send(message | {"headers": [(b"content-length", b"1000")]})


async def _read_body(request: Request, wanted: set[str]) -> Json:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or set(body) != wanted:
        raise NmxmProblem(400, "bad-request", f"the body has {', '.join(sorted(wanted))}")
    return body


def _json_reply(content: Any, status: int = 200, **headers: str) -> Response:
    return JSONResponse(content, status, headers=SIMULATED_HEADERS | headers)


async def _handle_problem(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, NmxmProblem)  # noqa: S101 - registered for this type
    return problem.reply
