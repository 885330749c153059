"""`rackloom claim`: what claims would get on this hardware, and why not."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from rackloom.cli.output import Output, emit

app = App(name="claim", help="Claims for devices: what they would get here, and why not.")
app.command(
    "rackloom.cli.claim_template:template", name="template", help="A claim template for this hardware."
)
app.command(
    "rackloom.cli.claim_check:check", name="check", help="Find the traps in claims before they are applied."
)

Files = Annotated[list[Path], Parameter(name=["--file", "-f"], negative="", consume_multiple=True)]
Slices = Annotated[list[Path] | None, Parameter(negative="", consume_multiple=True)]
Nodes = Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))]


@app.command(name="allocate")
def allocate_claims(
    *,
    file: Files,
    profile: str | None = None,
    nodes: Nodes = 1,
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

    manifests = claim_plan.manifests([*file, *(slices or [])], profile, nodes)
    answers = claim_plan.answers(manifests, mode)
    emit(answers, output, lambda: claim_plan.page(answers, manifests.slices))
    return claim_plan.exit_code(answers)


@app.command(name="explain")
def explain_claims(
    *,
    file: Files,
    profile: str | None = None,
    nodes: Nodes = 1,
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

    accounts = claim_plan.accounts(claim_plan.manifests([*file, *(slices or [])], profile, nodes))
    emit(accounts, output, lambda: claim_plan.told_all(accounts))
    return claim_plan.exit_code(accounts)
