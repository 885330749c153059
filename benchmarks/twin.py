"""The whole twin in one process: how soon it is there, what it holds, and how it answers while things change.

    python benchmarks/twin.py                  # 100 racks, 7,200 GPUs
    python benchmarks/twin.py --quick          # 2 racks: shows that it works

Rows, as JSON:

- `start`: seconds until REST answers and until every tray is a node with its slices; memory; CPU at rest.
- `REST`: latency over HTTP, seen by another process, while it makes and releases instances one tray at a time
  and somebody looks at the map all the while.
- `map`: seconds from the moment a change was asked for until it is drawn for whoever looks at the rack map.
- `loop`: the longest times for which the event loop, which serves REST, could not turn to anything else.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx2
import uvloop
from site_figures import load, resident_mib, spent

from rackloom.app.home import Home
from rackloom.app.process import shorten_switch_interval
from rackloom.app.twin.up import RunningTwin, freeze_after_start, running_twin
from rackloom.core.cluster.objects import RESOURCE_SLICE
from rackloom.web.frames import ColourMode
from rackloom.web.live import LiveMap
from rackloom.web.model import SiteReading
from rackloom.web.painters import PageSheet, Painters, ViewerKind
from rackloom.web.render import render_changes

PROFILE, ORG = "gb200-nvl72", "demo"
OPERATOR: ViewerKind = (None, ColourMode.TENANT)
READS = ("instance?pageSize=20", "machine?pageSize=20", "nvlink-logical-partition", "instance/type")
GOAL_REST_MS, GOAL_MAP_S = 200.0, 1.0
TOKEN_SECONDS = 3600.0
REST_SECONDS = 10.0
READ_EVERY = 0.05
TURN = 0.01


def changes_and_reads(base: str, token: str, seconds: float) -> tuple[list[float], dict[str, float]]:
    """What a client in another process sees: seconds of every call, and when each instance was asked for."""
    return asyncio.run(_client(base, token, seconds))


async def _client(base: str, token: str, seconds: float) -> tuple[list[float], dict[str, float]]:
    headers = {"Authorization": f"Bearer {token}"}
    taken: list[float] = []
    asked: dict[str, float] = {}
    async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=60.0) as http:

        async def call(method: str, path: str, body: Any = None) -> Any:
            began = time.perf_counter()
            answer = await http.request(method, path, json=body)
            taken.append(time.perf_counter() - began)
            answer.raise_for_status()
            return answer.json() if method != "DELETE" else None

        vpc, kind = await _ordered(call)
        until = time.time() + seconds

        async def write() -> None:
            while time.time() < until:
                name, began = f"measured-{len(asked)}", time.time()
                made = await call("POST", "instance", {"name": name, "vpcId": vpc, "instanceTypeId": kind})
                asked[made["id"]] = began
                while (await call("GET", f"instance/{made['id']}"))["status"] != "Ready":  # noqa: ASYNC110 (a client)
                    await asyncio.sleep(READ_EVERY)
                # Long enough on the map for whoever looks.
                await asyncio.sleep(2 * GOAL_MAP_S)
                await call("DELETE", f"instance/{made['id']}")

        async def read() -> None:
            rng = random.Random(1)  # noqa: S311 (which page is read next)
            while time.time() < until:
                await call("GET", rng.choice(READS))
                await asyncio.sleep(READ_EVERY)

        await asyncio.gather(write(), read(), read())
    return taken, asked


async def _ordered(call: Any) -> tuple[str, str]:
    site = (await call("GET", "site"))[0]["id"]
    kind = (await call("GET", "instance/type"))[0]["id"]
    named = {"name": f"measured-{time.time()}", "siteId": site}
    partition = await call("POST", "nvlink-logical-partition", named)
    vpc = await call("POST", "vpc", {**named, "nvLinkLogicalPartitionId": partition["id"]})
    return vpc["id"], kind


class Viewer:
    """An operator who looks at the map: when each instance was first in what is sent to the page."""

    def __init__(self, whole: RunningTwin) -> None:
        self._source = whole.site.source
        self.first: dict[str, float] = {}
        self.readings: list[float] = []

    async def read(self) -> SiteReading:
        """A reading of the site, timed."""
        began = time.perf_counter()
        reading = await self._source.read()
        self.readings.append(time.perf_counter() - began)
        return reading

    async def changed(self) -> None:
        """As the site says."""
        await self._source.changed()

    async def look(self) -> None:
        """What a stream of the page does, until cancelled."""
        live, painters, number = LiveMap(self, time.time), Painters(0), 0
        with painters.held(OPERATOR):
            async with live.watched():
                while True:
                    sheet = await painters.sheet(OPERATOR, await live.after(number))
                    render_changes(sheet.since(number))
                    number = sheet.number
                    self._note(sheet)

    def _note(self, sheet: PageSheet) -> None:
        now = time.time()
        for gpu in sheet.whole.gpus:
            machine = gpu.chain.machine if gpu.chain is not None else None
            if machine is not None and machine.instance is not None:
                self.first.setdefault(machine.instance, now)


class Turns:
    """How late the event loop comes to what is due."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            due = time.perf_counter() + TURN
            await asyncio.sleep(TURN)
            self.late.append(time.perf_counter() - due)


