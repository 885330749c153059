"""Each published machine x alignment x pairs: a template with an aligned allocation, or a refusal."""

import re

import pytest

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.checker import AllocationChecker
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.allocate.lint.claims import claim_findings
from rackloom.core.allocate.lint.selectors import lint_context
from rackloom.core.allocate.objects import ResourceClaim
from rackloom.core.allocate.outcome import Allocation
from rackloom.core.allocate.templates.layout import Align, TemplateRequest
from rackloom.errors import Refused
from rackloom.topology import profiles
from rackloom.topology.affinity import classes
from rackloom.topology.machine import numa_of

CASES = [(align, pairs) for align in Align for pairs in (False, True)]
# numa, numa in pairs, pcie, pcie in pairs, rail, rail in pairs: for 4 GPUs and 4 NICs, then for 2 and 1.
SERVED = {
    "alibaba-ecs.gn8is-2x.8xlarge": "------ ------",
    "aws-g5.48xlarge-a10gx8": "------ --++++",
    "aws-g6.48xlarge-l4x8": "------ ++--++",
    "aws-p3dn.24xlarge-v100x8": "------ --++++",
    "aws-p4d.24xlarge-a100x8-dranet-slices": "-+-+++ ++++++",
    "aws-p4d.24xlarge-a100x8-efa": "-+-+++ ++++++",
    "aws-p5.48xlarge-h100x8-efa32": "++-+++ ++----",
    "aws-p5en.48xlarge-h200x8-efa16": "++-+++ ++++++",
    "aws-p6-b200.48xlarge-b200x8-efa": "++-+++ ++++++",
    "azure-nd128isr-gb300-v6": "-+--++ ++--++",
    "azure-nd96asr-a100-v4": "-+-+++ ++++++",
    "azure-nd96isr-h100-v5": "++-+++ ++----",
    "azure-nd96isr-mi300x-v5": "------ ------",
    "gke-a4-highgpu-8g-b200": "++-+++ ++++++",
    "oci-bm.gpu.gb200-v3.4": "-+--++ ++--++",
    "oci-bm.gpu.h100.8": "------ ------",
}


def wished(text):
    """The request that the options in a fix describe."""
    numbers = {word: int(count) for word, count in re.findall(r"--(gpus|nics) (\d+)", text)}
    align = re.search(r"--align (\w+)", text).group(1)
    return numbers["gpus"], numbers["nics"], align, {"pairs": "--pairs" in text}


def near_enough(machine, align, gpu, nic):
    """The rule of the alignment, computed from the topology alone and not by the generator."""
    cell = classes(machine)[gpu][nic]
    if align == "pcie":
        return cell.path_class in ("PIX", "PXB", "PHB")
    here, there = numa_of(machine.gpus[gpu]), numa_of(machine.nics[nic])
    return cell.path_class in ("PIX", "PXB", "PHB", "NODE") or (here is not None and here == there)


def given(machine, template, node):
    """Indices of GPUs and NICs per ending of the request names, from an allocation that breaks no rule."""
    slices, claim = slices_of(machine, node.metadata.name), ResourceClaim(spec=template.spec.spec)
    outcome = allocate(node, device_classes(), slices, [claim])
    assert isinstance(outcome, Allocation)
    assert list(AllocationChecker(node, device_classes(), slices).violations([claim], outcome.results)) == []
    position = {
        (slice_.spec.driver, device.name): index
        for slice_ in slices
        for index, device in enumerate(slice_.spec.devices)
    }
    found = {}
    for result in outcome.results[0].devices.results:
        kind, _, ending = result.request.partition("-")
        found.setdefault(ending, {"gpu": [], "nic": []})[kind].append(position[result.driver, result.device])
    return found


def test_the_table_names_every_machine():
    assert set(SERVED) == set(profiles.machine_names())


@pytest.mark.slow
@pytest.mark.parametrize("name", profiles.machine_names())
@pytest.mark.parametrize(("counts", "column"), [((4, 4), 0), ((2, 1), 1)])
def test_a_template_that_holds_or_a_refusal_with_a_fix_that_works(ask, stock_of, name, counts, column):
    machine, stock, answers = profiles.load_machine(name), stock_of(name), ""
    for align, pairs in CASES:
        try:
            made = ask(name, *counts, align, pairs=pairs)
        except Refused as refused:
            answers += "-"
            if refused.nearest_fix is not None:
                gpus, nics, other, more = wished(refused.nearest_fix)
                ask(name, gpus, nics, other, **more)  # raises if the fix does not work
            continue
        answers += "+"
        rails = []
        for node in stock.kinds[0].nodes:
            groups = given(machine, made.template, node)
            for group in groups.values():
                excluded = {machine.nics[nic].excluded for nic in group["nic"]}
                assert excluded == {None}
                table = [[near_enough(machine, align, g, n) for n in group["nic"]] for g in group["gpu"]]
                if align == "rail":
                    assert all(map(any, table))
                    assert all(map(any, zip(*table, strict=True)))
                elif (name, align) != ("aws-p4d.24xlarge-a100x8-dranet-slices", "numa"):
                    assert all(map(all, table))
            rails.append(sorted(nic for group in groups.values() for nic in group["nic"]))
        assert rails[0] == rails[1]
        assert claim_findings(ResourceClaim(spec=made.template.spec.spec), lint_context(stock)) == []
        assert claim_findings(ResourceClaim(spec=made.template.spec.spec), lint_context(None)) == []
    assert answers == SERVED[name].split()[column]


