"""One random run of the site service from a seed, and one scripted run killed at each crash point.

`simulate` builds a site, its records and its replicas from a seed, lets tenants, an operator and the
fault injector work for a while, heals everything, and waits two intervals. Then every tenant audits and
the settled site is checked. The invariants are checked all along. The first violation ends the run. An
exception that the service logged but did not expect counts as a defect as well.

`RunResult` carries the trace and its digest: equal seeds give equal digests.

The draw of the policy for free GPUs uses a separate generator, so that it does not change the other draws of
a seed. Lease renewal is slower than in production, since it would otherwise be half of a run. Leases keep
their proportions.

`ScriptedRun` plays one fixed story of two tenants. `count_crash_points` counts the database writes and
controller calls in it, and `run_script` kills the service at one of them. A test does this for every
point.
"""

import asyncio
import hashlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Never

import msgspec
import sqlalchemy as sa
import structlog
from tests.simulation.carving.clients import PROVIDER_ORG, RandomOperator, RandomTenant
from tests.simulation.carving.injector import FAULT_WEIGHTS, FaultInjector
from tests.simulation.carving.racks import ExecutedChange, JudgedRack, JudgedSite
from tests.simulation.carving.service import JudgedService
from tests.simulation.invariants.ledger import InvariantViolated, Ledger
from tests.simulation.invariants.service import ServiceInvariants, check_settled

from rackloom.carve.api.auth import LOCAL_LIFETIME, LocalIssuer, Role
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile import leases, loop
from rackloom.carve.store import schema
from rackloom.carve.store.database import SqliteBackend, Store
from rackloom.core.partitions.domain import DefaultPartitionPolicy
from rackloom.errors import Refused
from rackloom.lab.switches.fabric import FabricSnapshot
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.service import SERVICE_EPOCH, rest_application
from rackloom.runtime.log_settings import structlog_configured
from rackloom.topology import profiles
from rackloom.topology.rack import RackProfile

