"""The changes between two readings of the site, for one viewer.

Compares two maps that are made for the same viewer, so it shows nothing that the viewer may not see. Racks
with equal frames (`frames`) are skipped.

A finding is the same in both if its check and its subject are the same. The GPUs of a tenant are those of
its machines. A number that was or is unknown for some GPUs of a rack makes no difference there, because an
unknown GPU is neither taken nor given up.
"""

from collections import Counter
from collections.abc import Collection, Iterator

import msgspec

from rackloom.core.diagnosis.findings import Finding, needs_attention
from rackloom.web.frames import RackFrame, rack_frames
from rackloom.web.model import SiteMap, TimelineEntry
from rackloom.web.overview import rack_counts

MOST_RACKS = 8
"""Racks that are named, those with the largest difference first."""
MOST_OPERATIONS = 10


class RackDifference(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of a rack that came into use, or went out of it, or fell ill, or recovered."""

    rack: str
    taken: int
    """GPUs that were free and are taken now."""
    freed: int
    """GPUs that were taken and are free now."""
    problems: int = 0
    """The change in the number of GPUs with a problem."""

    @property
    def size(self) -> int:
        """The size of the difference."""
        return self.taken + self.freed + abs(self.problems)


class SiteChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between two maps."""

    came: tuple[Finding, ...] = ()
    """Findings that need attention now and did not then."""
    healed: tuple[Finding, ...] = ()
    """Findings that needed attention then and do not now."""
    racks: tuple[RackDifference, ...] = ()
    more_racks: int = 0
    """Racks with a difference that are not listed."""
    new_racks: tuple[str, ...] = ()
    gone_racks: tuple[str, ...] = ()
    tenants: tuple[tuple[str, int], ...] = ()
    """Tenants by name, with the change in the number of GPUs of their machines."""
    operations: tuple[TimelineEntry, ...] = ()
    """Operations that began or ended since, the newest first."""
    more_operations: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return self == SiteChanges()


def changes_between(then: SiteMap, now: SiteMap) -> SiteChanges:
    """The changes since an earlier map."""
    before, after = rack_frames(then), rack_frames(now)
    pairs = [(before[name], frame) for name, frame in after.items() if name in before]
    differences = sorted(
        (found for a, b in pairs if a != b and (found := _rack_difference(a, b)).size),
        key=lambda found: found.size,
        reverse=True,
    )
    operations = tuple(entry for entry in now.happenings if entry.at > then.at)
    return SiteChanges(
        came=tuple(_without(now.findings, then.findings)),
        healed=tuple(_without(then.findings, now.findings)),
        racks=tuple(differences[:MOST_RACKS]),
        more_racks=len(differences[MOST_RACKS:]),
        new_racks=tuple(name for name in after if name not in before),
        gone_racks=tuple(name for name in before if name not in after),
        tenants=tuple(sorted(_tenant_differences(then, now))),
        operations=operations[:MOST_OPERATIONS],
        more_operations=len(operations[MOST_OPERATIONS:]),
    )


def _without(some: Collection[Finding] | None, others: Collection[Finding] | None) -> Iterator[Finding]:
    """Findings that are not among the others. Nothing if either map was not examined."""
    if some is None or others is None:
        return
    known = {(finding.check, finding.subject) for finding in needs_attention(others)}
    yield from (finding for finding in needs_attention(some) if (finding.check, finding.subject) not in known)


def _rack_difference(then: RackFrame, now: RackFrame) -> RackDifference:
    before = {gpu.place: gpu.taken for tray in then.rack.trays for gpu in tray}
    pairs = Counter((before.get(gpu.place), gpu.taken) for tray in now.rack.trays for gpu in tray)
    return RackDifference(
        rack=now.rack.name,
        taken=pairs[False, True],
        freed=pairs[True, False],
        problems=rack_counts(now).problems - rack_counts(then).problems,
    )


def _tenant_differences(then: SiteMap, now: SiteMap) -> Iterator[tuple[str, int]]:
    names = {**then.tenants, **now.tenants}
    kept = {id(rack) for rack in then.racks} & {id(rack) for rack in now.racks}
    difference = _gpus_of_tenants(now, kept)
    difference.subtract(_gpus_of_tenants(then, kept))
    return ((names.get(tenant, tenant), count) for tenant, count in difference.items() if count)


def _gpus_of_tenants(whole: SiteMap, kept: Collection[int]) -> Counter[str]:
    """GPUs of each tenant in racks that are not the same in both maps."""
    return Counter(
        gpu.chain.machine.tenant
        for rack in whole.racks
        if id(rack) not in kept
        for tray in rack.trays
        for gpu in tray
        if gpu.chain is not None and gpu.chain.machine is not None and gpu.chain.machine.tenant is not None
    )