@pytest.mark.parametrize("name", profiles.machine_names())
def test_no_constraint_covers_the_whole_claim_by_leaving_requests_out(ask, name):
    for align, pairs in CASES:
        try:
            made = ask(name, 2, 2, align, pairs=pairs)
        except Refused:
            continue
        for constraint in made.template.spec.spec.devices.constraints:
            assert len(constraint.requests) == 2


def test_the_example_of_the_h100_machine(ask):
    """The claim that people write by hand for this machine, device for device."""
    made = ask("azure-nd96isr-h100-v5", 4, 4, "numa")
    assert made.verified.devices == (((0, 1, 2, 3), (0, 1, 2, 3)),)
    far = ask("azure-nd96isr-h100-v5", 4, 4, "numa", unaligned=True)
    assert far.verified.devices == (((0, 1, 2, 3), (4, 5, 6, 7)),)


def test_one_root_with_two_gpus_serves_units_of_two_and_one(ask):
    made = ask("aws-p4d.24xlarge-a100x8-efa", 8, 4, "pcie", pairs=True)
    constraints = made.template.spec.spec.devices.constraints
    assert [constraint.requests for constraint in constraints] == [(f"gpu-{n}", f"nic-{n}") for n in range(4)]
    assert {request.exactly.count for request in made.template.spec.spec.devices.requests} == {2, 1}


def test_pairs_without_pci_roots_are_told_by_address(ask):
    made = ask("azure-nd96isr-h100-v5", 2, 2, "pcie", pairs=True)
    assert made.template.spec.spec.devices.constraints == ()
    assert made.verified.devices == (((0, 1), (0, 1)),)


def test_useless_pci_roots_are_not_matched(ask):
    """On GB200 the GPU hangs off NVLink-C2C, and no NIC shares its root."""
    with pytest.raises(Refused, match="below one PCIe root") as refused:
        ask("oci-bm.gpu.gb200-v3.4", 1, 1, "pcie")
    assert "--align numa" in refused.value.nearest_fix


@pytest.mark.parametrize(("rails", "gpus"), [((0, 1, 2, 3), (0, 1, 2, 3)), ((6, 7), (6, 7)), ((5,), (5,))])
def test_rails_are_pinned_on_every_node(ask, rails, gpus):
    made = ask("azure-nd96isr-h100-v5", len(rails), len(rails), "rail", rails=rails, pairs=True)
    assert made.verified.devices == ((gpus, rails),)


def test_ports_of_one_card_are_not_taken_twice_while_another_card_is_free(ask):
    assert ask("oci-bm.gpu.gb200-v3.4", 4, 4, "rail").verified.devices == (((0, 1, 2, 3), (0, 2, 4, 6)),)


@pytest.mark.parametrize(
    ("gpus", "nics", "align", "more", "fix"),
    [
        (0, 1, "numa", {}, "at least one"),
        (1, 1, "numa", {"rails": (0,)}, "--align rail"),
        (2, 2, "rail", {"rails": (1,)}, "--nics 1"),
        (1, 1, "rail", {"rails": (8,)}, "0 to 7"),
        (1, 1, "numa", {"name": "No_Name"}, "a-z"),
    ],
)
def test_wishes_that_make_no_sense_say_what_to_write(ask, gpus, nics, align, more, fix):
    with pytest.raises(Refused) as refused:
        ask("azure-nd96isr-h100-v5", gpus, nics, align, **more)
    assert fix in refused.value.nearest_fix


def test_more_devices_than_a_claim_holds(ask):
    with pytest.raises(Refused, match="more than a claim can hold"):
        ask("aws-p5.48xlarge-h100x8-efa32", 8, 32, "numa")


def test_the_flags_of_a_wish_are_the_wish():
    asked = TemplateRequest(gpus=4, nics=2, align=Align.RAIL, pairs=True, unaligned=True, rails=(1, 3))
    assert asked.flags == "--gpus 4 --nics 2 --align rail --pairs --unaligned --rail 1 3"
