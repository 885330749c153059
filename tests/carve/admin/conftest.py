"""An admin server on a real socket, and clients with certificates."""

import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.carve.admin.admin_site import AdminSite

from rackloom.carve.admin import forge_pb2_grpc, operator_pb2_grpc
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.server import AdminServer, AdminTls, ClientIdentities


class Client:
    """A client of the admin interface, with its certificate."""

    def __init__(self, port: int, ca: bytes, pem: Any) -> None:
        key, certificate = (pem.key, pem.certificate) if pem else (None, None)
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        self.channel = grpc.aio.secure_channel(f"localhost:{port}", credentials)
        self.forge = forge_pb2_grpc.ForgeStub(self.channel)
        self.operator = operator_pb2_grpc.OperatorStub(self.channel)


class StoredCredentials:
    """A credential store in memory."""

    def __init__(self) -> None:
        self.fields: dict[str, dict[str, str]] = {}

    async def keep(self, path: str, fields: Any) -> None:
        self.fields[path] = dict(fields)

    async def forget(self, path: str) -> None:
        self.fields.pop(path, None)


class RunningAdminServer:
    """A running admin server, and a record of its callbacks."""

    def __init__(self, authority: Any) -> None:
        self.authority = authority
        self.woken: list[frozenset[str]] = []
        self.refreshed = 0
        self.credentials = StoredCredentials()
        self.port = 0
        self._numbers = itertools.count(1)

    def ids(self) -> str:
        return f"00000000-0000-4000-9000-{next(self._numbers):012}"

    def endpoints_changed(self) -> None:
        self.refreshed += 1

    def deps(self, store: Any, **others: Any) -> AdminDeps:
        async def nothing(*_: Any) -> Any:
            raise AssertionError("not asked for in this test")

        defaults: dict[str, Any] = {
            "clock": time.time,
            "browse": nothing,
            "apply": nothing,
            "check_endpoint": lambda _: None,
        }
        return AdminDeps(
            store=store,
            ids=self.ids,
            wake=self.woken.append,
            endpoints_changed=self.endpoints_changed,
            credentials=self.credentials,
            **(defaults | others),
        )

    @asynccontextmanager
    async def open(self, deps: AdminDeps) -> AsyncIterator["RunningAdminServer"]:
        """Serve `deps`: certificates named admin may write, those named viewer read."""
        pem = self.authority.issue("server")
        tls = AdminTls(certificate=pem.certificate, key=pem.key, client_ca=self.authority.certificate)
        identities = ClientIdentities(frozenset({"admin"}), frozenset({"viewer"}))
        async with AdminServer(deps, identities, tls, "127.0.0.1:0") as server:
            self.port = server.port
            yield self

    @asynccontextmanager
    async def client(self, name: str | None = "admin", by: Any = None) -> AsyncIterator[Client]:
        pem = (by or self.authority).issue(name) if name else None
        client = Client(self.port, self.authority.certificate, pem)
        try:
            yield client
        finally:
            await client.channel.close()


@pytest.fixture
def admin_server(authority: Any) -> RunningAdminServer:
    return RunningAdminServer(authority)


@pytest.fixture
def refusal() -> Callable[[Any], Any]:
    """The error of a call that must be refused."""

    async def refused(call: Any) -> Any:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value

    return refused


@pytest.fixture
def run_on_site(
    small_site: Any, admin_server: RunningAdminServer, refusal: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Runs a scenario on an admin site that shares the site's clock."""

    def run(scenario: Callable[[AdminSite], Any], **deps: Any) -> Any:
        async def play() -> Any:
            given = admin_server.deps(small_site.store, clock=lambda: small_site.tick(0.01), **deps)
            async with admin_server.open(given), admin_server.client() as client:
                return await scenario(AdminSite(small_site, admin_server, client, refusal))

        return small_site.runner.run(play())

    return run
