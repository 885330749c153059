"""Lists of a small tenant over REST, alone at the site and beside a large tenant, on SQLite.

Each list is requested in turn, without a filter and with one, without a socket.
`worst_ms` is the list that takes longest beside the large tenant, by the median of its repetitions.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import crowd
import msgspec
from site_figures import load
from site_plant import Plant, call, plant

ORG = "small"
LISTS = ("nvlink-logical-partition", "vpc", "instance", "nvlink-interface", "allocation", "machine", "audit")
FILTERS = ("", "?query=object%201", "?status=Error", "?pageSize=100&orderBy=NAME_DESC")
UNKNOWN = {"nvlink-interface": FILTERS[3:], "machine": FILTERS[3:], "audit": FILTERS[2:]}
"""List -> the filters that it refuses."""
KINDS = 12
"""Rows of a tenant for each of its objects, in all tables."""


async def measured(own: int, foreign: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """One row. `own` and `foreign` count rows in all tables."""
    async with plant(1, folder) as site:
        await crowd.fill(site.store, ORG, own // KINDS)
        alone = await _medians(site, repeats)
        await crowd.fill(site.store, "large", foreign // KINDS)
        beside = await _medians(site, repeats)
    worst = max(beside, key=lambda path: beside[path])
    more = {path: beside[path] - alone[path] for path in beside}
    slowest = max(more, key=lambda path: more[path])
    return [
        {
            "measure": "lists of a small tenant",
            "own_rows": own,
            "foreign_rows": foreign,
            "lists": len(beside),
            "worst": worst,
            "worst_ms": round(beside[worst], 2),
            "most_added": slowest,
            "added_ms": round(max(more[slowest], 0.0), 2),
            **load(),
        }
    ]


async def _medians(site: Plant, repeats: int) -> dict[str, float]:
    token, found = site.token_of(ORG), {}
    for name in LISTS:
        for wanted in FILTERS:
            if wanted in UNKNOWN.get(name, ()):
                continue
            path, took = f"/v2/org/{ORG}/nico/{name}{wanted}", []
            for _ in range(repeats):
                began = time.process_time()
                status, answer = await call(site.app, "GET", path, token)
                took.append((time.process_time() - began) * 1e3)
                if status != 200:
                    raise RuntimeError(f"{path}: {status} {msgspec.json.decode(answer)}")
            found[name + wanted] = statistics.median(took)
    return found
