"""The GPUs of some racks as a table (CSV), with the facts that the viewer may see.

The table is made from the viewer's own map: a GPU of another tenant has only its place and use. Cells
that a spreadsheet would run as a formula begin with an apostrophe.
"""

import csv
from collections.abc import Collection, Iterator
from io import StringIO

from rackloom.core.diagnosis.snapshot import GpuChain
from rackloom.web.chain import clique_of, use_hidden
from rackloom.web.frames import RackFrame, rack_frames
from rackloom.web.model import SiteMap, rack_id
from rackloom.web.places import GpuSpot

HEADINGS = (
    "rack", "slot", "gpu", "name", "use", "health", "gpu_uuid", "fabric_guid", "node", "machine", "instance",
    "tenant", "partition", "clique", "claim", "pods", "jobs", "nics",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_USES = {True: "in use", False: "free", None: "unknown"}


def gpu_table(whole: SiteMap, opened: Collection[str]) -> Iterator[str]:
    """The lines of the table, a rack at a time: of the racks with these ids, or of all if there is none."""
    yield _lines([HEADINGS])
    for name, frame in rack_frames(whole).items():
        if not opened or rack_id(name) in opened:
            yield _lines([_row(whole, frame, spot) for spot in frame.rack.spots])


def _lines(rows: Collection[tuple[str, ...]]) -> str:
    written = StringIO()
    csv.writer(written, lineterminator="\r\n").writerows([map(_plain, row) for row in rows])
    return written.getvalue()


def _plain(cell: str) -> str:
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def _row(whole: SiteMap, frame: RackFrame, spot: GpuSpot) -> tuple[str, ...]:
    gpu = frame.rack.trays[spot[0]][spot[1]]
    name, level = gpu.place.name, frame.level(spot)
    is_known = gpu.chain is not None and frame.marks is not None
    health = (level or "healthy") if is_known else "unknown"
    place = ("" if number is None else str(number) for number in (name.slot, name.gpu))
    known = ("",) * 12 if gpu.chain is None else _known(whole, gpu.chain)
    return (name.rack, *place, str(name), _USES[gpu.taken], health, *known)


def _known(whole: SiteMap, chain: GpuChain) -> tuple[str, ...]:
    machine, device, use = chain.machine, chain.device, chain.use
    used = use if use is not None and not use_hidden(chain) else None
    tenant = (machine.tenant or "") if machine else ""
    return (
        chain.key.gpu_uuid.value if chain.key.gpu_uuid else "",
        f"{chain.fabric.guid:#018x}" if chain.fabric else "",
        chain.node.name if chain.node else device.node if device else "",
        machine.id if machine else "",
        (machine.instance or "") if machine else "",
        whole.tenants.get(tenant, tenant),
        chain.partition.name if chain.partition else "",
        clique_of(chain) or "",
        used.claim if used else "",
        " ".join(used.pods) if used else "",
        "; ".join(used.jobs) if used else "",
        " ".join(nic.name for nic in chain.nics),
    )
