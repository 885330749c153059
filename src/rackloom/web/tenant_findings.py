"""The doctor's findings for a tenant: those about its own GPUs, partitions, jobs and domains.

A finding is written for operators: it names machines, controllers, other tenants, and commands that only
they may run. So a tenant's finding is written from an allow list, and takes no text of the original except
the name of its check:

- About hardware (`HARDWARE`): the tenant's GPUs among the finest objects that the finding names, as the map
  names them, with one fixed clause for each check. A finding about other GPUs of a shared domain or partition
  does not concern the tenant. A GPU counts if the tenant had its machine when the doctor looked.
- About a workload (`WORKLOADS`): its subject, if that is an object of a namespace with the tenant's label.

Every other check is for operators alone, and so are evidence, consequences and fixes.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf

from rackloom.core.diagnosis.catalogue import Check, runbook_name
from rackloom.core.diagnosis.findings import CheckState, Finding
from rackloom.core.diagnosis.repair_steps import repair_steps
from rackloom.core.diagnosis.titles import TITLES, taint_title
from rackloom.web.model import MapGpu, MapRack, SiteMap
from rackloom.web.places import MapSpot, PlacesByName, finest_names, locate

_SILENT = "in a domain whose switch controllers cannot be read: what is asked for waits"
HARDWARE: Mapping[str, str] = {
    Check.LAYER: "of an unknown state: a source of the site cannot be read",
    Check.CONTROLLER: _SILENT,
    Check.CONTROLLER_AWAY: _SILENT,
    Check.TRAY_PLACE: "in another place than recorded",
    Check.MACHINE_PRESENT: "missing from the switch controller",
    Check.GPU_HEALTH: "sick, by its switch controller",
    Check.PARTITION_HEALTH: "in a partition that is sick",
    Check.ISOLATION: "not kept apart from others as asked for",
    Check.ONE_PARTITION: "in several partitions",
    Check.PARTITION_THERE: "in a partition that is gone from the fabric",
    Check.PARTITION_OWNED: "in a partition that the site did not make",
    Check.DEFAULT_GONE: "in the factory's partition still",
    Check.INTERFACE: "not in the partition that was asked for",
    Check.LOGICAL_SPREAD: "of a logical partition that spans racks, which share no memory",
    Check.MAPPING: "of a machine whose GPUs cannot be distinguished",
    Check.IDENTITY: "named differently by different layers",
    Check.SPLIT: "on a tray that is split over several partitions",
    Check.CLIQUE_LABEL: "on a node with a wrong clique label",
    Check.NODE_READY: "on a node that is not ready",
    Check.NODE_PUBLISHES: "on a node that publishes no devices of a driver",
    Check.DEVICE_TAINT: "kept free of new work",
    Check.NIC_LINK: "near a network link that is down or slow",
    Check.NIC_ALIGNED: "far from every NIC",
}
"""The clause of each check about GPUs, after `is` or `are`."""
WORKLOADS = frozenset(
    {
        *(Check.DEVICE_THERE, Check.TEMPLATES, Check.CLAIMS, Check.GANG, Check.PREPARED),
        *(Check.ACTIVE, Check.ONE_CLIQUE, Check.MESH),
    }
)
"""Checks of an object in a namespace. Their titles name only their subject."""
_ALWAYS_UNKNOWN = frozenset({Check.LAYER, Check.CONTROLLER})
"""Checks with a clause that already states that something is unknown."""
_SUBJECT = re.compile(r"(?P<kind>[A-Za-z]+) (?P<namespace>[a-z0-9.-]+)/(?P<name>[a-z0-9.-]+)")
_MESSAGE = "the site's operators see this too; what must go on now needs an instance on other trays"


def tenant_findings(
    found: Iterable[Finding], own: SiteMap, places: PlacesByName, namespaces: Collection[str]
) -> tuple[Finding, ...]:
    """The findings that concern a tenant, as it reads them. `own` is its part of the map.

    `places` are those of its own objects, and `namespaces` those with its label.
    """
    racks = {rack.name: rack for rack in own.racks}
    written = (
        _about_workload(finding, namespaces)
        if finding.check in WORKLOADS
        else _about_hardware(finding, own, racks, places)
        for finding in found
    )
    return tuple(dict.fromkeys(finding for finding in written if finding is not None))


def _about_workload(finding: Finding, namespaces: Collection[str]) -> Finding | None:
    subject = _SUBJECT.fullmatch(finding.subject)
    if subject is None or subject["namespace"] not in namespaces:
        return None
    kind = subject["kind"].lower()
    return _written(
        finding,
        subject=subject[0],
        title=_in_doubt(finding, TITLES[Check(finding.check)].format(subject=subject[0])),
        message="its conditions and events say more",
        fix=f"kubectl -n {subject['namespace']} describe {kind} {subject['name']}",
        since=finding.since,
    )


def _about_hardware(
    finding: Finding, own: SiteMap, racks: Mapping[str, MapRack], places: PlacesByName
) -> Finding | None:
    what = HARDWARE.get(finding.check)
    if what is None:
        return None
    looked = own.at if own.examined_at is None else own.examined_at
    names = finest_names(finding.where)
    held = {
        name: spots
        for name in names
        if (spots := [spot for spot in places.get(name, ()) if _held_since(racks, spot) <= looked])
    }
    found = locate(names, held)
    if not found.named:
        return None
    spots = list(dict.fromkeys(spot for some in held.values() for spot in some))
    words = ", ".join(link.words for link in found.named) + (f" and {found.more} more" if found.more else "")
    # A state that began before the tenant had the GPU is shown without its time.
    recent = finding.since is not None and all(_held_since(racks, spot) <= finding.since for spot in spots)
    title = f"{words} {'are' if len(found.named) + found.more > 1 else 'is'} {what}"
    if finding.check == Check.DEVICE_TAINT:
        title = taint_title(finding.message).format(place=words)
    return _written(
        finding,
        subject=words,
        title=_in_doubt(finding, title),
        message=_MESSAGE,
        since=finding.since if recent else None,
        where=tuple(held),
        affects=tuple(dict.fromkeys(name for spot in spots for name in _users(_gpu(racks, spot)))),
    )


def _in_doubt(finding: Finding, title: str) -> str:
    unsure = finding.state is CheckState.UNKNOWN and finding.check not in _ALWAYS_UNKNOWN
    return f"Unknown whether {title}" if unsure else title


def _written(
    finding: Finding,
    *,
    subject: str,
    title: str,
    message: str,
    since: float | None,
    fix: str = "",
    where: tuple[str, ...] = (),
    affects: tuple[str, ...] = (),
) -> Finding:
    """A finding with these texts, and with the check and the state of another."""
    return Finding(
        check=finding.check,
        subject=subject,
        state=finding.state,
        severity=finding.severity,
        message=message,
        where=where,
        since=since,
        fix=fix,
        title=title,
        affects=affects,
        steps=repair_steps(fix),
        runbook=runbook_name(finding.check),
    )


def _gpu(racks: Mapping[str, MapRack], spot: MapSpot) -> MapGpu:
    return racks[spot.rack].trays[spot.tray][spot.gpu]


def _held_since(racks: Mapping[str, MapRack], spot: MapSpot) -> float:
    """When the tenant got a GPU. An unknown time is later than every other."""
    chain = _gpu(racks, spot).chain
    since = None if chain is None or chain.machine is None else chain.machine.held_since
    return inf if since is None else since


def _users(gpu: MapGpu) -> Iterator[str]:
    """The jobs or pods on a GPU and its logical partition, as far as the tenant sees them."""
    if gpu.chain is not None and gpu.chain.use is not None:
        yield from gpu.chain.use.jobs or (f"pod {pod}" for pod in gpu.chain.use.pods)
    if gpu.chain is not None and gpu.chain.logical is not None:
        yield f"partition {gpu.chain.logical.name}"
