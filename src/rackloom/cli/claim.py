"""`rackloom claim`: what device claims get on given hardware, why not, templates, and checks.

`template` prints a ResourceClaimTemplate that was allocated on fresh nodes of the hardware first. `check`
finds what the API server accepts and the hardware does not, with file and line. `allocate` and `explain`
run the allocator; their work is in `claim_plan`.

The hardware comes from a profile, from ResourceSlices, or from both: then the profile adds the topology
that the slices leave out. This module imports no allocator at its top: the CEL library takes longer to
load than help may take to print.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from rackloom.cli.common import Flag, Output, emit, json_text

if TYPE_CHECKING:
    from rackloom.claim.manifests.documents import Document
    from rackloom.claim.manifests.read import Manifests
    from rackloom.core.allocate.lint.selectors import FieldPath, LintContext, LintFinding
    from rackloom.core.allocate.objects import DeviceClass, ResourceClaimTemplate, ResourceSlice
    from rackloom.core.allocate.templates.generate import AlternativeInventory, GeneratedTemplate
    from rackloom.core.allocate.templates.inventory import HardwareInventory
    from rackloom.topology.machine import Machine


# `rackloom claim template`.


Slices = Annotated[list[Path] | None, Parameter(negative="", consume_multiple=True)]
Rails = Annotated[list[int] | None, Parameter(negative="", consume_multiple=True)]
TemplateFormat = Annotated[Literal["yaml", "json"], Parameter(name=["--output", "-o"])]
_YAML_WIDTH = 10_000
"""Columns of YAML: an expression stays on one line."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HardwareParameters:
    """The hardware that a claim is for."""

    profile: str | None = None
    (
        "A machine or rack of `rackloom topology list`. With slices: what is known of the topology of the "
        "devices that they publish."
    )
    slices: Slices = None
    "ResourceSlices of a cluster (`kubectl get resourceslices,deviceclasses -o yaml`)."
    cluster: Flag = False
    "Ask the cluster that kubectl talks to for its slices."
    context: str | None = None
    "Another of kubectl's contexts."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TemplateParameters:
    """What a claim asks for."""

    gpus: int
    "GPUs of a claim."
    nics: int
    "NICs of a claim."
    align: Literal["numa", "pcie", "rail"]
    (
        "What they have in common: one NUMA node, one PCIe switch or root, or the rail (the same NICs on "
        "every node, each near a GPU)."
    )
    pairs: Flag = False
    "A pair of requests (gpu-0/nic-0, ...) for each unit of the ratio of GPUs to NICs, aligned by itself."
    unaligned: Flag = False
    "NICs that are far from the GPUs instead: the other arm of a comparison."
    rail: Rails = None
    "The rails, as positions of the NICs on a node from 0. Without it: the first that fit."
    name: str | None = None
    "Name of the template."


def template(
    *,
    request: TemplateParameters,
    hardware: HardwareParameters = HardwareParameters(),
    output: TemplateFormat = "yaml",
) -> None:
    """Print a ResourceClaimTemplate for GPUs and NICs that belong together on this hardware.

    It was allocated on fresh nodes of the hardware before it is printed, and the topology of what it got was
    checked.

    Parameters
    ----------
    request
        What a claim asks for.
    hardware
        The hardware that a claim is for.
    output
        How to print.
    """
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.core.allocate.templates.generate import generate_template
    from rackloom.core.allocate.templates.layout import Align, TemplateRequest

    wanted = TemplateRequest(
        gpus=request.gpus,
        nics=request.nics,
        align=Align(request.align),
        pairs=request.pairs,
        unaligned=request.unaligned,
        rails=tuple(request.rail or ()),
        name=request.name,
    )
    profile = hardware.profile
    found = _hardware_manifests(hardware.slices, hardware.cluster, hardware.context)
    elsewhere = _matching_profiles(found) if found is not None and profile is None else ()
    generated = generate_template(wanted, stock_of(profile, found), elsewhere=elsewhere)
    print(_template_text(generated, output), end="")


def stock_of(profile: str | None, found: "Manifests | None") -> "HardwareInventory":
    """The nodes of a profile, of slices, or of slices with the topology of a profile."""
    from rackloom.core.allocate.templates.inventory import inventory_of_machine, inventory_of_slices
    from rackloom.errors import Refused

    machine = machine_of(profile) if profile is not None else None
    if found is not None:
        return inventory_of_slices(found.slices, found.classes, found.nodes, machine=machine)
    if machine is None:
        fix = "name a --profile or files of --slices, or ask with --cluster"
        raise Refused("it is not known for which hardware the template is", nearest_fix=fix)
    return inventory_of_machine(machine)


