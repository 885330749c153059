"""Processes of `rackloom serve` on one database that die, stop and go on while clients write.

`ServedProcess` is one replica, started again after each death. `Disturber` strikes: SIGKILL, and SIGSTOP with
SIGCONT, also longer than a lease. `RecordingClient` makes random requests for VPCs, and records every
answer as an event of a history. The clients choose the ids, so that many write the same object.
"""

import asyncio
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx2
from tests.app.client_history import ClientAction, Event
from tests.waiting import PATIENCE, until_so

from rackloom.carve.reconcile.leases import LEASE_SECONDS

ANSWER_SECONDS = 2.0
"""How long a client waits. A stopped process goes on after that, with requests that its clients gave up."""
NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout)
STATUSES = {
    ClientAction.CREATE: 201,
    ClientAction.WRITE: 200,
    ClientAction.DELETE: 202,
    ClientAction.READ: 200,
    ClientAction.LIST: 200,
}
REFUSALS = {
    ClientAction.CREATE: 409,
    ClientAction.WRITE: 404,
    ClientAction.DELETE: 404,
    ClientAction.READ: 404,
}
METHODS = {ClientAction.CREATE: "POST", ClientAction.WRITE: "PATCH", ClientAction.DELETE: "DELETE"}
WEIGHTS = {
    ClientAction.CREATE: 5,
    ClientAction.WRITE: 4,
    ClientAction.DELETE: 3,
    ClientAction.READ: 4,
    ClientAction.LIST: 1,
}
OBJECTS = 20
"""That clients write at the same time."""
GENERATION_SECONDS = 15.0
"""After which they go on to other objects: each one's history stays short enough to search."""


class ServedProcess:
    """One replica of the service."""

    def __init__(self, ground: Any, config: Path, name: str) -> None:
        self.name = name
        self.starts = 0
        self.http: httpx2.AsyncClient | None = None
        """None while it starts."""
        self._ground = ground
        self._config = config
        self._output = config.parent / f"{name}.out"
        self._log = config.parent / f"{name}.log"

    def start(self) -> None:
        self.starts += 1
        command = [sys.executable, "-m", "rackloom.cli.main", "serve", "--config", str(self._config)]
        with self._output.open("w") as output, self._log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=output, stderr=log)

    async def wait_open(self) -> None:
        """Wait until it prints its address."""
        line = await until_so(self._announced, f"{self.name} listens")
        rest, admin = (int(part.split()[0].rstrip(",")) for part in line.split(" on port ")[1:3])
        self.admin_port = admin
        self.http = self._ground.rest(rest, org="tenant")
        self.http.timeout = ANSWER_SECONDS

    def _announced(self) -> str:
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        text = self._output.read_text()
        # A process that waits for something prints that first.
        return text if text.endswith("\n") and " on port " in text else ""

    async def kill(self) -> None:
        """SIGKILL, and a new process in its place."""
        await self.die()
        self.start()
        await self.wait_open()

    async def die(self) -> None:
        """SIGKILL."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        closing, self.http = self.http, None
        if closing is not None:
            await closing.aclose()

    async def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.process.send_signal(signal.SIGCONT)

    async def make_sure(self) -> None:
        """End it, even if the test failed."""
        await self.die()

    def assert_runs(self) -> None:
        """Fail with the end of its log if it has ended."""
        status = self.process.poll()
        assert status is None, f"{self.name} ended with {status}: {self._log.read_text()[-4000:]}"

    async def end(self) -> int:
        """Send SIGTERM. Returns its status."""
        if self.http is not None:
            await self.http.aclose()
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, PATIENCE)


class Disturber:
    """Strikes one process after the other, so that mostly one of them answers."""

    KINDS = ("kill", "stop", "stop longer than a lease")

    def __init__(self, processes: list[ServedProcess], rng: random.Random) -> None:
        self.struck: dict[str, int] = dict.fromkeys(self.KINDS, 0)
        self._processes = processes
        self._rng = rng

    async def strike_until(self, deadline: float) -> None:
        """Every kind once, then at random. The last strike ends after the deadline."""
        turn = 0
        while time.monotonic() < deadline or not all(self.struck.values()):
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))
            kind = self.KINDS[turn] if turn < len(self.KINDS) else self._rng.choice(self.KINDS)
            process = self._processes[turn % len(self._processes)]
            self.struck[kind] += 1
            turn += 1
            if kind == "kill":
                await process.kill()
            else:
                shortest = ANSWER_SECONDS if kind == "stop" else LEASE_SECONDS + 0.5
                await process.stop(shortest + self._rng.uniform(0.2, 1.0))


class RecordingClient:
    """One client of all processes. Everything that it requests becomes an event of `history`."""

    def __init__(
        self, name: str, processes: list[ServedProcess], site: str, history: list[Event], seed: int
    ) -> None:
        self.name = name
        self._processes = processes
        self._site = site
        self._history = history
        self._rng = random.Random(seed)
        self._writes = 0

    async def live(self, since: float, ended: asyncio.Event) -> None:
        """Make one request after another."""
        while not ended.is_set():
            await asyncio.sleep(self._rng.expovariate(1 / 0.15))
            generation = f"g{int((time.monotonic() - since) / GENERATION_SECONDS)}-"
            action = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            name = generation
            if action is not ClientAction.LIST:
                name += f"{self._rng.randrange(OBJECTS):02}"
            if http := self._rng.choice(self._processes).http:
                await self.request(http, action, name)

    async def request(self, http: httpx2.AsyncClient, action: ClientAction, name: str) -> None:
        """Make one request, and record its outcome."""
        value = None
        if action in (ClientAction.CREATE, ClientAction.WRITE):
            self._writes += 1
            value = f"{self.name}-{self._writes}"
        began = time.monotonic()
        try:
            answer = await self._send(http, action, name, value)
        except NEVER_SENT:
            return
        except (httpx2.HTTPError, RuntimeError):
            # RuntimeError: the client was closed during the request, because its process is dead.
            answer = None
        unknown = answer is None or answer.status_code >= 500
        known = None if unknown else answer
        refused = known is not None and known.status_code == REFUSALS.get(action)
        if known is not None and not refused:
            assert known.status_code == STATUSES[action], f"{action} {name}: {known.text}"
        listed: tuple[tuple[str, str], ...] = ()
        if known is not None and not refused:
            if action is ClientAction.LIST:
                listed = tuple((vpc["name"], vpc["description"]) for vpc in known.json())
            elif action is ClientAction.READ:
                value = known.json()["description"]
        self._history.append(
            Event(
                client=self.name,
                action=action,
                object=name,
                value=value,
                listed=listed,
                refused=refused and action is not ClientAction.READ,
                invoked_at=began,
                returned_at=None if unknown else time.monotonic(),
            )
        )

    async def _send(
        self, http: httpx2.AsyncClient, action: ClientAction, name: str, value: str | None
    ) -> httpx2.Response:
        place = uuid.uuid5(uuid.NAMESPACE_URL, name)
        match action:
            case ClientAction.LIST:
                return await http.get("vpc", params={"pageSize": 100, "query": name})
            case ClientAction.CREATE:
                body = {"id": str(place), "name": name, "siteId": self._site, "description": value}
                return await http.post("vpc", json=body)
            case ClientAction.WRITE:
                return await http.patch(f"vpc/{place}", json={"description": value})
            case _:
                return await http.request(METHODS.get(action, "GET"), f"vpc/{place}")
