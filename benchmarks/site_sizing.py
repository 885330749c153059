"""What a site of a given size needs: memory, CPU, database, and time to start.

In order: every rack is filled over REST, with 17 of its 18 trays in one logical partition. Then the
reconciler carves them until all are Ready; beside it, filling a large site would take several times as
long, because passes and requests share one core. Then the reconciler is replaced, as by a restart:
`start_s` ends when every domain was read again. For `idle_seconds` only timers run; `idle_cpus` is how
much of a CPU the whole process uses meanwhile. Last, instances come and go on the trays that are left,
over HTTP as in `latency`, and a page of 20 is read.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2
from site_figures import load, resident_mib, spent
from site_latency import instance_times, milliseconds, vpc_and_type
from site_passes import fill
from site_plant import BASE, Plant, plant

from rackloom.app.listeners import serve_http
from rackloom.carve.store.database import DATABASE
from rackloom.carve.store.values import Status

TRAYS_IN_USE = 17
PAGES = 20
POLL_SECONDS = 0.5


async def measured(domains: int, samples: int, idle_seconds: int, folder: Path) -> list[dict[str, Any]]:
    """One row for a site of `domains` racks; `samples` instances come and go."""
    async with plant(domains, folder) as site:
        filled = await _fill(site, domains)
        before, began = spent(), time.perf_counter()
        async with site.reconciling():
            started = {
                "start_s": round(time.perf_counter() - began, 1),
                "start_cpu_s": round(spent() - before, 1),
            }
            idle = await _idle_cpus(idle_seconds)
            async with serve_http(site.app, "127.0.0.1:0") as port:
                answered = await _answers(site, port, samples)
        database = sum(path.stat().st_size for path in site.home.glob(f"{DATABASE}*"))
    return [
        {
            "measure": "sizing",
            "domains": domains,
            "gpus": domains * 72,
            "instances": domains * TRAYS_IN_USE,
            **filled,
            **started,
            "idle_cpus": idle,
            "resident_mib": resident_mib(),
            "database_mib": round(database / 2**20, 1),
            **answered,
            "simulated": "switch controllers and racks: another process, not counted",
            **load(),
        }
    ]


async def _fill(site: Plant, domains: int) -> dict[str, Any]:
    before, began = spent(), time.perf_counter()
    async with site.reconciling(acts=False):
        pass  # the domains and the GUIDs of the machines are known now
    await fill(site, domains, TRAYS_IN_USE)
    async with site.reconciling():
        # On a large site some domain is read at every moment: `quiet` would wait for ever.
        for status in (Status.PENDING, Status.PROVISIONING, Status.CONFIGURING):
            while await site.ask("GET", f"instance?status={status}&pageSize=1"):  # noqa: ASYNC110 (polls)
                await asyncio.sleep(POLL_SECONDS)
    return {"fill_s": round(time.perf_counter() - began, 1), "fill_cpu_s": round(spent() - before, 1)}


async def _idle_cpus(seconds: int) -> float:
    before, began = spent(), time.perf_counter()
    await asyncio.sleep(seconds)
    return round((spent() - before) / (time.perf_counter() - began), 3)


async def _answers(site: Plant, port: int, samples: int) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {site.token}"}
    url = f"http://127.0.0.1:{port}{BASE}/"
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60.0) as client:
        vpc, kind = await vpc_and_type(site)
        ready = sorted([(await instance_times(client, vpc, kind, number))[1] for number in range(samples)])
        pages = []
        for _ in range(PAGES):
            began = time.perf_counter()
            (await client.get("instance?pageSize=20")).raise_for_status()
            pages.append(time.perf_counter() - began)
    return {
        "samples": samples,
        "ready_p50_ms": milliseconds(ready, 0.5),
        "ready_p99_ms": milliseconds(ready, 0.99),
        "page_p50_ms": milliseconds(sorted(pages), 0.5),
    }
