"""Resident memory of the control plane: at its start, and with every domain read and subscribed to."""

import asyncio
from pathlib import Path
from typing import Any

from site_figures import load, resident_mib
from site_plant import plant

SETTLE_SECONDS = 2.0


async def measured(domains: int, folder: Path) -> list[dict[str, Any]]:
    """One row. What is empty is what this process holds before it has met a domain."""
    empty = resident_mib()
    async with plant(domains, folder) as site, site.reconciling():
        await asyncio.sleep(SETTLE_SECONDS)
        full = resident_mib()
    return [
        {
            "measure": "memory",
            "domains": domains,
            "gpus": domains * 72,
            "resident_mib": full,
            "before_mib": empty,
            "kib_per_domain": round((full - empty) * 1024 / domains, 1),
            "simulated": "switch controllers and racks: another process, not counted",
            **load(),
        }
    ]