TENANT_ORGS = ("red", "blue")
TWO_REPLICA_RATE = 0.2
"""How often two processes share the records."""
TRAY_POLICY_RATE = 0.2
"""How often the site keeps free GPUs in partitions of their trays, instead of in none."""


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how rough a run is."""

    racks: int = 2
    trays: int = 4
    gpus: int = 2
    interval: float = 60.0
    """Seconds between two passes over a domain where nothing happens."""
    max_partitions: int | None = None
    """Partitions that each domain holds. None: as many as a real one, or a few in every fifth domain."""
    seconds: float = 360.0
    think: float = 18.0
    """Mean seconds between two requests of one tenant."""
    operator: float | None = 50.0
    """Mean seconds between two steps of the operator, or None without an operator."""
    replicas: int | None = None
    """Processes that share the records. None: two in every fifth run, one in the others."""
    pause: float | None = 18.0
    """Mean seconds between two faults on the whole site, or None without faults."""
    kinds: Mapping[str, int] = msgspec.field(default_factory=lambda: dict(FAULT_WEIGHTS))
    """Kinds of fault with their relative frequencies."""
    free_gpus: DefaultPartitionPolicy | None = None
    """The site's policy for free GPUs. None: drawn from the seed."""
    dark_rack: bool = False
    """The first rack cannot be reached at all (L2: this must not delay the others)."""
    patience: float | None = None
    """Seconds within which every request is served, if there are no faults."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    seed: int
    broken: str | None
    operations: int
    requests: int
    steps: int
    """Steps of the operator."""
    checks: int
    processes: int
    lives: int
    rack_seconds: float
    faults: dict[str, int]
    trace: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of the trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def simulate(seed: int, plan: LoadPlan | None = None) -> RunResult:
    """Run one seed to its end, or to the first broken promise."""
    return play_run(LoadRun(seed, plan or LoadPlan()))


def play_run(run: "LoadRun") -> "RunResult":
    """Play a run that was prepared."""
    with _collect_defects(run.defects), _slower_lease_renewal(run.replicas):
        return event_loop.run_simulation(run.seed, run.main)


class LoadRun:
    """Everything of one seed."""

    def __init__(self, seed: int, plan: LoadPlan) -> None:
        self.seed = seed
        self.plan = plan
        self.rng = random.Random(seed)
        self.trace: list[str] = []
        self.defects: list[BaseException] = []
        self.requests = 0
        self.points_in_act = 0
        self.world = JudgedSite(
            _rack_profile(plan),
            plan.racks,
            self._fork(),
            unmanaged_tray=self.rng.random() < 0.3,
            room=plan.max_partitions,
        )
        self.ledger = Ledger()
        several = self.rng.random() < TWO_REPLICA_RATE and plan.patience is None
        self.replicas = plan.replicas or (2 if several else 1)
        # Apart from the other draws, which thus stay as they were.
        trays = random.Random(f"{seed} trays").random() < TRAY_POLICY_RATE
        drawn = DefaultPartitionPolicy.TRAY if trays else DefaultPartitionPolicy.NONE
        self._clocks_agree = "clock-ahead" not in plan.kinds
        """Else only S11 is judged: which of two records is newer, their times decide (docs/store.md)."""
        self.world.free_gpus = plan.free_gpus or drawn

    async def main(self) -> RunResult:
        """Set up, run, and return the result."""
        self.loop = asyncio.get_running_loop()
        backend, apps, issuer = _service_parts()
        self.plane = JudgedService(
            self.world, apps[: self.replicas], backend, self._fork(), self.plan.interval
        )
        self.invariants = ServiceInvariants(self.world, self.plane, self.ledger)
        self.plane.on_request = lambda url: self._guard(lambda: self.invariants.requested(url))
        self.faults = FaultInjector(self.world, self.plane, self._fork(), self._kinds(), self.note)
        self.world.racks[0].network.dark = self.plan.dark_rack
        for rack in self.world.racks:
            rack.watchers.append(self._executed)
            rack.fabric.on_change(self._watcher(rack))
        await self._seed_records(backend)
        self.tenants = [self._tenant(org, issuer) for org in TENANT_ORGS]
        self.operator = self._operator(issuer)
        self.broken: str | None = None
        self.failed = asyncio.Event()
        work = [asyncio.create_task(part) for part in (self.plane.serve(), self._play(), self.failed.wait())]
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            if task.done() and (error := task.exception()):
                self._fail(error)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        return self._result()

    async def act(self) -> None:
        """Tenants and the operator work, and faults strike."""
        async with asyncio.TaskGroup() as tasks:
            for tenant in self.tenants:
                tasks.create_task(tenant.live(self.plan.seconds, self.plan.think))
            if self.plan.operator is not None and self.plan.patience is None:
                tasks.create_task(self.operator.work(self.plan.seconds, self.plan.operator))
            if self.plan.pause is not None:
                tasks.create_task(self.faults.run(self.plan.seconds, self.plan.pause))

    async def _play(self) -> None:
        await self.act()
        self.points_in_act = self.plane.points
        await self.faults.heal()
        self.world.racks[0].network.dark = False
        self.note("healed")
        await self.settle_down()

    async def settle_down(self) -> None:
        """L1: after two intervals without faults, everything is as requested."""
        await self.plane.is_open.wait()
        await asyncio.sleep(2 * self.plan.interval)
        for tenant in self.tenants:
            await tenant.audit()
        if self._clocks_agree:
            await check_settled(self.world, self.plane, self.ledger, self.tenants)

    def note(self, what: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.loop.time():.6f} {what}")

    def _tenant(self, org: str, issuer: LocalIssuer) -> RandomTenant:
        token = issuer.mint(org, [Role.TENANT_ADMIN], SERVICE_EPOCH, LOCAL_LIFETIME)
        return RandomTenant(
            org, token, self.plane, self.ledger, self._fork(), self._answered, self.plan.patience
        )

    def _operator(self, issuer: LocalIssuer) -> RandomOperator:
        token = issuer.mint(PROVIDER_ORG, [Role.PROVIDER_ADMIN], SERVICE_EPOCH, LOCAL_LIFETIME)
        return RandomOperator(token, self.world, self.plane, self.ledger, self._fork(), self._answered)

    def _kinds(self) -> Mapping[str, int]:
        # The clocks of replicas agree: docs/store.md requires NTP.
        together = {kind: often for kind, often in self.plan.kinds.items() if kind != "clock-jump"}
        return self.plan.kinds if self.replicas == 1 else together

    def _answered(self, org: str, method: str, path: str, status: int, shown: Any) -> None:
        self.requests += 1
        digest = hashlib.sha256(msgspec.json.encode(shown)).hexdigest()[:12]
        self.note(f"rest {org} {method} {path} {status} {digest}")
        if self._clocks_agree:
            self.invariants.answered(org, path, status, shown)
            self.invariants.check_isolation()
        for defect in self.defects:
            self._fail(defect)

    def _executed(self, rack: JudgedRack, event: ExecutedChange) -> None:
        members = {partition.id: partition.guids for partition in event.after.partitions}
        self.note(f"fabric {rack.name} {event.rpc} {event.request.name} {event.code} {sorted(members)}")
        if self._clocks_agree:
            self._guard(lambda: self.invariants.executed(rack, event))
        for defect in self.defects:
            self._fail(defect)

    def _watcher(self, rack: JudgedRack) -> Callable[[FabricSnapshot], None]:
        def changed(_: FabricSnapshot) -> None:
            if self._clocks_agree:
                self._guard(lambda: self.invariants.fabric_changed(rack))

        return changed

    def _guard(self, check: Callable[[], None]) -> None:
        """Check inside another component's call: a violation ends the run, not that call."""
        try:
            check()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self.broken is None:
            self.broken = str(error) if isinstance(error, InvariantViolated) else f"defect {error!r}"
            self.note(f"broken {self.broken}")
        self.failed.set()

    def _fork(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    async def _seed_records(self, backend: SqliteBackend) -> None:
        store = Store(backend)
        await store.run(_delete_all_records)
        await store.run(
            seed_embedded_site,
            self.world.site,
            self.world.profile,
            self.world.endpoints,
            now=SERVICE_EPOCH,
            ids=self.plane.ids,
            org=PROVIDER_ORG,
        )
        policy = sa.update(schema.site).values(default_partition=self.world.free_gpus)
        await store.run(lambda conn: conn.execute(policy))

    def _result(self) -> RunResult:
        return RunResult(
            seed=self.seed,
            broken=self.broken,
            operations=sum(tenant.operations for tenant in self.tenants),
            steps=self.operator.operations,
            processes=self.replicas,
            requests=self.requests,
            checks=self.invariants.checks,
            lives=len(self.plane.started),
            rack_seconds=self.loop.time() * self.plan.racks,
            faults=dict(sorted(Counter(self.faults.counts).items())),
            trace=tuple(self.trace),
        )


@cache
def _service_parts() -> tuple[SqliteBackend, tuple[Any, ...], LocalIssuer]:
    """Slow-built parts that every run shares: tables, routes of two replicas, a signing key."""
    with tempfile.TemporaryDirectory() as keys:
        issuer = LocalIssuer(Path(keys))
    backend = SqliteBackend.inline(None)
    records = Store(backend)
    return backend, (rest_application(records, issuer), rest_application(records, issuer)), issuer


def _delete_all_records(conn: sa.Connection) -> None:
    for table in reversed(schema.metadata.sorted_tables):
        conn.execute(sa.delete(table))
    conn.exec_driver_sql("DELETE FROM sqlite_sequence")


def _rack_profile(plan: LoadPlan) -> RackProfile:
    """A small rack of the shipped kind."""
    return msgspec.structs.replace(
        profiles.load_rack("gb200-nvl72"),
        name="sim-rack",
        trays_per_domain=plan.trays,
        gpus_per_tray=plan.gpus,
        switch_trays_per_domain=2,
        tray_machine=None,
        note="a small rack for simulations",
        origin=(),
    )


def _collect_defects(defects: list[BaseException]) -> AbstractContextManager[None]:
    """Collect the exceptions that the service logged but did not expect, instead of a log."""

    def listen(_logger: object, _method: str, event: MutableMapping[str, Any]) -> Never:
        error = sys.exception()
        if event.get("exc_info") and error is not None and not isinstance(error, Refused):
            defects.append(error)
        raise structlog.DropEvent

    return structlog_configured(processors=[listen])


@contextmanager
def _slower_lease_renewal(processes: int) -> Iterator[None]:
    """Renewal every 1.5 s would be half of all events of a run. Leases keep their proportions."""
    before = {"RENEW_SECONDS": leases.RENEW_SECONDS, "LEASE_SECONDS": leases.LEASE_SECONDS}
    longer = {"RENEW_SECONDS": 6.0, "LEASE_SECONDS": 20.0} if processes > 1 else {"RENEW_SECONDS": 30.0}
    for name, seconds in longer.items():
        setattr(loop, name, seconds)
    try:
        yield
    finally:
        for name, seconds in before.items():
            setattr(loop, name, seconds)


# A scripted run, killed at one crash point.


SCRIPT_ATTEMPTS = 20
SCRIPT_PLAN = LoadPlan(pause=None, operator=None, replicas=1, seconds=0.0, racks=1, trays=3)


class ScriptedRun(LoadRun):
    """Two tenants join GPUs, move them, and partly leave. The process dies at crash point `death`."""

    def __init__(self, death: int | None) -> None:
        super().__init__(seed=1, plan=SCRIPT_PLAN)
        self.death = death

    async def act(self) -> None:
        """The script, after which everything must settle."""
        self.plane.next_fuse = self.death
        for tenant in self.tenants:
            await tenant.read_ids()
        red, blue = self.tenants
        for tenant in (red, blue):
            await _repeat_until_created(tenant, "partitions", tenant.create_partition)
            await _repeat_until_created(tenant, "vpcs", tenant.create_vpc)
            await _repeat_until_created(tenant, "instances", tenant.create_instance)
            await asyncio.sleep(2)
        await red.rewire_instance()
        await asyncio.sleep(2)
        await red.release_instance()
        await asyncio.sleep(2)
        await blue.create_instance()
        await blue.rewire_instance()
        await asyncio.sleep(2)


def run_script(death: int | None) -> RunResult:
    """Play the script. None: without a death."""
    return play_run(ScriptedRun(death))


def count_crash_points() -> int:
    """How many crash points the script has before everything has settled."""
    whole = ScriptedRun(None)
    result = play_run(whole)
    if result.broken:
        raise AssertionError(result.broken)
    return whole.points_in_act


async def _repeat_until_created(
    tenant: RandomTenant, kind: str, action: Callable[[], Awaitable[None]]
) -> None:
    """Repeat an action that was lost with the connection."""
    for _ in range(SCRIPT_ATTEMPTS):
        await action()
        if tenant.ledger.live(tenant.org, kind):
            return
        await asyncio.sleep(1)
    raise InvariantViolated(f"L1 {tenant.org} has none of {kind} after {SCRIPT_ATTEMPTS} attempts")
