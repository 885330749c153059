"""`rackloom claim template`: a ResourceClaimTemplate with the right selectors for a machine, verified."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from rackloom.claim.allocate.objects import ResourceClaimTemplate
    from rackloom.claim.manifests.read import Manifests
    from rackloom.claim.templates.generate import Elsewhere, Generated
    from rackloom.claim.templates.hardware import Stock
    from rackloom.topology.machine import Machine

Slices = Annotated[list[Path] | None, Parameter(negative="", consume_multiple=True)]
Flag = Annotated[bool, Parameter(negative="")]
Rails = Annotated[list[int] | None, Parameter(negative="", consume_multiple=True)]
TemplateFormat = Annotated[Literal["yaml", "json"], Parameter(name=["--output", "-o"])]
_WIDE = 10_000
"""Columns of YAML: an expression stays on one line."""


def template(
    *,
    gpus: int,
    nics: int,
    align: Literal["numa", "pcie", "rail"],
    pairs: Flag = False,
    unaligned: Flag = False,
    rail: Rails = None,
    profile: str | None = None,
    slices: Slices = None,
    cluster: Flag = False,
    context: str | None = None,
    name: str | None = None,
    output: TemplateFormat = "yaml",
) -> None:
    """Print a ResourceClaimTemplate for GPUs and NICs that belong together on this hardware.

    It was allocated on fresh nodes of the hardware before it is printed, and the topology of what it got was
    checked.

    Parameters
    ----------
    gpus
        GPUs of a claim.
    nics
        NICs of a claim.
    align
        What they have in common: one NUMA node, one PCIe switch or root, or the rail (the same NICs on every
        node, each near a GPU).
    pairs
        A pair of requests (gpu-0/nic-0, ...) for each unit of the ratio of GPUs to NICs, aligned by itself.
    unaligned
        NICs that are far from the GPUs instead: the other arm of a comparison.
    rail
        The rails, as positions of the NICs on a node from 0. Without it: the first that fit.
    profile
        A machine or rack of `rackloom topology list`. With slices: what is known of the topology of the
        devices that they publish.
    slices
        ResourceSlices of a cluster (`kubectl get resourceslices,deviceclasses -o yaml`).
    cluster
        Ask the cluster that kubectl talks to for its slices.
    context
        Another of kubectl's contexts.
    name
        Name of the template.
    output
        How to print.
    """
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.claim.templates.generate import generate
    from rackloom.claim.templates.wish import Align, Wish

    wish = Wish(
        gpus=gpus,
        nics=nics,
        align=Align(align),
        pairs=pairs,
        unaligned=unaligned,
        rails=tuple(rail or ()),
        name=name,
    )
    found = _manifests(slices, cluster, context)
    elsewhere = _recognised(found) if found is not None and profile is None else ()
    print(_text(generate(wish, stock_of(profile, found), elsewhere=elsewhere), output), end="")


def stock_of(profile: str | None, found: "Manifests | None") -> "Stock":
    """The nodes of a profile, of slices, or of slices with the topology of a profile."""
    from rackloom.claim.templates.hardware import stock_of_machine, stock_of_slices
    from rackloom.errors import Refused

    machine = machine_of(profile) if profile is not None else None
    if found is not None:
        return stock_of_slices(found.slices, found.classes, found.nodes, machine=machine)
    if machine is None:
        fix = "name a --profile or files of --slices, or ask with --cluster"
        raise Refused("it is not known for which hardware the template is", nearest_fix=fix)
    return stock_of_machine(machine)


def machine_of(profile: str) -> "Machine":
    """The machine of a profile; of a rack, that of its trays."""
    from rackloom.errors import Refused
    from rackloom.topology import profiles
    from rackloom.topology.machine import Machine

    found = profiles.load(profile)
    if isinstance(found, Machine):
        return found
    if found.tray_machine is None:
        raise Refused(f"no machine like a tray of {found.name} is published, so its devices are not known")
    return profiles.load_machine(found.tray_machine)


def _manifests(slices: Sequence[Path] | None, cluster: bool, context: str | None) -> "Manifests | None":
    if cluster:
        from rackloom.claim.manifests.cluster import read_cluster

        return read_cluster(context)
    from rackloom.claim.manifests.read import read

    return read(slices) if slices else None


def _recognised(found: "Manifests") -> "Iterator[Elsewhere]":
    """Profiles with GPUs at the addresses that the slices show: they may know the rest of the topology."""
    from rackloom.claim.templates.hardware import stock_of_slices
    from rackloom.topology import profiles

    stock = stock_of_slices(found.slices, found.classes, found.nodes)
    seen = {gpu.pci_address for kind in stock.kinds for gpu in kind.machine.gpus} - {None}
    for name in profiles.machine_names():
        known = {gpu.pci_address for gpu in profiles.load_machine(name).gpus} - {None}
        if known and known == seen:
            yield f"--profile {name}", lambda name=name: stock_of(name, found)  # type: ignore[misc]


def _text(generated: "Generated", output: str) -> str:
    import msgspec
    import yaml

    value = manifest(generated.template)
    if output == "json":
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
    notes = "".join(f"# {note}\n" for note in generated.notes)
    return notes + yaml.safe_dump(value, sort_keys=False, width=_WIDE)


def manifest(made: "ResourceClaimTemplate") -> dict[str, object]:
    """The template as an object for the API server."""
    import msgspec

    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": made.metadata.name},
        "spec": {"spec": msgspec.to_builtins(made.spec.spec)},
    }
