"""Every trap, in one case in which it is a trap and one in which it is not."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.core.allocate.cel import compiler, environment
from rackloom.core.allocate.driver_slices import slices_of
from rackloom.core.allocate.lint.claims import claim_findings, class_findings
from rackloom.core.allocate.lint.selectors import constant_truth, dotted_path, lint_context
from rackloom.core.allocate.objects import DeviceClass, ResourceClaim
from rackloom.core.allocate.templates.inventory import inventory_of_machine, inventory_of_slices
from rackloom.topology import profiles

GPU, NIC = "gpu.nvidia.com", "dranet.net"
RDMA = 'device.attributes["dra.net"].rdma == true'
NUMA_1 = f'{RDMA} && device.attributes["dra.net"].numaNode == 1'
BUS_ID = 'device.attributes["resource.kubernetes.io"].pciBusID'
ROOT = "resource.kubernetes.io/pcieRoot"
H100, P6, GB200 = "azure-nd96isr-h100-v5", "aws-p6-b200.48xlarge-b200x8-efa", "oci-bm.gpu.gb200-v3.4"
P4D, P5 = "aws-p4d.24xlarge-a100x8-dranet-slices", "aws-p5.48xlarge-h100x8-efa32"


def request(name, device_class, *selectors, count=1):
    return {
        "name": name,
        "exactly": {
            "deviceClassName": device_class,
            "allocationMode": "ExactCount",
            "count": count,
            "selectors": [{"cel": {"expression": selector}} for selector in selectors],
        },
    }


def claim(*requests, match=()):
    constraints = [{"matchAttribute": name} | ({"requests": of} if of else {}) for name, of in match]
    devices = {"requests": list(requests), "constraints": constraints}
    return msgspec.convert({"metadata": {"name": "c"}, "spec": {"devices": devices}}, ResourceClaim)


def a_class(name, *selectors):
    spec = {"selectors": [{"cel": {"expression": selector}} for selector in selectors]}
    return msgspec.convert({"metadata": {"name": name}, "spec": spec}, DeviceClass)


def on(profile):
    """The machine of a profile, or typical machines if `profile` is `typical`."""
    if profile == "typical":
        return lint_context(
            None, (), [inventory_of_machine(profiles.load_machine(name)) for name in (P4D, P5)]
        )
    return lint_context(inventory_of_machine(profiles.load_machine(profile)))


def found(asked, evidence):
    return [finding.trap.value for finding in claim_findings(asked, evidence)]


@pytest.mark.parametrize(
    ("trap", "profile", "bad", "good"),
    [
        ("does-not-compile", H100, "device.driver = 'x'", "device.driver == 'dra.net'"),
        ("does-not-compile", "typical", "device.names == 'x'", "device.driver == 'dra.net'"),
        ("does-not-compile", H100, r"device.driver.matches('\\C')", "device.driver.matches('^dra')"),
        ("does-not-compile", H100, r"device.driver.matches('dra\\E')", r"device.driver.matches('\\Qdra\\E')"),
        ("does-not-compile", "typical", "device.driver.find('(?P<é>d)') != ''", "device.driver == 'dra.net'"),
        (
            "fails-on-devices",
            H100,
            r"device.driver.matches('\\' + 'C')",
            "device.driver.matches('^' + 'dra')",
        ),
        ("constant", "typical", "true", RDMA),
        ("constant", H100, f"{NUMA_1} && {NUMA_1.replace('1', '0')}", NUMA_1),
        ("constant", "typical", f'device.driver == "a" && {RDMA} && device.driver == "b"', RDMA),
        ("matches-nothing", H100, NUMA_1.replace("1", "7"), NUMA_1),
        ("unpublished-attribute", "typical", 'device.attributes["dra.net"].lane == 1', RDMA),
        ("unpublished-attribute", H100, 'device.attributes["dra.net"].?rail.orValue(0) == 1', RDMA),
        (
            "missing-attribute",
            "typical",
            'device.attributes["dra.net"].rail == 1',
            'device.attributes["dra.net"].?rail.orValue(-1) == 1',
        ),
        (
            "missing-attribute",
            "typical",
            'device.attributes["dra.net"].ifName == "rdma0"',
            'device.attributes["dra.net"].?ifName.orValue("") == "rdma0"',
        ),
        (
            "missing-attribute",
            GB200,
            'device.attributes["dra.net"].numaNode == 1',
            'has(device.attributes["dra.net"].numaNode) && device.attributes["dra.net"].numaNode == 0',
        ),
        ("fails-on-devices", H100, 'device.attributes["dra.net"].rdmaDevice > 0', RDMA),
        ("hca-without-data", P6, NUMA_1, NUMA_1.replace("1", "0")),
        ("management-nic", P4D, 'device.attributes["dra.net"].numaNode == 0', RDMA),
    ],
)
def test_selectors_of_nics(trap, profile, bad, good):
    findings = claim_findings(claim(request("nic", NIC, bad)), on(profile))
    assert trap in [finding.trap.value for finding in findings]
    assert all(finding.why and finding.fix for finding in findings)
    assert dotted_path(findings[0].path).startswith("devices.requests[0].exactly.selectors[0]")
    assert found(claim(request("nic", NIC, good)), on(profile)) == []


@pytest.mark.parametrize(
    ("bad", "good", "fix"),
    [
        (f'{BUS_ID} == "0004:00:00.0"', f'{BUS_ID} == "0001:00:00.0"', "rackloom claim template"),
        (f'{BUS_ID} == "00000001:00:00.0"', f'{BUS_ID} == "0001:00:00.0"', "write 0001:00:00.0"),
        (
            f'{BUS_ID} in ["0001:00:00.0", "0004:00:00.0"]',
            f'{BUS_ID} in ["0009:00:00.0"]',
            "rackloom claim template",
        ),
    ],
)
def test_ids_of_another_machine(bad, good, fix):
    findings = claim_findings(claim(request("gpu", GPU, bad)), on(H100))
    assert [finding.trap.value for finding in findings] == ["id-of-another-machine"]
    assert fix in findings[0].fix
    assert found(claim(request("gpu", GPU, good)), on(H100)) == []
    assert found(claim(request("gpu", GPU, bad)), on("typical")) == []


def test_a_uuid_of_another_machine():
    uuid = 'device.attributes["gpu.nvidia.com"].uuid == "{}"'
    known = profiles.load_machine(P4D).gpus[0].uuid
    assert found(claim(request("gpu", GPU, uuid.format(known))), on(P4D)) == []
    other = uuid.format("GPU-00000000-0000-0000-0000-000000000000")
    assert found(claim(request("gpu", GPU, other)), on(P4D)) == ["id-of-another-machine"]


def test_more_than_a_node_has():
    assert found(claim(request("gpu", GPU, count=9)), on(H100)) == ["count"]
    assert found(claim(request("gpu", GPU, count=8)), on(H100)) == []
    assert found(claim(request("nic", NIC, RDMA, NUMA_1, count=5)), on(H100)) == ["count"]
    assert found(claim(request("gpu", GPU, count=5), request("more", GPU, count=4)), on(H100)) == ["no-node"]


def test_an_unknown_class_and_the_nearest_known_one():
    findings = claim_findings(claim(request("nic", "dranet")), on(H100))
    assert [(finding.trap.value, "dranet.net" in finding.fix) for finding in findings] == [
        ("unknown-class", True)
    ]
    own = lint_context(inventory_of_machine(profiles.load_machine(H100)), [a_class("dranet", "true == true")])
    assert "unknown-class" not in found(claim(request("nic", "dranet", RDMA)), own)


def test_alternatives_are_checked_where_they_stand():
    big = {"name": "big", "deviceClassName": "nothing", "allocationMode": "ExactCount", "count": 1}
    asked = claim({"name": "gpu", "firstAvailable": [big | {"deviceClassName": GPU}, big | {"name": "b"}]})
    findings = claim_findings(asked, on(H100))
    assert [dotted_path(finding.path) for finding in findings] == [
        "devices.requests[0].firstAvailable[1].deviceClassName"
    ]


def test_a_name_without_a_driver_check():
    anything = a_class("anything")
    name = 'device.attributes["dra.net"].rdmaDevice == "mlx5_0"'
    for evidence in (lint_context(None, [anything]), lint_context(on(H100).hardware, [anything])):
        findings = claim_findings(claim(request("nic", "anything", name)), evidence)
        assert [finding.trap.value for finding in findings] == ["no-driver-check"]
        assert "device.driver == 'dra.net'" in findings[0].fix
    checked = f"device.driver == 'dra.net' && {name}"
    evidence = lint_context(on(H100).hardware, [anything])
    assert found(claim(request("nic", "anything", checked)), evidence) == []


def test_one_root_for_all():
    both = (request("gpu", GPU, count=4), request("nic", NIC, RDMA, count=4))
    few = (request("gpu", GPU, count=2), request("nic", NIC, RDMA))
    for evidence in (on(P5), on(P4D), on("typical")):
        findings = claim_findings(claim(*both, match=[(ROOT, ())]), evidence)
        assert [finding.trap.value for finding in findings] == ["one-value-for-all"]
        assert dotted_path(findings[0].path) == "devices.constraints[0].matchAttribute"
        assert "--pairs" in findings[0].fix
    assert found(claim(*few, match=[(ROOT, ())]), on(P4D)) == []
    assert found(claim(*few, match=[(ROOT, ["gpu", "nic"])]), on("typical")) == []


def test_one_root_where_pairs_do_not_help_either():
    asked = claim(request("gpu", GPU, count=3), request("nic", NIC, RDMA), match=[(ROOT, ())])
    findings = claim_findings(asked, on(P4D))
    assert [finding.trap.value for finding in findings] == ["one-value-for-all"]
    assert "fewer" in findings[0].fix


def test_a_constraint_on_what_nics_do_not_publish():
    both = (request("gpu", GPU), request("nic", NIC, RDMA))
    assert found(claim(*both, match=[(ROOT, ())]), on(H100)) == ["unpublished-attribute"]
    assert found(claim(*both, match=[("dra.net/lane", ())]), on("typical")) == ["unpublished-attribute"]
    assert found(claim(*both, match=[(ROOT, ())]), on(P4D)) == []


def test_classes_are_asked_of_the_devices_of_all_drivers():
    name = 'device.attributes["gpu.nvidia.com"].type == "gpu"'
    for evidence in (on("typical"), on(H100)):
        traps = [finding.trap.value for finding in class_findings(a_class("gpus", name), evidence)]
        assert traps == ["no-driver-check"]
        checked = a_class("gpus", f"device.driver == 'gpu.nvidia.com' && {name}")
        assert list(class_findings(checked, evidence)) == []


def test_what_a_profile_does_not_know_is_no_trap():
    """Two NICs of the GB200 profile have no known RDMA device. DRANET publishes `rdma` for every device."""
    asked = claim(request("nic", NIC, NUMA_1, count=4))
    assert found(asked, on(GB200)) == []
    seen = lint_context(inventory_of_slices(slices_of(profiles.load_machine(GB200), "a")))
    assert found(asked, seen) == ["missing-attribute"]


def test_a_fix_for_idle_hcas_selects_the_others():
    fix = claim_findings(claim(request("nic", NIC, NUMA_1)), on(P6))[0].fix
    assert found(claim(request("nic", NIC, fix.removeprefix("select: "), count=4)), on(P6)) == []


def test_a_fix_for_a_missing_attribute_is_an_answer_for_every_device():
    bad = 'device.attributes["dra.net"].numaNode == 0'
    fix = claim_findings(claim(request("nic", NIC, bad)), on("typical"))[0].fix
    assert found(claim(request("nic", NIC, f"{fix.removeprefix('write ')} == 0")), on("typical")) == []


TERMS = st.sampled_from(
    [
        f'device.attributes["dra.net"].numaNode {sign} {value}'
        for sign in ("==", "<", "!=")
        for value in (0, 1, 3)
    ]
)


@settings(max_examples=40)
@given(st.lists(TERMS, min_size=1, max_size=3), st.sampled_from([" && ", " || "]), st.booleans())
def test_constant_is_said_only_of_what_is(terms, joined, negated):
    expression = f"!({joined.join(terms)})" if negated else joined.join(terms)
    program = compiler.compile_selector(expression)
    truths = {
        program.matches(environment.DeviceView.of("dra.net", {"dra.net/numaNode": {"int": value}}, {}))
        for value in range(-3, 7)
    }
    assert constant_truth(program) == (truths.pop() if len(truths) == 1 else None)


@pytest.mark.parametrize(
    "expression",
    [
        'device.attributes["dra.net"].ifName.startsWith("eth")',
        'device.attributes["dra.net"].exists(key, key == "rdma")',
        "device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('1Gi'))",
        "device.allowMultipleAllocations",
        " || ".join(f'device.attributes["d"].a{n} == {n}' for n in range(9)),
    ],
)
def test_of_other_functions_nothing_is_said(expression):
    assert constant_truth(compiler.compile_selector(expression)) is None


def deriving(what, device_class, expression, *selectors, count=1):
    asked = request(what, device_class, *selectors, count=count)
    asked["exactly"]["derivedAttributes"] = [{"name": "derived/place", "expression": expression}]
    return asked


@pytest.mark.parametrize(
    ("expression", "traps"),
    [
        ('device.attributes["dra.net"].rdmaDevice.substring(0, 4)', []),
        ('device.attributes["dra.net"].numaNode', []),
        ('device.attributes["dra.net"].', ["does-not-compile"]),
        ("1.5", ["does-not-compile"]),
        ('device.attributes["dra.net"].numaNod', ["unpublished-attribute"]),
        ('int(device.attributes["dra.net"].rdmaDevice)', ["fails-on-devices"]),
    ],
)
def test_expressions_of_derived_attributes_are_checked_like_selectors(expression, traps):
    """A constraint on a derived attribute needs no driver that publishes it."""
    asked = claim(deriving("nic", NIC, expression, NUMA_1), match=[("derived/place", ["nic"])])
    assert found(asked, on(H100)) == traps