def machine_of(profile: str) -> "Machine":
    """The machine of a profile; of a rack, that of its trays."""
    from rackloom.cli.topology import machine_or_tray
    from rackloom.topology import profiles

    return machine_or_tray(profiles.load_profile(profile), "devices")


def profile_slices(profile: str, nodes: Sequence[str]) -> "tuple[ResourceSlice, ...]":
    """What the drivers would publish on nodes with the machine of a profile."""
    from rackloom.core.allocate.driver_slices import slices_of

    machine = machine_of(profile)
    return tuple(slice_ for node in nodes for slice_ in slices_of(machine, node))


def with_built_in_classes(classes: "Sequence[DeviceClass]") -> "tuple[DeviceClass, ...]":
    """The classes, and those of the drivers that have none of the same name."""
    from rackloom.core.allocate.driver_slices import device_classes

    named = {klass.metadata.name for klass in classes}
    return (*classes, *(klass for klass in device_classes() if klass.metadata.name not in named))


def _hardware_manifests(
    slices: Sequence[Path] | None, cluster: bool, context: str | None
) -> "Manifests | None":
    if cluster:
        from rackloom.claim.manifests.cluster import read_cluster

        return read_cluster(context)
    from rackloom.claim.manifests.read import read_manifests

    return read_manifests(slices) if slices else None


def _matching_profiles(found: "Manifests") -> "Iterator[AlternativeInventory]":
    """Profiles with GPUs at the addresses that the slices show: they may know the rest of the topology."""
    from rackloom.core.allocate.templates.inventory import inventory_of_slices
    from rackloom.topology import profiles

    stock = inventory_of_slices(found.slices, found.classes, found.nodes)
    seen = {gpu.pci_address for kind in stock.kinds for gpu in kind.machine.gpus} - {None}
    for name in profiles.machine_names():
        known = {gpu.pci_address for gpu in profiles.load_machine(name).gpus} - {None}
        if known and known == seen:
            yield f"--profile {name}", lambda name=name: stock_of(name, found)  # type: ignore[misc]


def _template_text(generated: "GeneratedTemplate", output: str) -> str:
    import yaml

    value = template_manifest(generated.template)
    if output == "json":
        return json_text(value) + "\n"
    notes = "".join(f"# {note}\n" for note in generated.notes)
    return notes + yaml.safe_dump(value, sort_keys=False, width=_YAML_WIDTH)


