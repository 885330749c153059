"""The work of `rackloom claim check`: read files, and report findings with file and line.

The classes, slices and nodes come from the files, and from the cluster's slices if they are given. Without
slices and profile, claims are checked against every published machine.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rackloom.claim.manifests.documents import Document, read_documents
from rackloom.claim.manifests.read import Manifests, claim_from_template, decode_object, read_manifests
from rackloom.cli.claim_template import stock_of
from rackloom.cli.common import with_progress
from rackloom.core.allocate.lint.claims import claim_findings, class_findings
from rackloom.core.allocate.lint.selectors import (
    FieldPath,
    LintContext,
    LintFinding,
    dotted_path,
    lint_context,
)
from rackloom.core.allocate.objects import DeviceClass, ResourceClaim, ResourceClaimTemplate
from rackloom.core.allocate.templates.inventory import inventory_of_machine
from rackloom.core.cluster.objects import title_in_file
from rackloom.core.cluster.workload_kinds import value_at
from rackloom.errors import Refused
from rackloom.topology import profiles


class LocatedFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding with its place in a file."""

    where: str
    """`file:line`."""
    object: str
    path: str
    trap: str
    why: str
    fix: str


def located_findings(
    files: Sequence[Path], profile: str | None, slices: Sequence[Path]
) -> Iterator[LocatedFinding]:
    """The findings of all claims, templates and classes in the files. Raises Refused if there are none."""
    decoded = [(document, decode_object(document)) for path in files for document in read_documents(path)]
    checked = [
        (document, value)
        for document, value in decoded
        if isinstance(value, ResourceClaim | ResourceClaimTemplate | DeviceClass)
    ]
    if not checked:
        raise Refused("there is nothing to check", nearest_fix="name files with claims, templates or classes")
    evidence = _check_evidence(files, profile, slices)
    for document, value in with_progress(checked, "objects checked"):
        prefix: FieldPath = ("spec",)
        if isinstance(value, ResourceClaimTemplate):
            prefix, value = ("spec", "spec"), claim_from_template(value)
        found = (
            class_findings(value, evidence)
            if isinstance(value, DeviceClass)
            else claim_findings(value, evidence)
        )
        yield from (_located_finding(document, prefix, finding) for finding in found)


def _check_evidence(files: Sequence[Path], profile: str | None, slices: Sequence[Path]) -> LintContext:
    own, cluster = read_manifests(files), read_manifests(slices)
    found = Manifests(
        classes=(*cluster.classes, *own.classes),
        slices=(*cluster.slices, *own.slices),
        nodes=(*cluster.nodes, *own.nodes),
    )
    if found.slices or profile is not None:
        return lint_context(stock_of(profile, found if found.slices else None), found.classes)
    machines = (inventory_of_machine(profiles.load_machine(name)) for name in profiles.machine_names())
    return lint_context(None, found.classes, machines)


def _located_finding(document: Document, prefix: FieldPath, finding: LintFinding) -> LocatedFinding:
    path = (*prefix, *finding.path)
    # Requests of v1beta1 are flat in the file, without `exactly`.
    if "exactly" in path and value_at(document.value, path[: path.index("exactly") + 1]) is None:
        path = tuple(part for part in path if part != "exactly")
    return LocatedFinding(
        where=document.where(path),
        object=title_in_file(document.value),
        path=dotted_path(path),
        trap=finding.trap.value,
        why=finding.why,
        fix=finding.fix,
    )


def findings_page(found: Sequence[LocatedFinding]) -> str:
    """The findings as text, each with its reason and fix."""
    if not found:
        return "no traps found"
    return "\n".join(
        f"{finding.where}: {finding.trap}: {finding.object}, {finding.path}\n"
        f"  {finding.why}\n  fix: {finding.fix}"
        for finding in found
    )
