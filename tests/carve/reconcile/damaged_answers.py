"""Answers of NMX-M and NMX-C that a seed damages on their way to the production driver.

A site of one rack, in virtual time and without sockets. `Site.damaged_pass` damages the answers of one pass.
`Site.check` compares the tenant's statuses with the readings of that pass. Ready needs a reading
that shows the instance's GPUs, and no others, in one partition of the right domain.
"""

import asyncio
import itertools
import math
import random
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import httpx2
import msgspec
from google.protobuf.descriptor import FieldDescriptor

from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LOCAL_LIFETIME, LocalIssuer, Role
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.fabric.controller import FabricDriver
from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.protocol import NmxmLogin
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile import domain_pass, leases
from rackloom.carve.reconcile.domain_pass import DomainPass, DomainTurns
from rackloom.carve.reconcile.loop import SOLE_REPLICA
from rackloom.carve.store.database import Store
from rackloom.core.partitions.domain import DomainObservation, PartitionOperation
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS
from rackloom.lab.switches.fabric import SeededNames, SimulatedFabric, fabrics_of, machine_id_of
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.lab.switches.nmxc import NmxcService
from rackloom.lab.switches.nmxm import NmxmService
from rackloom.lab.virtual.network import SimController, SimNetwork, rpc_failure
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

PROFILE = msgspec.structs.replace(profiles.load_rack("gb200-nvl72"), trays_per_domain=3)
EPOCH = 1_800_000_000.0
LOGIN = NmxmLogin("rw-user", "simulated")
MOST_PASSES = 30
"""After the end of the damage, until every instance is Ready again."""
DEEP = 5_000


