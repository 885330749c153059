"""Slices of a cluster instead of a profile: less is known, nodes differ, and every kind is checked."""

import msgspec
import pytest

from rackloom.core.allocate.driver_slices import slices_of
from rackloom.core.allocate.objects import Device, DeviceAttribute, DeviceClass, ObjectMeta
from rackloom.core.allocate.templates.generate import generate_template
from rackloom.core.allocate.templates.inventory import inventory_of_slices
from rackloom.core.allocate.templates.layout import Align, TemplateRequest
from rackloom.errors import Refused
from rackloom.topology import profiles

H100 = profiles.load_machine("azure-nd96isr-h100-v5")
P4D = profiles.load_machine("aws-p4d.24xlarge-a100x8-efa")
P6 = profiles.load_machine("aws-p6-b200.48xlarge-b200x8-efa")


def changed(slices, change):
    """The slices with `change` applied to each device (None drops it)."""
    return tuple(
        msgspec.structs.replace(
            slice_,
            spec=msgspec.structs.replace(
                slice_.spec,
                devices=tuple(new for old in slice_.spec.devices if (new := change(old)) is not None),
            ),
        )
        for slice_ in slices
    )


def with_attributes(device, more):
    return msgspec.structs.replace(device, attributes={**device.attributes, **more})


def without(*names):
    """A change that takes attributes away."""

    def change(device: Device) -> Device:
        kept = {name: value for name, value in device.attributes.items() if name not in names}
        return msgspec.structs.replace(device, attributes=kept)

    return change


def test_roots_in_slices_are_enough_for_pairs(ask):
    made = ask(inventory_of_slices(slices_of(P4D, "a")), 4, 4, "pcie", pairs=True)
    assert len(made.template.spec.spec.devices.constraints) == 4


def test_numa_nodes_of_gpus_that_are_not_published_come_from_their_root(ask):
    assert ask(inventory_of_slices(slices_of(P4D, "a")), 4, 2, "numa").verified.devices[0] == (
        (0, 1, 2, 3),
        (0, 1),
    )


def test_published_numa_nodes_of_gpus_are_matched_and_nothing_is_pinned(ask):
    def publish(device):
        if not device.name.startswith("gpu"):
            return device
        node = int(device.name[-1]) // 4
        return with_attributes(device, {"resource.kubernetes.io/numaNode": DeviceAttribute(int_=node)})

    made = ask(inventory_of_slices(changed(slices_of(H100, "a"), publish)), 4, 4, "numa")
    devices = made.template.spec.spec.devices
    assert [constraint.match_attribute for constraint in devices.constraints] == [
        "resource.kubernetes.io/numaNode"
    ]
    assert devices.requests[0].exactly.selectors == ()


def test_what_slices_do_not_tell_a_profile_may(ask):
    slices = slices_of(H100, "a")
    asked = TemplateRequest(gpus=4, nics=4, align=Align.NUMA)
    option = "--profile azure-nd96isr-h100-v5"
    with pytest.raises(Refused, match="NUMA nodes of the GPUs of a are not known") as refused:
        generate_template(
            asked,
            inventory_of_slices(slices),
            elsewhere=[(option, lambda: inventory_of_slices(slices, machine=H100))],
        )
    assert refused.value.nearest_fix == f"add {option}"
    made = ask(inventory_of_slices(slices, machine=H100), 4, 4, "numa")
    assert made.verified.devices[0] == ((0, 1, 2, 3), (0, 1, 2, 3))


def test_declared_classes_of_a_profile_follow_the_devices_of_the_slices(ask):
    gke = profiles.load_machine("gke-a4-highgpu-8g-b200")

    def no_first(device: Device) -> Device | None:
        return None if device.name in ("gpu-0", "gpu0rdma0") else device

    stock = inventory_of_slices(changed(slices_of(gke, "a"), no_first), machine=gke)
    made = ask(stock, 3, 3, "pcie", pairs=True)
    assert made.verified.devices[0] == ((0, 1, 2), (0, 1, 2))


