"""From the API call that makes an instance to the first answer that calls it Ready, over HTTP on a socket."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2
from site_figures import load, spent
from site_plant import BASE, Plant, plant

from rackloom.app.listeners import serve_http
from rackloom.carve.store.values import Status

POLL_SECONDS = 0.005
GIVE_UP_SECONDS = 60.0


async def measured(domains: int, samples: int, folder: Path) -> list[dict[str, Any]]:
    """One row: `samples` instances, one after another, each of one tray whose 4 GPUs join a partition."""
    async with (
        plant(domains, folder) as site,
        site.reconciling(),
        serve_http(site.app, "127.0.0.1:0") as port,
    ):
        headers = {"Authorization": f"Bearer {site.token}"}
        url = f"http://127.0.0.1:{port}{BASE}/"
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=GIVE_UP_SECONDS) as client:
            vpc, kind = await vpc_and_type(site)
            before, began = spent(), time.perf_counter()
            times = [await instance_times(client, vpc, kind, number) for number in range(samples)]
            used, lasted = spent() - before, time.perf_counter() - began
    calls, readies = (sorted(column) for column in zip(*times, strict=True))
    return [
        {
            "measure": "API call to Ready",
            "domains": domains,
            "samples": samples,
            "p50_ms": milliseconds(readies, 0.5),
            "p99_ms": milliseconds(readies, 0.99),
            "max_ms": milliseconds(readies, 1.0),
            "post_p50_ms": milliseconds(calls, 0.5),
            "cpu_ms_per_sample": round(used / samples * 1e3, 1),
            "busy": round(used / lasted, 2),
            "simulated": "switch controllers and racks: another process, NMX-C over sockets",
            **load(),
        }
    ]


async def vpc_and_type(site: Plant) -> tuple[str, str]:
    """A new VPC whose instances join a new logical partition, and the instance type of the site."""
    where = (await site.ask("GET", "site"))[0]["id"]
    kind = (await site.ask("GET", f"instance/type?siteId={where}"))[0]["id"]
    partition = await site.ask("POST", "nvlink-logical-partition", {"siteId": where, "name": "measured"})
    vpc = {"siteId": where, "name": "measured", "nvLinkLogicalPartitionId": partition["id"]}
    return (await site.ask("POST", "vpc", vpc))["id"], kind


async def instance_times(client: httpx2.AsyncClient, vpc: str, kind: str, number: int) -> tuple[float, float]:
    """Seconds until the call was answered, and until the instance was Ready; then it is released."""
    began = time.perf_counter()
    body = {"vpcId": vpc, "instanceTypeId": kind, "name": f"measured-{number}"}
    made = (await client.post("instance", json=body)).raise_for_status().json()
    answered = time.perf_counter() - began
    await _until(client, f"instance/{made['id']}", lambda reply: reply.json()["status"] == Status.READY)
    ready = time.perf_counter() - began
    (await client.delete(f"instance/{made['id']}")).raise_for_status()
    await _until(client, f"instance/{made['id']}", lambda reply: reply.status_code == 404)
    return answered, ready


async def _until(client: httpx2.AsyncClient, path: str, holds: Any) -> None:
    async with asyncio.timeout(GIVE_UP_SECONDS):
        while not holds(await client.get(path)):  # noqa: ASYNC110 (as a client that polls)
            await asyncio.sleep(POLL_SECONDS)


def milliseconds(ordered: list[float], share: float) -> float:
    """The quantile `share` of sorted seconds, in milliseconds."""
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1e3, 1)
