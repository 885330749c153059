"""A simulated NMX-M as an ASGI application: the REST interface of `/nmx/v1` over simulated fabrics.

It has what partitioning needs: chassis, compute-nodes, gpus, partitions and operations. Services, ports,
switches, metrics and KPIs are not simulated.
"""

import base64
import binascii
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rackloom.twin.switches import nmxm_answers as answers
from rackloom.twin.switches.fabric import MAX_NAME, FabricRefusal, SimulatedFabric
from rackloom.twin.switches.nmxm_answers import Json
from rackloom.twin.switches.nmxm_book import OperationBook, PartitionBook
from rackloom.twin.switches.nmxm_faults import NmxmFault, NmxmFaults

BASE = "/nmx/v1"
SIMULATED = {"Server": "rackloom-twin (simulated NMX-M)"}
NAME_LENGTH = MAX_NAME - 11
"""NMX-M takes names of up to 244 characters, NMX-C of up to 255."""


class Problem(Exception):
    """An answer that refuses."""

    def __init__(self, status: int, code: str, description: str) -> None:
        super().__init__(description)
        self.status, self.code, self.description = status, code, description


class NmxmService:
    """Answers for `fabrics`, to whoever shows `username` and `password`; operations take `seconds`.

    `faults` mistreats requests; the fabrics may be changed from outside at any time.
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
        self.operations = OperationBook(seconds)
        self._fabrics = fabrics
        self._partitions = PartitionBook(fabrics)
        routes = [
            Route(f"{BASE}/partitions/{{id}}", self._on_partition, methods=["GET", "PUT", "DELETE"]),
            Route(f"{BASE}/operations/{{id}}", self._on_operation, methods=["GET", "DELETE"]),
            Route(f"{BASE}/{{collection}}/count", self._count, methods=["GET"]),
            Route(f"{BASE}/{{collection}}", self._on_collection, methods=["GET", "POST"]),
        ]
        self._app = Starlette(routes=routes, exception_handlers={Problem: _refused})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or mistreat it."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        collection = scope["path"].removeprefix(BASE).strip("/").split("/")[0]
        fault = self.faults.take(f"{scope['method']} {collection}")
        scope["fault"] = fault
        if not self._is_known(request):
            await _answer(Problem(401, "unauthorized", "name or password"))(scope, receive, send)
        elif fault.status:
            await _answer(Problem(fault.status, "fault", "asked for by a test"))(scope, receive, send)
        elif fault.garbage:
            await Response("<html>", media_type="text/html")(scope, receive, send)
        elif fault.drop_reply:
            await self._app(scope, receive, _Lost(send))
        else:
            await self._app(scope, receive, send)

    def _is_known(self, request: Request) -> bool:
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        try:
            name, _, word = base64.b64decode(shown, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return False
        same = secrets.compare_digest(f"{name}:{word}".encode(), f"{self.username}:{self.password}".encode())
        return kind.lower() == "basic" and same

    async def _on_collection(self, request: Request) -> Response:
        name = request.path_params["collection"]
        if request.method == "POST":
            if name != "partitions":
                raise Problem(404, "not-found", f"nothing is made in {name}")
            return await self._create(request)
        listed = self._list(name)
        if name == "partitions" and self.faults.lag:
            self.faults.lag -= 1
            listed = self._partitions.before()
        if name == "gpus":
            listed = [one for one in listed if one["DeviceUID"] not in self.faults.hidden_gpus]
        return _json(listed)

    async def _count(self, request: Request) -> Response:
        return _json({"total": len(self._list(request.path_params["collection"]))})

    def _list(self, name: str) -> list[Json]:
        kinds: dict[str, Callable[[SimulatedFabric], list[Json]]] = {
            "chassis": answers.chassis,
            "compute-nodes": answers.nodes,
            "gpus": answers.gpus,
        }
        if name == "partitions":
            return self._partitions.now()
        if name == "operations":
            return self.operations.all()
        if name not in kinds:
            raise Problem(404, "not-found", f"{name} is not simulated")
        return [one for fabric in self._fabrics for one in kinds[name](fabric)]

    async def _create(self, request: Request) -> Response:
        body = await _body(request, {"Name", "Members"})
        name = body["Name"]
        if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
            raise Problem(400, "bad-request", "Name")
        if any(one["Name"] == name for one in self._partitions.now()):
            raise Problem(409, "conflict", f"a partition named {name} exists")
        fabric, guids = self._members(body["Members"])
        if fabric is None:
            raise Problem(400, "bad-request", "a new partition needs members")
        return self._accept(request, body, lambda: fabric.create(name, guids))

    async def _on_partition(self, request: Request) -> Response:
        entity = request.path_params["id"]
        found = self._partitions.find(entity)
        if found is None:
            raise Problem(404, "not-found", f"no partition {entity}")
        fabric, standing = found
        if request.method == "GET":
            return _json(answers.partition(fabric, standing, entity))
        if request.method == "DELETE":
            return self._accept(request, None, lambda: fabric.delete(self._number(entity)))
        body = await _body(request, {"Members"})
        if not standing.guid_based:
            raise Problem(409, "conflict", "the type of a partition is fixed")
        theirs, guids = self._members(body["Members"])
        if theirs not in (None, fabric):
            raise Problem(409, "conflict", "members of another domain")
        return self._accept(request, body, lambda: fabric.replace(self._number(entity), guids))

    async def _on_operation(self, request: Request) -> Response:
        entity = request.path_params["id"]
        found = self.operations.find(entity)
        if found is None:
            raise Problem(404, "not-found", f"no operation {entity}")
        if request.method == "GET":
            return _json(found)
        if not self.operations.cancel(entity):
            raise Problem(409, "conflict", f"operation {entity} has ended")
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
        if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
            raise Problem(400, "bad-request", "members by location are not simulated")
        if len(set(wanted)) != len(wanted):
            raise Problem(400, "bad-request", "a member twice")
        known = {entity: (fabric, guid) for entity, fabric, guid in answers.guids_of(self._fabrics)}
        if not set(wanted) <= known.keys():
            raise Problem(404, "not-found", "GPUs do not exist")
        fabrics = {known[one][0].domain: known[one][0] for one in wanted}
        if len(fabrics) != 1:
            raise Problem(409, "conflict", "members of several domains")
        return fabrics.popitem()[1], [known[one][1] for one in wanted]

    def _accept(self, request: Request, body: Any, change: Callable[[], int]) -> Response:
        asked = {"Method": request.method.lower(), "URI": request.url.path, "Body": body}
        fault: NmxmFault = request.scope["fault"]
        entity = self.operations.begin(asked, change, fault)
        return _json({"operationId": entity}, 202, Location=f"{BASE}/operations/{entity}")


class _Lost:
    """Lets an answer begin and breaks off: the client cannot know what was done."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            await self._send(message | {"headers": [(b"content-length", b"1000")]})


async def _body(request: Request, wanted: set[str]) -> Json:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or set(body) != wanted:
        raise Problem(400, "bad-request", f"the body has {', '.join(sorted(wanted))}")
    return body


def _json(content: Any, status: int = 200, **headers: str) -> Response:
    return JSONResponse(content, status, headers=SIMULATED | headers)


def _answer(problem: Problem) -> Response:
    told = {"httpErrorCode": problem.status, "customErrorCode": problem.code}
    return _json(told | {"description": problem.description}, problem.status)


async def _refused(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)  # noqa: S101 - registered for this type
    return _answer(problem)
