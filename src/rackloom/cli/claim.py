"""`rackloom claim`: allocate device claims on given hardware, explain refusals, make templates, check files.

`template` prints a ResourceClaimTemplate that was first allocated on fresh nodes of the hardware. `check`
finds mistakes that the API server accepts and the hardware does not, with file and line. `allocate` and
`explain` run the allocator. `node-group` describes future nodes to an autoscaler. The work is in
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

    It is printed only after an allocation on fresh nodes of the hardware, with a check of the resulting
    topology.

    Parameters
    ----------
    request
        The request of the claim.
    hardware
        The hardware for the claim.
    """
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.cli.claim_template import template_text

    print(template_text(request, hardware, output), end="")


# `rackloom claim check`.


@with_common_flags
def check(file: Files, *, profile: str | None = None, slices: Slices = None, output: Output = "table") -> int:
    """Find traps in claims, templates and classes: the API server accepts them, but the hardware does not.

    Selectors are run on the devices of the hardware, and claims are allocated. Exit code 1 if there is a
    trap.

    Parameters
    ----------
    file
        Manifests to check, with their classes, slices and nodes.
    profile
        A machine or rack of `rackloom topology list` for which the claims are meant. With slices, it adds the
        known topology of their devices.
    slices
        ResourceSlices of the cluster (`kubectl get resourceslices,deviceclasses -o yaml`). Without slices and
        profile, claims are checked against all published machines.
    """
    from rackloom.cli import claim_check

    found = list(claim_check.located_findings(file, profile, slices or []))
    emit(found, output, lambda: claim_check.findings_page(found))
    return 1 if found else 0


# `rackloom claim allocate` and `explain`.


# The list of commands is plain text: loading the Markdown renderer takes longer than everything else.
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
    """Allocate each claim as if one pod used it, on the first node that can serve it.

    The cache for all claims takes up to 64 MiB in addition to the objects.

    Parameters
    ----------
    file
        Manifests with claims or templates, or a directory of them. Their classes, slices and nodes are used
        too. Claims that have an allocation keep it.
    hardware
        The hardware for the claims.
    nodes
        The number of nodes of the profile.
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
    """Account for every device of every node: why each request cannot use it, and which devices are left.

    Parameters
    ----------
    file
        Manifests with claims or templates, or a directory of them. Their classes, slices and nodes are used
        too. Claims that have an allocation hold their devices.
    hardware
        The hardware for the claims.
    nodes
        The number of nodes of the profile.
    """
    from rackloom.cli import claim_plan
    from rackloom.core.allocate.explanation import render_explanation

    accounts = claim_plan.explain_all(claim_plan.read_inputs(file, hardware, nodes))
    emit(accounts, output, lambda: "\n\n".join(map(render_explanation, accounts)))
    return claim_plan.exit_code(accounts)