class Damager:
    """Damages the answers of one pass by `seed`, or nothing if that is None."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.struck = 0

    def strike(self, call: str, damage: Callable[[random.Random], Any]) -> Any:
        """The result of `damage` on the answer to `call`, or None to leave it alone."""
        if self.seed is None:
            return None
        # Equal calls of a pass are damaged alike: a reading that is repeated meets the same answers.
        rng = random.Random(f"{self.seed} {call}")
        # If all answers are damaged, hardly any reading gets as far as the records.
        if rng.random() >= random.Random(self.seed).choice([0.15, 0.3, 1.0]):
            return None
        self.struck += 1
        return damage(rng)


# Bytes.


def truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def flip(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        if damaged:
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


# NMX-M: JSON over HTTP.

ODD_NUMBERS = (
    *(
        b"NaN",
        b"Infinity",
        b"-1",
        b"0",
        b"1.5",
        b"1e400",
        b"1" * 5000,
        b"4294967296",
        b"18446744073709551615",
    ),
    *(b"18446744073709551616", b"9223372036854775808", b"-9223372036854775809"),
)
ODD_TEXTS = (b'""', b'"\\ud800"', b'"\\u0000"', b'"' + b"x" * 100_000 + b'"')
NESTED = (b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP)
ODD_TOKENS = (*ODD_NUMBERS, *ODD_TEXTS, *NESTED, b"null", b"true", b"[]", b"{}")
WHOLE = (b"", b"null", b"[]", b"{}", b"[null]", b"[[]]", b'{"total":72}', b"<html>", b"\xff\xfe[\0]\0")
STATUSES = (201, 202, 204, 206, 301, 304, 400, 401, 403, 404, 405, 409, 418, 429, 500, 502, 503, 504)
FAILURES = (httpx2.ReadTimeout, httpx2.ConnectTimeout, httpx2.ReadError, httpx2.RemoteProtocolError)


def damage_json(rng: random.Random, content: bytes) -> bytes:
    kind = rng.randrange(8)
    if kind == 0:
        return truncate(rng, content)
    if kind == 1:
        return flip(rng, content)
    if kind == 2:
        return rng.choice(WHOLE)
    if kind == 3:
        # An undeclared field in the first object: a decoder skips it, however deep it is.
        return content.replace(b"{", b'{"Extra":' + rng.choice(NESTED) + b",", 1)
    value = msgspec.json.decode(content)
    rows = [row for row in value if isinstance(row, dict)] if isinstance(value, list) else [value]
    if not rows:
        return rng.choice(WHOLE)
    row = rng.choice(rows)
    holder = rng.choice([row, *(part for part in row.values() if isinstance(part, dict))])
    field = rng.choice(sorted(holder))
    if kind == 4:
        del holder[field]
    elif kind == 5 and isinstance(value, list):
        # Twice in the list, or one identity twice.
        other = rng.choice(rows)
        rng.choice([lambda: value.append(row), lambda: value.remove(row), lambda: row.update(other)])()
    elif kind == 6:
        for each in rows:
            each["DomainUUID"] = rng.choice(
                ["", "x", str(uuid.UUID(int=rng.getrandbits(128))), "\0", "\u00e9" * 50]
            )
    else:
        holder[field] = "@odd@"
    return msgspec.json.encode(value).replace(b'"@odd@"', rng.choice(ODD_TOKENS))


class DamagedHttp(httpx2.AsyncBaseTransport):
    """Requests straight into a simulated NMX-M. Its answers are damaged."""

    def __init__(self, service: NmxmService, damager: Damager) -> None:
        self._inner, self._damager = httpx2.ASGITransport(service), damager

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await self._inner.handle_async_request(request)
        content, status, headers = await answer.aread(), answer.status_code, {}
        path = f"{request.method} {request.url.path.partition('/nmx/v1/')[2]}"

        def damage(rng: random.Random) -> tuple[int, dict[str, str], bytes]:
            kind = rng.randrange(12)
            if kind == 0:
                raise rng.choice(FAILURES)("damaged", request=request)
            if kind == 1:
                return rng.choice(STATUSES), {}, rng.choice([b"", content, b"[" * DEEP])
            if kind == 2:
                return status, {"content-encoding": rng.choice(["gzip", "deflate", "br", "none"])}, content
            return status, {}, damage_json(rng, content) if content else rng.choice(WHOLE)

        status, headers, content = self._damager.strike(path, damage) or (status, headers, content)
        return httpx2.Response(status, headers=headers, stream=httpx2.ByteStream(content), request=request)


# NMX-C: protobuf over gRPC.

INTEGERS = (0, 1, 2, 127, 32766, 32768, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1)
TEXTS = ("", "x", "\0", "\u00e9" * 60, "x" * 100_000, " 0 ", "00000000-0000-4000-8000-00000000dead")


def damage_message(rng: random.Random, message: Any) -> None:
    """Change one field of the message, or of a message in it."""
    fields = [field for field, _ in message.ListFields()]
    inner = [part for field in fields for part in parts_of(message, field)]
    if inner and rng.random() < 0.8:
        damage_message(rng, rng.choice(inner))
        return
    field = rng.choice(list(message.DESCRIPTOR.fields))
    if field.is_repeated:
        values = getattr(message, field.name)
        if len(values) and rng.random() < 0.7:
            values.extend([values[rng.randrange(len(values))]] * rng.choice([1, 2, 1000]))
        else:
            message.ClearField(field.name)
    elif field.message_type is not None or rng.random() < 0.3:
        message.ClearField(field.name)
    else:
        wanted = TEXTS if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else INTEGERS
        try:
            setattr(message, field.name, rng.choice(wanted))
        except (ValueError, TypeError):
            message.ClearField(field.name)


def parts_of(message: Any, field: FieldDescriptor) -> list[Any]:
    if field.message_type is None:
        return []
    value = getattr(message, field.name)
    return list(value) if field.is_repeated else [value]


class DamagedSwitch(SimController):
    """A controller that gives damaged answers to reads."""

    def __init__(self, fabric: SimulatedFabric, damager: Damager) -> None:
        network = SimNetwork(random.Random(1))
        super().__init__(NmxcService(fabric, NmxcFaults()), network, lambda *_: None)
        self._damager = damager

    async def unary(self, rpc: str, request: bytes, seconds: float) -> bytes:
        reply = await super().unary(rpc, request, seconds)

        def damage(rng: random.Random) -> bytes:
            kind = rng.randrange(10)
            if kind == 0:
                codes = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
                raise rpc_failure(rng.choice(codes), "damaged")
            if kind == 1:
                return truncate(rng, reply)
            if kind == 2:
                return flip(rng, reply)
            if kind == 3:
                # Groups inside each other in an undeclared field: the only deep nesting of protobuf.
                return reply + b"\xfb\x3e" * DEEP + b"\xfc\x3e" * DEEP
            method = pb.DESCRIPTOR.services_by_name["NMX_Controller"].methods_by_name[rpc]
            message = getattr(pb, method.output_type.name).FromString(reply)
            for _ in range(rng.choice([1, 1, 2, 5])):
                damage_message(rng, message)
            return bytes(message.SerializeToString())

        return reply if (damaged := self._damager.strike(rpc, damage)) is None else damaged


# The site.


class NotingDriver:
    """The driver, and the results of its readings in the present pass."""

    def __init__(self, driver: FabricDriver) -> None:
        self._driver = driver
        self.read: list[DomainObservation] = []
        self.failures: list[BaseException] = []

    async def observe(self) -> DomainObservation:
        try:
            self.read.append(await self._driver.observe())
        except Exception as error:
            self.failures.append(error)
            raise
        return self.read[-1]

    async def execute(self, operation: PartitionOperation) -> int:
        return await self._driver.execute(operation)

    def notifications(self) -> Any:
        return self._driver.notifications()

    async def close(self) -> None:
        await self._driver.close()


class Site:
    """One rack, its reconciler, and one tenant with one instance."""

    def __init__(self, kind: str, keys: Any) -> None:
        racks = build_site(PROFILE, 1, SeededNames("damaged"))
        (self.fabric,) = fabrics_of(racks, "damaged")
        self.racks, self.damager, self.store = racks, Damager(), Store.inline(None)
        driver: FabricDriver
        if kind == "nmx-m":
            self.url = "http://nmx-m/nmx/v1"
            service = NmxmService((self.fabric,), username=LOGIN.username, password=LOGIN.password)
            transport = DamagedHttp(service, self.damager)
            serials = {gpu.chassis_serial for gpu in self.fabric.gpus.values()}
            driver = NmxmDriver(
                self.url, login, clock=self.clock, chassis_serials=serials, transport=transport
            )
        else:
            self.url = "http://nmx-c"
            channel: Any = DamagedSwitch(self.fabric, self.damager).connect(lambda: None)
            driver = NmxcDriver(self.url, clock=self.clock, connect=lambda _url, _tls: channel)
        self.driver = NotingDriver(driver)
        self._rng = random.Random(7)
        self._names = itertools.count(1)
        issuer = LocalIssuer(keys)
        deps = ApiDeps(
            store=self.store,
            clock=self.clock,
            ids=self.ids,
            wake=lambda _domains, _org: None,
            verifier=issuer.verifier(self.clock),
            auto_tenant=True,
            valid_seconds=DEFAULT_VALID_SECONDS,
        )
        self.app = create_app(deps)
        self._token = issuer.mint("one", [Role.TENANT_ADMIN], EPOCH, LOCAL_LIFETIME)
        self.work: DomainPass

    def clock(self) -> float:
        return EPOCH + asyncio.get_running_loop().time()

    def ids(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

    async def open(self) -> None:
        urls = {self.fabric.domain: self.url}
        await self.store.run(seed_embedded_site, self.racks, PROFILE, urls, now=self.clock(), ids=self.ids)
        await self.store.run(leases.start_as_sole_replica)
        (held,) = await self.store.run(leases.take_share, SOLE_REPLICA, self.clock(), math.inf)
        guard = domain_pass.LeaseGuard(held.lease, math.inf)
        self.work = DomainPass(held.endpoint, guard, self.driver, self.store, self.clock, DomainTurns())
        await self.work.run()

    async def ask(self, method: str, path: str, body: Any = None, refusal: int = 202) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        content = b"" if body is None else msgspec.json.encode(body)
        request = httpx2.Request(
            method, f"http://sim/v2/org/one/nico/{path}", headers=headers, content=content
        )
        answer = await httpx2.ASGITransport(self.app).handle_async_request(request)
        content = await answer.aread()
        assert answer.status_code in (200, 201, 202, 204, refusal), (
            method,
            path,
            answer.status_code,
            content,
        )
        return msgspec.json.decode(content) if content and answer.status_code in (200, 201) else None

    async def new_instance(self) -> str | None:
        """Its id, or None if no machine is free. GPUs that a damaged answer listed are missed ever after."""
        number = next(self._names)
        place = (await self.ask("GET", "site"))[0]["id"]
        kind = (await self.ask("GET", f"instance/type?siteId={place}"))[0]["id"]
        partition = await self.ask(
            "POST", "nvlink-logical-partition", {"name": f"p{number}", "siteId": place}
        )
        network = {"name": f"n{number}", "siteId": place, "nvLinkLogicalPartitionId": partition["id"]}
        vpc = await self.ask("POST", "vpc", network)
        wanted = {"name": f"i{number}", "vpcId": vpc["id"], "instanceTypeId": kind}
        made = await self.ask("POST", "instance", wanted, refusal=409)
        return None if made is None else str(made["id"])

    async def ready(self) -> dict[str, str]:
        """Each instance that the tenant reads Ready, and its machine."""
        shown = await self.ask("GET", "instance?pageSize=100")
        return {
            row["id"]: row["machineId"]
            for row in shown
            if row["status"] == "Ready" and row["unknownSince"] is None
        }

    async def run_pass(self) -> None:
        await asyncio.sleep(1.0)
        self.driver.read.clear()
        self.driver.failures.clear()
        await self.work.run()

    async def damaged_pass(self, seed: int) -> None:
        self.damager.seed, self.damager.struck = seed, 0
        try:
            await self.run_pass()
        finally:
            self.damager.seed = None

    async def check(self) -> None:
        """Require that a reading of the last pass supports each Ready."""
        for instance, machine in (await self.ready()).items():
            assert self.driver.read, f"{instance} reads Ready, and nothing was read: {self.driver.failures}"
            newest = self.driver.read[-1]
            gpus = self.fabric.gpus.values()
            mine = {gpu.guid for gpu in gpus if machine_id_of(gpu.chassis_serial, gpu.slot) == machine}
            assert newest.domain == self.fabric.domain
            assert mine in [partition.members for partition in newest.partitions]
            assert mine <= {gpu.guid for gpu in newest.gpus}

    async def mended(self, count: int) -> None:
        """Run passes over good answers until `count` instances are Ready."""
        for _ in range(MOST_PASSES):
            await self.run_pass()
            if len(await self.ready()) == count:
                return
        raise AssertionError(f"never Ready again: {await self.ask('GET', 'instance')}")


async def login() -> NmxmLogin:
    return LOGIN