def test_rdma_devices_of_another_kind_are_left_out(ask):
    def model(device):
        if device.name.startswith("gpu"):
            return device
        kind = device.attributes.get("dra.net/pciDevice") or DeviceAttribute(string="EFA")
        return with_attributes(device, {"dra.net/pciDevice": kind})

    made = ask(inventory_of_slices(changed(slices_of(P6, "a"), model)), 8, 8, "pcie", pairs=True)
    assert {"pci-0000-73-00-0", "pci-0000-74-00-0"} == {
        note.split()[2] for note in made.notes if note.startswith("left out")
    }
    nic = made.template.spec.spec.devices.requests[1].exactly.selectors[0].cel.expression
    assert 'pciDevice.orValue("") == "EFA"' in nic


def test_no_gpus_and_no_nics(ask):
    gpus, nics = slices_of(P4D, "a")
    with pytest.raises(Refused, match="no NICs are published"):
        ask(inventory_of_slices([gpus]), 1, 1, "pcie")
    with pytest.raises(Refused, match="no GPUs are published"):
        ask(inventory_of_slices([nics]), 1, 1, "pcie")
    with pytest.raises(Refused, match="no slice names a node"):
        ask(inventory_of_slices([]), 1, 1, "pcie")


def test_nothing_that_tells_the_rail_is_a_refusal(ask):
    names = ("dra.net/pciAddress", "dra.net/rdmaDevice", "dra.net/ifName")
    slices = changed(slices_of(P4D, "a"), without(*names))
    with pytest.raises(Refused, match="tells the rail") as refused:
        ask(inventory_of_slices(slices), 1, 1, "rail")
    assert refused.value.nearest_fix == "ask for --gpus 1 --nics 1 --align numa"


def test_a_hundred_equal_nodes_are_one_kind(ask):
    slices = [slice_ for number in range(100) for slice_ in slices_of(P4D, f"n{number:03}")]
    stock = inventory_of_slices(slices)
    assert [len(kind.nodes) for kind in stock.kinds] == [100]
    assert ask(stock, 2, 1, "pcie").verified.nodes == 100


def test_nodes_of_another_kind_that_cannot_serve_do_no_harm(ask):
    p5 = profiles.load_machine("aws-p5.48xlarge-h100x8-efa32")
    stock = inventory_of_slices([*slices_of(P4D, "a"), *slices_of(P4D, "b"), *slices_of(p5, "c")])
    made = ask(stock, 2, 1, "pcie")
    assert (made.verified.nodes, made.verified.of) == (2, 3)


def test_a_template_that_another_kind_of_node_would_serve_wrongly_is_refused(ask):
    """The addresses are the same but the wiring differs: NICs 0 and 4 swap their NUMA nodes."""

    def swapped(device):
        node = {"pci-0101-00-00-0": 1, "pci-0105-00-00-0": 0}.get(device.name)
        more = {"dra.net/numaNode": DeviceAttribute(int_=node)} if node is not None else {}
        return with_attributes(device, more)

    rails = changed(slices_of(H100, "b"), swapped)
    published = DeviceAttribute(int_=0)

    def numa(device):
        name = "resource.kubernetes.io/numaNode"
        return with_attributes(device, {name: published}) if device.name == "gpu-0" else device

    stock = inventory_of_slices([*changed(slices_of(H100, "a"), numa), *changed(rails, numa)])
    with pytest.raises(Refused, match="on b the template would give"):
        ask(stock, 1, 1, "rail", rails=(0,))


def test_the_class_of_the_cluster_is_used_where_ours_does_not_hold_the_devices(ask):
    spec = {"selectors": [{"cel": {"expression": 'device.driver == "dra.net"'}}]}
    classes = [
        DeviceClass(metadata=ObjectMeta(name="dranet.net")),
        msgspec.convert({"metadata": {"name": "fabric"}, "spec": spec}, DeviceClass),
    ]
    made = ask(inventory_of_slices(slices_of(P4D, "a"), classes), 1, 1, "pcie")
    assert [request.exactly.device_class_name for request in made.template.spec.spec.devices.requests] == [
        "gpu.nvidia.com",
        "fabric",
    ]


def test_a_tainted_machine_cannot_serve_and_says_so(ask):
    taint = msgspec.convert([{"key": "broken", "effect": "NoSchedule"}], tuple)

    def tainted(device):
        return msgspec.convert(msgspec.to_builtins(device) | {"taints": list(taint)}, Device)

    with pytest.raises(Refused, match="cannot serve the template"):
        ask(inventory_of_slices(changed(slices_of(P4D, "a"), tainted)), 1, 1, "pcie")