def template_manifest(made: "ResourceClaimTemplate") -> dict[str, object]:
    """The template as an object for the API server."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": made.metadata.name},
        "spec": {"spec": msgspec.to_builtins(made.spec.spec)},
    }


# `rackloom claim check`.


class LocatedFinding(msgspec.Struct, frozen=True, kw_only=True):
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
    found = list(_located_findings(file, profile, slices or []))
    emit(found, output, lambda: _findings_page(found))
    return 1 if found else 0


def _located_findings(
    files: Sequence[Path], profile: str | None, slices: Sequence[Path]
) -> Iterator[LocatedFinding]:
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.claim.manifests.documents import read_documents
    from rackloom.claim.manifests.read import claim_from_template, decode_object
    from rackloom.core.allocate.lint.claims import claim_findings, class_findings
    from rackloom.core.allocate.objects import DeviceClass, ResourceClaim, ResourceClaimTemplate
    from rackloom.errors import Refused

    decoded = [(document, decode_object(document)) for path in files for document in read_documents(path)]
    checked = [
        (document, value)
        for document, value in decoded
        if isinstance(value, ResourceClaim | ResourceClaimTemplate | DeviceClass)
    ]
    if not checked:
        raise Refused("there is nothing to check", nearest_fix="name files with claims, templates or classes")
    evidence = _check_evidence(files, profile, slices)
    for document, value in checked:
        prefix: FieldPath = ("spec",)
        if isinstance(value, ResourceClaimTemplate):
            prefix, value = ("spec", "spec"), claim_from_template(value)
        found = (
            class_findings(value, evidence)
            if isinstance(value, DeviceClass)
            else claim_findings(value, evidence)
        )
        yield from (_located_finding(document, prefix, finding) for finding in found)


def _check_evidence(files: Sequence[Path], profile: str | None, slices: Sequence[Path]) -> "LintContext":
    from rackloom.claim.manifests.read import Manifests, read_manifests
    from rackloom.core.allocate.lint.selectors import lint_context
    from rackloom.core.allocate.templates.inventory import inventory_of_machine
    from rackloom.topology import profiles

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


def _located_finding(document: "Document", prefix: "FieldPath", finding: "LintFinding") -> LocatedFinding:
    from rackloom.core.allocate.lint.selectors import dotted_path

    path = _as_written(document, (*prefix, *finding.path))
    metadata = document.value.get("metadata") or {}
    return LocatedFinding(
        where=document.where(path),
        object=f"{document.value.get('kind')} {metadata.get('name', '(unnamed)')}",
        path=dotted_path(path),
        trap=finding.trap.value,
        why=finding.why,
        fix=finding.fix,
    )


def _as_written(document: "Document", path: "FieldPath") -> "FieldPath":
    """The path in the file: requests of v1beta1 are flat, without `exactly`."""
    if "exactly" in path and path[: path.index("exactly") + 1] not in document.lines:
        return tuple(part for part in path if part != "exactly")
    return path


def _findings_page(found: Sequence[LocatedFinding]) -> str:
    if not found:
        return "no traps found"
    return "\n".join(
        f"{finding.where}: {finding.trap}: {finding.object}, {finding.path}\n"
        f"  {finding.why}\n  fix: {finding.fix}"
        for finding in found
    )


# `rackloom claim allocate` and `explain`.


app = App(name="claim", help="Claims for devices: what they would get here, and why not.")
app.command("rackloom.cli.claim:template", name="template", help="A claim template for this hardware.")
app.command(
    "rackloom.cli.claim:check", name="check", help="Find the traps in claims before they are applied."
)

ClaimFiles = Annotated[list[Path], Parameter(name=["--file", "-f"], negative="", consume_multiple=True)]
NodeCount = Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))]


@app.command(name="allocate")
def allocate_claims(
    *,
    file: ClaimFiles,
    profile: str | None = None,
    nodes: NodeCount = 1,
    slices: Slices = None,
    mode: Literal["exact", "best"] = "exact",
    output: Output = "table",
) -> int:
    """Allocate each claim as that of a pod of its own, on the first node that can serve it.

    Parameters
    ----------
    file
        Manifests with claims or templates, or a directory of them; classes, slices and nodes count too.
        Claims that have an allocation keep it.
    profile
        A machine or rack of `rackloom topology list` to plan for: its devices as the drivers would publish
        them, and the classes gpu.nvidia.com and dranet.net.
    nodes
        How many nodes of the profile there are.
    slices
        ResourceSlices of a cluster (`kubectl get resourceslices -o yaml`).
    mode
        exact: the devices that the upstream allocator would choose. best: the valid choice that takes
        preferred alternatives, breaks the fewest NUMA nodes, PCIe roots and NVLink cliques, packs
        partitions, and keeps the devices of a claim close to each other, in this order.
    output
        How to print.
    """
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.cli import claim_plan

    manifests = claim_plan.read_inputs([*file, *(slices or [])], profile, nodes)
    answers = claim_plan.allocate_all(manifests, mode)
    emit(answers, output, lambda: claim_plan.allocation_page(answers, manifests.slices))
    return claim_plan.exit_code(answers)


@app.command(name="explain")
def explain_claims(
    *,
    file: ClaimFiles,
    profile: str | None = None,
    nodes: NodeCount = 1,
    slices: Slices = None,
    output: Output = "table",
) -> int:
    """Account for every device of every node: what takes it away from each request, and what is left.

    Parameters
    ----------
    file
        Manifests with claims or templates, or a directory of them; classes, slices and nodes count too.
        Claims that have an allocation hold their devices.
    profile
        A machine or rack of `rackloom topology list` to plan for.
    nodes
        How many nodes of the profile there are.
    slices
        ResourceSlices of a cluster (`kubectl get resourceslices -o yaml`).
    output
        How to print.
    """
    from rackloom.cli import claim_plan

    accounts = claim_plan.explain_all(claim_plan.read_inputs([*file, *(slices or [])], profile, nodes))
    emit(accounts, output, lambda: claim_plan.explanations_text(accounts))
    return claim_plan.exit_code(accounts)
