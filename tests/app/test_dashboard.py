"""The dashboard of a site on a real Prometheus that scrapes a site at work."""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from tests.ports import reserved_ports
from tests.waiting import PATIENCE

from rackloom.app.home import Home
from rackloom.app.twin.site import EmbeddedSite, embedded_site

DASHBOARD = Path(__file__).parents[2] / "deploy/monitoring/site-dashboard.json"
SCRAPE_SECONDS = 1
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="NO PROMETHEUS: Debian's package has it"),
]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes `target`; gives its URL."""
    scrape = {"job_name": "rackloom-site", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with reserved_ports() as port:
        address = f"127.0.0.1:{port}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def panels() -> dict[str, list[str]]:
    return {
        panel["title"]: [target["expr"].replace("$__rate_interval", "30s") for target in panel["targets"]]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
    }


async def carve(site: EmbeddedSite) -> None:
    """An instance on a logical partition: something of everything that panels show."""
    token = site.issuer.mint("demo", ["TENANT_ADMIN"], time.time(), 600)
    headers = {"Authorization": f"Bearer {token}"}
    base = f"{site.url}/v2/org/demo/nico/"
    async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=PATIENCE) as client:

        async def post(path: str, body: dict[str, Any]) -> Any:
            return (await client.post(path, json=body)).raise_for_status().json()

        where = (await client.get("site")).json()[0]["id"]
        kind = (await client.get(f"instance/type?siteId={where}")).json()[0]["id"]
        partition = (await post("nvlink-logical-partition", {"siteId": where, "name": "panels"}))["id"]
        vpc = (await post("vpc", {"siteId": where, "name": "panels", "nvLinkLogicalPartitionId": partition}))[
            "id"
        ]
        batch = {"vpcId": vpc, "instanceTypeId": kind, "namePrefix": "panels", "count": 2}
        await post("instance/batch", batch)


async def unanswered(url: str) -> set[str]:
    """Panels of which no query returns data."""
    empty = set()
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        for title, expressions in panels().items():
            found = []
            for expression in expressions:
                answer = await client.get("/api/v1/query", params={"query": expression})
                found += answer.raise_for_status().json()["data"]["result"]
            if not [row for row in found if row["value"][1] != "NaN"]:
                empty.add(title)
    return empty


def test_every_panel_shows_data_of_a_site_at_work(tmp_path: Path) -> None:
    async def scenario() -> set[str]:
        async with embedded_site(Home(tmp_path / "site"), port=0, racks=1, profile="gb200-nvl72") as site:
            with prometheus(tmp_path, site.url.removeprefix("http://")) as url:
                deadline, empty = time.monotonic() + PATIENCE, set(panels())
                while empty and time.monotonic() < deadline:
                    await asyncio.sleep(SCRAPE_SECONDS)
                    try:
                        up = await unanswered(url)
                    except httpx2.TransportError:
                        continue  # It has not opened its port yet.
                    if up != set(panels()) and empty == set(panels()):
                        await carve(site)  # Counters must be seen before they grow.
                    empty = up
                return empty

    assert asyncio.run(scenario()) == set()
