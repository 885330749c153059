"""The health of GPUs as readers are shown it: a measurement, and unknown without a reading that says it.

The records keep the last health that a switch controller reported. It holds only while the reading that
counts lists the GPU in its place. So a GPU is of unknown health while its domain is unknown, while its
machine is missing, and when the controller lists other GPUs of the machine but not this one.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.tenancy import catalog
from rackloom.core.partitions.domain import GpuHealth


def shown_gpu_healths(
    conn: sa.Connection, machines: Collection[sa.Row[Any]], valid_from: float
) -> dict[str, dict[int, GpuHealth]]:
    """Machine id -> module id -> health, of machine rows. Readings before `valid_from` do not count."""
    domains = {row.domain for row in machines} - {None}
    listed = {
        (domain, gpu.chassis_serial, gpu.slot, gpu.module_id)
        for domain, known in latest.latest_of_domains(conn, domains, valid_from).items()
        if known.observation is not None
        for gpu in known.observation.gpus
    }
    recorded = catalog.gpus_of_machines(conn, [row.id for row in machines])

    def health(row: sa.Row[Any], gpu: sa.Row[Any]) -> GpuHealth:
        is_listed = (row.domain, row.chassis_serial, row.slot, gpu.module_id) in listed
        return GpuHealth(gpu.health) if is_listed and row.missing_since is None else GpuHealth.UNKNOWN

    return {row.id: {gpu.module_id: health(row, gpu) for gpu in recorded[row.id]} for row in machines}
