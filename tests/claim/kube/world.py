"""Worlds for the contract suite: the fake server, the fake behind lightkube's client, and a real server."""

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.waiting import PATIENCE, until

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.claim.kube.client import connect
from rackloom.claim.kube.connection import http_client
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.lab.kube.controllers.scheduler import SimulatedScheduler
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.http import KubeTransport
from rackloom.lab.kube.objects import TypeSchema
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

WIDGET = ResourceKind("contract.rackloom.test", "v1", "Widget", "widgets", namespaced=True)
WIDGET_SHAPE = TypeSchema(status=True, generation=True, lists={"status.nodes": ("name",)})
WIDGET_CRD: Object = {
    "metadata": {"name": "widgets.contract.rackloom.test"},
    "spec": {
        "group": WIDGET.group,
        "scope": "Namespaced",
        "names": {"kind": "Widget", "plural": "widgets", "singular": "widget"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                            "status": {
                                "type": "object",
                                "properties": {
                                    "phase": {"type": "string"},
                                    "nodes": {
                                        "type": "array",
                                        "x-kubernetes-list-type": "map",
                                        "x-kubernetes-list-map-keys": ["name"],
                                        "items": {
                                            "type": "object",
                                            "required": ["name"],
                                            "properties": {
                                                "name": {"type": "string"},
                                                "index": {"type": "integer"},
                                            },
                                        },
                                    },
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: fake, cluster: {server: "http://fake.invalid"}}]
users: [{name: contract, user: {}}]
contexts: [{name: fake, context: {cluster: fake, user: contract}}]
current-context: fake
"""


@dataclass(frozen=True)
class World:
    """An API server with an empty namespace, and clients of it under several names."""

    client: Callable[[str], KubeApi]
    http: httpx2.AsyncClient
    """For requests that the protocol lacks but other programs send."""
    namespace: str
    fake: FakeKube | None

    @property
    def api(self) -> KubeApi:
        return self.client("contract")

    def named(self, name: str, **more: Any) -> Object:
        return {"metadata": {"name": name, "namespace": self.namespace}} | more


Scenario = Callable[[World], Awaitable[None]]
Play = Callable[[Scenario], None]


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it holds."""
    await until(holds, holds.__qualname__)


def on_fake(seed: int, client_of: Callable[[FakeKube], Callable[[str], KubeApi]]) -> Play:
    def play(scenario: Scenario) -> None:
        async def run() -> None:
            fake = FakeKube(seed=seed, namespaces=("default", "contract"))
            fake.serve(WIDGET, WIDGET_SHAPE)
            transport = KubeTransport(fake, "contract")
            http = httpx2.AsyncClient(transport=transport, base_url="http://fake.invalid")
            async with http, _beside(SimulatedScheduler(fake, random.Random(seed)).run()):
                await scenario(World(client_of(fake), http, "contract", fake))

        event_loop.run_simulation(seed, run)

    return play


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    yield
    assert not task.done(), "it has ended"
    task.cancel()
    await asyncio.wait({task})


def direct(fake: FakeKube) -> Callable[[str], KubeApi]:
    return lambda user: DirectApi(fake, user)


def over_http(kubeconfig: Path) -> Callable[[FakeKube], Callable[[str], KubeApi]]:
    def client_of(fake: FakeKube) -> Callable[[str], KubeApi]:
        transport = KubeTransport(fake)
        return lambda user: connect(kubeconfig, user_agent=f"{user}/1", transport=transport)

    return client_of


def on_real(kubeconfig: Path) -> Play:
    def play(scenario: Scenario) -> None:
        async def run() -> None:
            async with _real_world(kubeconfig) as world:
                await scenario(world)

        asyncio.run(run())

    return play


@asynccontextmanager
async def _real_world(kubeconfig: Path) -> AsyncIterator[World]:
    clients: dict[str, Any] = {}

    def client(user: str) -> KubeApi:
        if user not in clients:
            clients[user] = connect(kubeconfig, user_agent=f"{user}/1")
        api: KubeApi = clients[user]
        return api

    api, namespace = client("contract"), f"contract-{uuid.uuid4().hex[:8]}"
    await _install(api)
    await api.create(objects.NAMESPACE, {"metadata": {"name": namespace}})
    try:
        async with http_client(kubeconfig, None) as http:
            yield World(client, http, namespace, None)
    finally:
        await api.delete(objects.NAMESPACE, namespace)
        for opened in clients.values():
            await opened.aclose()


async def _install(api: KubeApi) -> None:
    with contextlib.suppress(Conflict):
        await api.create(objects.CRD, WIDGET_CRD)

    async def served() -> bool:
        """A type that was just installed is not found, and then "storage is (re)initializing"."""
        with contextlib.suppress(KubeError):
            await api.list(WIDGET)
            return True
        return False

    await eventually(served)


async def collect(events: Any, count: int) -> list[Any]:
    """The next `count` changes of a watch, bookmarks left out."""
    found: list[Any] = []
    async with asyncio.timeout(PATIENCE), aclosing(events):
        async for event in events:
            if event.type != "BOOKMARK":
                found.append(event)
            if len(found) == count:
                return found
    raise AssertionError(f"the watch ended after {len(found)} changes")


def refused(error: pytest.ExceptionInfo[KubeError]) -> tuple[int, str, str]:
    """Code, reason and message of an error."""
    return error.value.code, error.value.reason, error.value.message


async def is_gone(world: World, kind: ResourceKind, name: str) -> bool:
    with contextlib.suppress(NotFound):
        await world.api.get(kind, name, world.namespace)
        return False
    return True


def pod(world: World, name: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "none.invalid/none"}
    return world.named(name, spec={"containers": [container]} | spec)


async def create_pod(world: World, wanted: Object) -> Object:
    """A new namespace has no service account yet, without which a real server takes no pod."""
    made: list[Object] = []

    async def is_made() -> bool:
        try:
            made.append(await world.api.create(objects.POD, wanted))
        except Rejected as error:
            if "service account" not in error.message:
                raise
        return bool(made)

    await eventually(is_made)
    return made[0]
