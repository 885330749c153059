"""`rackloom claim`: what device claims get on given hardware, why not, templates, and checks.

`template` prints a ResourceClaimTemplate that was allocated on fresh nodes of the hardware first. `check`
finds what the API server accepts and the hardware does not, with file and line. `allocate` and `explain`
run the allocator. `node-group` describes nodes that do not exist yet to an autoscaler. The work is in
`claim_template`, `claim_check`, `claim_plan` and `claim_node_group`, which are imported when a command runs:
the CEL library takes longer to load than help may take to print.
"""

from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from rackloom.cli.claim_options import HardwareParameters, Slices, TemplateParameters
from rackloom.cli.common import (
    OUTPUT,
    Files,
    Output,
    emit,
    progress,
    with_common_flags,
)

# `rackloom claim template`.


TemplateFormat = Annotated[Literal["yaml", "json"], OUTPUT]


@with_common_flags
def template(
    *,
    request: TemplateParameters,
    hardware: HardwareParameters = HardwareParameters(),  # noqa: B008 (a frozen value)
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
    """
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.cli.claim_template import template_text

    print(template_text(request, hardware, output), end="")


# `rackloom claim check`.


@with_common_flags
def check(file: Files, *, profile: str | None = None, slices: Slices = None, output: Output = "table") -> int:
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
    """
    from rackloom.cli import claim_check

    found = list(claim_check.located_findings(file, profile, slices or []))
    emit(found, output, lambda: claim_check.findings_page(found))
    return 1 if found else 0


# `rackloom claim allocate` and `explain`.


# The list of commands is plain text: loading the Markdown renderer takes longer than all the rest.
app = App(
    name="claim", help="Claims for devices: what they would get here, and why not.", help_format="plaintext"
)
app.command(
    "rackloom.cli.claim:template",
    name="template",
    help="A claim template for this hardware.",
    help_format="markdown",
)
app.command(
    "rackloom.cli.claim:check",
    name="check",
    help="Find the traps in claims before they are applied.",
    help_format="markdown",
)

app.command(
    "rackloom.cli.claim_node_group:node_group",
    name="node-group",
    help="Describe the nodes of an empty group to an autoscaler.",
    help_format="markdown",
)

NodeCount = Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))]


@app.command(name="allocate", help_format="markdown")
@with_common_flags
def allocate_claims(
    file: Files,
    *,
    hardware: HardwareParameters = HardwareParameters(),  # noqa: B008 (a frozen value)
    nodes: NodeCount = 1,
    mode: Literal["exact", "best"] = "exact",
    output: Output = "table",
) -> int:
    """Allocate each claim as that of a pod of its own, on the first node that can serve it.

    What is remembered between claims takes up to 64 MiB beside the objects.

    Parameters
    ----------
    file
        Manifests with claims or templates, or a directory of them; classes, slices and nodes count too.
        Claims that have an allocation keep it.
    hardware
        The hardware that a claim is for.
    nodes
        How many nodes of the profile there are.
    mode
        exact: the devices that the upstream allocator would choose. best: the valid choice that takes
        preferred alternatives, breaks the fewest NUMA nodes, PCIe roots and NVLink cliques, packs
        partitions, and keeps the devices of a claim close to each other, in this order.
    """
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.cli import claim_plan

    with progress("reading claims and devices"):
        manifests = claim_plan.read_inputs(file, hardware, nodes)
    answers = claim_plan.allocate_all(manifests, mode)
    emit(answers, output, lambda: claim_plan.allocation_page(answers, manifests.slices))
    return claim_plan.exit_code(answers)


@app.command(name="explain", help_format="markdown")
@with_common_flags
def explain_claims(
    file: Files,
    *,
    hardware: HardwareParameters = HardwareParameters(),  # noqa: B008 (a frozen value)
    nodes: NodeCount = 1,
    output: Output = "table",
) -> int:
    """Account for every device of every node: what takes it away from each request, and what is left.

    Parameters
    ----------
    file
        Manifests with claims or templates, or a directory of them; classes, slices and nodes count too.
        Claims that have an allocation hold their devices.
    hardware
        The hardware that a claim is for.
    nodes
        How many nodes of the profile there are.
    """
    from rackloom.cli import claim_plan
    from rackloom.core.allocate.explanation import render_explanation

    accounts = claim_plan.explain_all(claim_plan.read_inputs(file, hardware, nodes))
    emit(accounts, output, lambda: "\n\n".join(map(render_explanation, accounts)))
    return claim_plan.exit_code(accounts)
