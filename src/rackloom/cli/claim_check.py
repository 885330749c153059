"""`rackloom claim check`: the traps of claims and classes before they are applied."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from rackloom.cli.output import Output, emit

if TYPE_CHECKING:
    from rackloom.claim.manifests.documents import Document
    from rackloom.claim.traps.evidence import Evidence
    from rackloom.claim.traps.finding import FieldPath, Finding

Slices = Annotated[list[Path] | None, Parameter(negative="", consume_multiple=True)]


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """A finding with its place in a file."""

    where: str
    """`file:line`."""
    object: str
    path: str
    trap: str
    why: str
    fix: str


def check(*file: Path, profile: str | None = None, slices: Slices = None, output: Output = "table") -> int:
    """Find traps in claims, templates and classes: what the API server takes and the hardware does not.

    Selectors are run on the devices that they will meet, and claims are allocated. Exit code 1 if there is a
    trap.

    Parameters
    ----------
    file
        Manifests to check; their classes, slices and nodes count.
    profile
        A machine or rack of `rackloom topology list` for which the claims are meant. With slices: what is
        known of the topology of the devices that they publish.
    slices
        ResourceSlices of the cluster (`kubectl get resourceslices,deviceclasses -o yaml`). With neither,
        claims are checked against what the drivers are known to publish.
    output
        How to print.
    """
    found = list(_findings(file, profile, slices or []))
    emit(found, output, lambda: _page(found))
    return 1 if found else 0


def _findings(files: Sequence[Path], profile: str | None, slices: Sequence[Path]) -> Iterator[Located]:
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.claim.allocate.objects import DeviceClass, ResourceClaim, ResourceClaimTemplate
    from rackloom.claim.manifests.documents import read_documents
    from rackloom.claim.manifests.read import claim_of, decode
    from rackloom.claim.traps.check import claim_traps, class_traps
    from rackloom.errors import Refused

    decoded = [(document, decode(document)) for path in files for document in read_documents(path)]
    checked = [
        (document, value)
        for document, value in decoded
        if isinstance(value, ResourceClaim | ResourceClaimTemplate | DeviceClass)
    ]
    if not checked:
        raise Refused("there is nothing to check", nearest_fix="name files with claims, templates or classes")
    evidence = _evidence(files, profile, slices)
    for document, value in checked:
        prefix: FieldPath = ("spec",)
        if isinstance(value, ResourceClaimTemplate):
            prefix, value = ("spec", "spec"), claim_of(value)
        found = (
            class_traps(value, evidence) if isinstance(value, DeviceClass) else claim_traps(value, evidence)
        )
        yield from (_located(document, prefix, one) for one in found)


def _evidence(files: Sequence[Path], profile: str | None, slices: Sequence[Path]) -> "Evidence":
    from rackloom.claim.manifests.read import Manifests, read
    from rackloom.claim.templates.hardware import stock_of_machine
    from rackloom.claim.traps.evidence import evidence_of
    from rackloom.cli.claim_template import stock_of
    from rackloom.topology import profiles

    own, cluster = read(files), read(slices)
    found = Manifests(
        classes=(*cluster.classes, *own.classes),
        slices=(*cluster.slices, *own.slices),
        nodes=(*cluster.nodes, *own.nodes),
    )
    if found.slices or profile is not None:
        return evidence_of(stock_of(profile, found if found.slices else None), found.classes)
    machines = (stock_of_machine(profiles.load_machine(name)) for name in profiles.machine_names())
    return evidence_of(None, found.classes, machines)


def _located(document: "Document", prefix: "FieldPath", finding: "Finding") -> Located:
    from rackloom.claim.traps.finding import dotted

    path = _as_written(document, (*prefix, *finding.path))
    metadata = document.value.get("metadata") or {}
    return Located(
        where=document.where(path),
        object=f"{document.value.get('kind')} {metadata.get('name', '(unnamed)')}",
        path=dotted(path),
        trap=finding.trap.value,
        why=finding.why,
        fix=finding.fix,
    )


def _as_written(document: "Document", path: "FieldPath") -> "FieldPath":
    """The path in the file: requests of v1beta1 are flat, without `exactly`."""
    if "exactly" in path and path[: path.index("exactly") + 1] not in document.lines:
        return tuple(part for part in path if part != "exactly")
    return path


def _page(found: Sequence[Located]) -> str:
    if not found:
        return "no traps found"
    return "\n".join(
        f"{one.where}: {one.trap}: {one.object}, {one.path}\n  {one.why}\n  fix: {one.fix}" for one in found
    )