@asynccontextmanager
async def started(racks: int, folder: Path) -> Any:
    """A twin whose nodes are all there, and the row about that."""
    began = time.perf_counter()
    async with running_twin(Home(folder), port=0, racks=racks, profile=PROFILE) as whole:
        answers = time.perf_counter() - began
        await freeze_after_start(whole.nodes)
        row = {
            "measure": "start",
            "racks": racks,
            "gpus": sum(len(node.tray.gpus) for node in whole.nodes),
            "slices": len(whole.cluster.kube.store.all(RESOURCE_SLICE)),
            "answers_s": round(answers, 2),
            "nodes_s": round(time.perf_counter() - began, 2),
            "resident_mib": resident_mib(),
        }
        used, seen = spent(), time.perf_counter()
        await asyncio.sleep(REST_SECONDS)
        at_rest = (spent() - used) / (time.perf_counter() - seen)
        yield whole, {**row, "busy_at_rest": round(at_rest, 3), **load()}


async def measured(racks: int, seconds: float, folder: Path) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        whole, row = await stack.enter_async_context(started(racks, folder))
        viewer, turns = Viewer(whole), Turns()
        watching = asyncio.gather(viewer.look(), turns.watch())
        now = time.time()
        token = whole.site.issuer.mint(ORG, ["TENANT_ADMIN"], now=now, ttl=TOKEN_SECONDS)
        base = f"{whole.site.url}/v2/org/{ORG}/nico/"
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        loop = asyncio.get_running_loop()
        taken, asked = await loop.run_in_executor(pool, changes_and_reads, base, token, seconds)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        shown = sorted(viewer.first[gpu] - at for gpu, at in asked.items() if gpu in viewer.first)
    return [
        row,
        _rest(racks, sorted(taken)),
        _map(racks, shown, len(asked), sorted(viewer.readings)),
        _loop(racks, sorted(turns.late)),
    ]


def _rest(racks: int, taken: list[float]) -> dict[str, Any]:
    p99 = _ms(taken, 0.99)
    return {
        "measure": "REST",
        "racks": racks,
        "calls": len(taken),
        "p50_ms": _ms(taken, 0.5),
        "p99_ms": p99,
        "max_ms": _ms(taken, 1.0),
        "goal_p99_ms": GOAL_REST_MS,
        "met": p99 < GOAL_REST_MS,
        **load(),
    }


def _map(racks: int, shown: list[float], asked: int, readings: list[float]) -> dict[str, Any]:
    """A change that no reading showed counts as a miss, not as nothing."""
    whole = len(shown) == asked and bool(shown)
    return {
        "measure": "map",
        "racks": racks,
        "changes": asked,
        "never_shown": asked - len(shown),
        "p50_ms": _ms(shown, 0.5),
        "max_ms": _ms(shown, 1.0),
        "reading_p50_ms": _ms(readings, 0.5),
        "goal_max_ms": GOAL_MAP_S * 1e3,
        "met": whole and shown[-1] < GOAL_MAP_S,
        **load(),
    }


def _loop(racks: int, late: list[float]) -> dict[str, Any]:
    row = {"measure": "loop", "racks": racks, "late_p50_ms": _ms(late, 0.5), "late_p99_ms": _ms(late, 0.99)}
    return {**row, "late_max_ms": _ms(late, 1.0), **load()}


def _ms(ordered: list[float], share: float) -> float:
    """Not a number where there is none."""
    return (
        round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1e3, 1) if ordered else float("nan")
    )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--racks", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long things change")
    parser.add_argument("--quick", action="store_true", help="2 racks, 5 seconds")
    parser.add_argument("--folder", type=Path, help="for the home; default: a temporary one")
    asked = parser.parse_args()
    racks, seconds = (2, 5.0) if asked.quick else (asked.racks, asked.seconds)
    shorten_switch_interval()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for row in uvloop.run(measured(racks, seconds, Path(folder))):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
