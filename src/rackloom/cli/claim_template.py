"""The work of `rackloom claim template`: the hardware, and the template as text.

Without a profile, published machines with the same GPU addresses are tried too. They may know the topology
that the slices leave out, and a refusal names them.
"""

from collections.abc import Iterator

import msgspec
import yaml

from rackloom.claim.manifests.cluster import read_cluster
from rackloom.claim.manifests.read import Manifests, read_manifests
from rackloom.cli.claim_options import HardwareParameters, TemplateParameters
from rackloom.cli.common import json_text
from rackloom.cli.hardware import machine_of
from rackloom.core.allocate.templates.generate import AlternativeInventory, generate_template
from rackloom.core.allocate.templates.inventory import (
    HardwareInventory,
    inventory_of_machine,
    inventory_of_slices,
)
from rackloom.core.allocate.templates.layout import Align, TemplateRequest
from rackloom.errors import Misuse
from rackloom.topology import profiles

_YAML_WIDTH = 10_000
"""Columns of YAML: wide enough to keep an expression on one line."""


def template_text(request: TemplateParameters, hardware: HardwareParameters, output: str) -> str:
    """A template that was allocated on the hardware, as YAML with notes or as JSON."""
    wanted = TemplateRequest(
        gpus=request.gpus,
        nics=request.nics,
        align=Align(request.align),
        pairs=request.pairs,
        unaligned=request.unaligned,
        rails=tuple(request.rail or ()),
        name=request.name,
    )
    found = _hardware_manifests(hardware)
    elsewhere = _matching_profiles(found) if found is not None and hardware.profile is None else ()
    generated = generate_template(wanted, stock_of(hardware.profile, found), elsewhere=elsewhere)
    # The template as an object for the API server.
    value = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": generated.template.metadata.name},
        "spec": {"spec": msgspec.to_builtins(generated.template.spec.spec)},
    }
    if output == "json":
        return json_text(value) + "\n"
    notes = "".join(f"# {note}\n" for note in generated.notes)
    return notes + yaml.safe_dump(value, sort_keys=False, width=_YAML_WIDTH)


def stock_of(profile: str | None, found: Manifests | None) -> HardwareInventory:
    """The nodes of a profile, of slices, or of slices with the topology of a profile."""
    machine = machine_of(profile) if profile is not None else None
    if found is not None:
        return inventory_of_slices(found.slices, found.classes, found.nodes, machine=machine)
    if machine is None:
        fix = "give --profile or --slices, or ask a cluster with --cluster"
        raise Misuse("the hardware that the template is for is not named", nearest_fix=fix)
    return inventory_of_machine(machine)


def _hardware_manifests(hardware: HardwareParameters) -> Manifests | None:
    if hardware.is_live:
        return read_cluster(hardware.kubeconfig, hardware.context)
    return read_manifests(hardware.slices) if hardware.slices else None


def _matching_profiles(found: Manifests) -> Iterator[AlternativeInventory]:
    """Profiles with GPUs at the addresses of the slices: they may know the rest of the topology."""
    stock = inventory_of_slices(found.slices, found.classes, found.nodes)
    seen = {gpu.pci_address for kind in stock.kinds for gpu in kind.machine.gpus} - {None}
    for name in profiles.machine_names():
        known = {gpu.pci_address for gpu in profiles.load_machine(name).gpus} - {None}
        if known and known == seen:
            yield f"--profile {name}", lambda name=name: stock_of(name, found)  # type: ignore[misc]
