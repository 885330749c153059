"""The control plane of a benchmark: store on disk, reconciler, REST; only the racks are simulated."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from site_switches import profile, racks, switches

from rackloom.app.process import freeze_loaded_objects
from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LocalIssuer, Role
from rackloom.carve.api.limits import CallerLimits
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.inventory.enrolment import DEMO_ORG, seed_embedded_site
from rackloom.carve.reconcile.domain_pass import ReconcileHooks, ReconcileMetrics
from rackloom.carve.reconcile.loop import ConcurrencySlots, Reconciler
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import MonotonicSiteClock
from rackloom.core.partitions.domain import DomainObservation
from rackloom.core.partitions.status_rules import DEFAULT_INTERVAL

BASE = f"/v2/org/{DEMO_ORG}/nico"
QUIET_SECONDS = 0.5
AT_ONCE = 16
"""Domains worked on at once, as `rackloom serve` does by default."""


class Passes(ReconcileMetrics):
    """Counts passes, and what had been used of the CPU when the last one ended."""

    def __init__(self) -> None:
        self.ended = 0
        self.readings = 0
        self.last_cpu = time.process_time()
        self.last_wall = time.perf_counter()

    def passed(self, endpoint_id: str, seconds: float) -> None:
        """A pass over an endpoint ended."""
        self.ended += 1
        self.last_cpu, self.last_wall = time.process_time(), time.perf_counter()

    def observed(self, endpoint_id: str, observation: DomainObservation) -> None:
        """An endpoint was read."""
        self.readings += 1


class Plant(msgspec.Struct, frozen=True):
    """A site on `store`, and the way into its REST application."""

    store: Store
    home: Path
    """The directory of its database."""
    clock: MonotonicSiteClock
    app: Any
    token_of: Callable[[str], str]
    """Mints a token of a tenant's administrator, for an organisation."""
    token: str
    reconcilers: list[Reconciler]
    """The one that runs now, if one does: a change of intent wakes it."""

    @asynccontextmanager
    async def reconciling(
        self, *, acts: bool = True, interval: float = DEFAULT_INTERVAL
    ) -> AsyncIterator[tuple[Reconciler, Passes]]:
        """A reconciler that runs until the context ends; begun like one that has just been started."""
        passes = Passes()
        hooks = ReconcileHooks(metrics=passes, read_only=not acts)
        reconciler = Reconciler(
            self.store,
            self._driver,
            self.clock,
            hooks=hooks,
            interval=interval,
            slots=ConcurrencySlots(AT_ONCE),
        )
        self.reconcilers.append(reconciler)
        freeze_loaded_objects()
        running = asyncio.create_task(reconciler.run())
        try:
            await reconciler.first_passes()
            yield reconciler, passes
        finally:
            self.reconcilers.remove(reconciler)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the application answers with; an error status ends the benchmark."""
        status, answer = await call(self.app, method, f"{BASE}/{path}", self.token, body)
        if status >= 400:
            raise RuntimeError(f"{method} {path}: {status} {answer.decode()}")
        return msgspec.json.decode(answer) if answer.startswith((b"{", b"[")) else None

    def _driver(self, endpoint: Any) -> NmxcDriver:
        return NmxcDriver(endpoint.url, clock=self.clock)


@asynccontextmanager
async def plant(domains: int, folder: Path, limits: CallerLimits | None = None) -> AsyncIterator[Plant]:
    """A new site of `domains` racks, with its database below `folder`."""
    async with switches(domains) as endpoints:
        with TemporaryDirectory(dir=folder) as home:
            store = Store.open(Path(home))
            try:
                await store.run(
                    seed_embedded_site, racks(domains), profile(), endpoints, now=time.time(), ids=new_id
                )
                yield _plant(store, Path(home), limits)
            finally:
                await store.close()


def _plant(store: Store, home: Path, limits: CallerLimits | None) -> Plant:
    clock = MonotonicSiteClock(time.time, time.monotonic, 0.0)
    issuer = LocalIssuer(home / "keys")
    reconcilers: list[Reconciler] = []

    def wake(touched: frozenset[str], org: str) -> None:
        for reconciler in reconcilers:
            reconciler.wake(touched, org)

    deps = ApiDeps(
        store=store, clock=clock, ids=new_id, wake=wake, verifier=issuer.verifier(), auto_tenant=True
    )

    def token_of(org: str) -> str:
        return issuer.mint(org, [Role.TENANT_ADMIN], time.time(), 36_000.0)

    return Plant(store, home, clock, create_app(deps, limits), token_of, token_of(DEMO_ORG), reconcilers)


async def quiet(reconciler: Reconciler, passes: Passes) -> None:
    """Return when no domain has anything left to do: the wake-ups by the fabric itself are over too."""
    before = -1
    while passes.readings != before or any(loop.woken.is_set() for loop in reconciler.loops):
        before = passes.readings
        await asyncio.sleep(QUIET_SECONDS)


async def call(app: Any, method: str, path: str, token: str, body: Any = None) -> tuple[int, bytes]:
    """One request straight into an ASGI application: no client and no socket, whose cost would hide ours."""
    target, _, query = path.partition("?")
    content = b"" if body is None else msgspec.json.encode(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("benchmark", 80),
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def new_id() -> str:
    """A fresh uuid."""
    return str(uuid.uuid4())
