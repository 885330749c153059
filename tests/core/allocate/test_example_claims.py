"""The claims of the NIXL example on the machine that it was measured on."""

from pathlib import Path
from typing import Any

import pytest

from rackloom.claim.manifests.read import read_manifests
from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.allocate.eligibility import candidates_of
from rackloom.core.allocate.inputs import Features
from rackloom.core.allocate.objects import Device, Node, ObjectMeta
from rackloom.core.allocate.outcome import Allocation
from rackloom.core.allocate.planning import PlacedClaim, RefusedClaim, allocate_each
from rackloom.core.allocate.pools import SliceIndex, gather_pools
from rackloom.topology import profiles

EXAMPLE = Path(__file__).parents[3] / "examples" / "nixl-kv-transfer"
MACHINE = profiles.load_machine("azure-nd96isr-h100-v5")


def node(name: str) -> Node:
    return Node(metadata=ObjectMeta(name=name))


def claim_of(which: str) -> Any:
    return read_manifests([EXAMPLE / f"resource-claim-template-{which}.yaml"]).claims[0]


@pytest.mark.parametrize(("which", "first_nic"), [("aligned", 0), ("unaligned", 4)])
def test_four_gpus_of_numa_0_with_near_or_far_nics(which: str, first_nic: int) -> None:
    slices = slices_of(MACHINE, "n")
    outcome = allocate(node("n"), device_classes(), slices, [claim_of(which)])
    assert isinstance(outcome, Allocation)
    known = {device.name: device.attributes for two in slices for device in two.spec.devices}
    given = outcome.results[0].devices.results
    gpus = [known[device.device]["resource.kubernetes.io/pciBusID"].string for device in given[:4]]
    nics = [known[device.device]["dra.net/rdmaDevice"].string for device in given[4:]]
    assert gpus == ["0001:00:00.0", "0002:00:00.0", "0003:00:00.0", "0008:00:00.0"]
    assert nics == [f"mlx5_{first_nic + number}" for number in range(4)]


def test_both_pods_take_a_node_each_and_a_third_is_refused_with_the_holder() -> None:
    names = ["node-0", "node-1"]
    slices = [slice_ for name in names for slice_ in slices_of(MACHINE, name)]
    claims = [claim_of("aligned"), claim_of("unaligned"), claim_of("aligned")]
    answers = allocate_each([node(name) for name in names], device_classes(), slices, claims)
    assert [answer.node for answer in answers if isinstance(answer, PlacedClaim)] == names
    refused = answers[2]
    assert isinstance(refused, RefusedClaim)
    gpu = refused.nodes[0].requests[0]
    assert gpu.request == "gpu"
    first = gpu.removed[0]
    assert (first.cause, first.detail, len(first.devices)) == (
        "in-use",
        "h100-4gpu-4nic-numa-aligned",
        8,
    )
    assert gpu.left == ()
    assert refused.nodes[1].conflict == ("h100-4gpu-4nic-numa-aligned/gpu",)


def attributes(profile: str, driver: str) -> list[Device]:
    slices = slices_of(profiles.load_machine(profile), "n")
    return [device for two in slices if two.spec.driver == driver for device in two.spec.devices]


def test_azure_nics_have_no_pcie_root_and_gb200_nics_have() -> None:
    name = "resource.kubernetes.io/pcieRoot"
    assert not any(
        name in attribute.attributes for attribute in attributes("azure-nd96isr-h100-v5", "dra.net")
    )
    assert any(name in attribute.attributes for attribute in attributes("oci-bm.gpu.gb200-v3.4", "dra.net"))


def test_nics_that_must_not_carry_data_are_published_as_dranet_does() -> None:
    machine = profiles.load_machine("aws-p6-b200.48xlarge-b200x8-efa")
    assert len(attributes(machine.name, "dra.net")) == len(machine.nics)


@pytest.mark.parametrize("profile", profiles.machine_names())
def test_every_profile_makes_sound_slices(profile: str) -> None:
    machine = profiles.load_machine(profile)
    slices = slices_of(machine, "n")
    pools = gather_pools(node("n"), SliceIndex(slices), Features())
    assert not [pool for pool in pools if pool.trouble]
    devices = candidates_of(pools, Features())
    assert len(devices) == len(machine.gpus) + len(machine.nics)
    assert all(device.view.problem is None for device in devices)
