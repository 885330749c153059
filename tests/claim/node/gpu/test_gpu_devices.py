"""The published devices of a node's GPUs, for every machine and within the API's limits."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.allocate.known_attributes import unknown_to_lint

from rackloom.claim.manifests.read import read_manifests
from rackloom.claim.node.gpu.inventory import (
    GpuInventory,
    GpuLocation,
    MigDevice,
    MigPartition,
    NicPartner,
    NodeGpu,
    RecoveryAction,
    gpu_device,
    mig_device,
    parse_shares,
    semantic_version,
)
from rackloom.claim.node.gpu.monitor import AnnouncedRecovery, GpuCondition, gpu_taints
from rackloom.claim.node.gpu.partitions import counter_set, partitionable_devices
from rackloom.claim.node.gpu.passthrough import VfioGpu, vfio_device
from rackloom.claim.node.gpu.xids import XidFinding, XidRules, XidsSeen
from rackloom.claim.node.plugin import Health
from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.driver_slices import slices_of
from rackloom.core.allocate.objects import Node, ObjectMeta, ResourcePool, ResourceSlice, ResourceSliceSpec
from rackloom.core.allocate.outcome import Allocation
from rackloom.topology import profiles
from rackloom.topology.affinity import classes
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source

EXAMPLES = Path(__file__).parents[4] / "examples/nixl-kv-transfer"
words = st.one_of(st.none(), st.text(max_size=80))
amounts = st.integers(0, 2**63 - 1)
keys = st.builds(
    GpuKey,
    place=st.builds(
        lambda chassis, slot, module: Fact(SlotKey(chassis, slot, module), Source.NVML),
        st.from_regex(r"\A[0-9A-Z]{1,32}\Z"),
        st.integers(0, 255),
        st.integers(0, 255),
    ),
    fabric_guid=st.integers(0, 2**64 - 1).map(lambda guid: Fact(guid, Source.NVML)),
    gpu_uuid=st.uuids().map(lambda uuid: Fact(f"GPU-{uuid}", Source.NVML)),
)
migs = st.builds(
    MigDevice,
    uuid=st.uuids().map(lambda uuid: f"MIG-{uuid}"),
    profile=st.sampled_from(["1g.10gb", "1g.10gb+me", "1c.2g.20gb", "7g.80gb", "1g.12gb+gfx"]),
    placement_start=st.integers(0, 7),
    placement_size=st.integers(0, 8),
    **{
        name: st.integers(0, 10**6)
        for name in ("gpu_instance", "compute_instance", "profile_id", "memory_bytes", "multiprocessors")
    },
)
times = st.floats(0, 10)
gpus = st.builds(
    NodeGpu,
    minor=st.integers(0, 255),
    uuid=st.uuids().map(lambda uuid: f"GPU-{uuid}"),
    pci_address=st.from_regex(r"\A[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z"),
    product=st.text(max_size=100),
    memory_bytes=amounts,
    brand=words,
    architecture=words,
    compute_capability=words,
    addressing_mode=words,
    migs=st.lists(migs, max_size=3).map(tuple),
    key=keys,
    clique=st.one_of(st.just(""), st.uuids().map(lambda uuid: f"{uuid}.32766")),
    tray=st.one_of(st.none(), st.integers(0, 255)),
    recovery=st.one_of(st.none(), st.sampled_from(RecoveryAction)),
    fabric_health=st.sampled_from(Health),
)
places = st.builds(
    GpuLocation,
    pcie_root=words,
    numa_node=st.one_of(st.none(), st.integers(0, 63)),
    nic=st.one_of(st.none(), st.builds(NicPartner, rdma=words, pci_address=words, path_class=st.just("PIX"))),
)
inventories = st.builds(GpuInventory, driver_version=words, cuda_version=words)
findings = st.builds(
    XidFinding,
    number=st.sampled_from([74, 144, 145, 149]),
    action=st.sampled_from(["", "IGNORE", "RESET_GPU", "XID_154_EVAL", "CHECK_NVLINK_FAILURE_FLOW"]),
)
announcements = st.builds(
    AnnouncedRecovery, sequence=st.just(1), action=st.sampled_from(RecoveryAction), at=times
)
conditions = st.builds(
    GpuCondition,
    gpu=gpus,
    lost_since=st.one_of(st.none(), times),
    xids=st.builds(
        XidsSeen,
        events=st.dictionaries(st.integers(1, 200), times),
        findings=st.dictionaries(findings, times),
    ),
    announced=st.one_of(st.none(), announcements),
    monitored=st.booleans(),
)


def check_device(device):
    """The API server's own limits: 32 attributes and capacities, names, and the length of values."""
    assert len(device.attributes) + len(device.capacity) <= 32
    for name in (*device.attributes, *device.capacity):
        domain, _, own = name.rpartition("/")
        assert len(domain) <= 63
        assert 1 <= len(own) <= 32
        assert own.isidentifier()
    for value in device.attributes.values():
        wire = msgspec.to_builtins(value)
        assert len(wire) == 1
        text = wire.get("string", wire.get("version", ""))
        assert len(str(text).encode()) <= 64
    assert len(device.name) <= 63
    assert device.name.replace("-", "").isalnum()
    assert device.name == device.name.lower()


@given(
    gpu=gpus,
    inventory=inventories,
    place=places,
    shares=st.sampled_from(["disabled", "memory", "unlimited", "7"]),
)
def test_every_device_is_within_the_limits_of_the_api(gpu, inventory, place, shares):
    """Also as one that several claims may have, which has one capacity more."""
    published = parse_shares(shares).of
    check_device(published(gpu_device(gpu, inventory, place)))
    for mig in gpu.migs:
        check_device(published(mig_device(gpu, mig, inventory, place)))
    parts = tuple(partition_like(mig, gpu.uuid) for mig in gpu.migs)
    if parts:
        divided = msgspec.structs.replace(gpu, migs=(), partitions=parts, mig_switchable=True)
        for device in partitionable_devices(divided, inventory, place):
            check_device(device)
            assert all(len(draw.counters) <= 32 for draw in device.consumes_counters)
        assert len(counter_set(divided).name) <= 63


def partition_like(mig, gpu):
    """A MIG device that could be made where `mig` is."""
    fields = ("profile", "profile_id", "placement_start", "placement_size", "memory_bytes", "multiprocessors")
    return MigPartition(gpu=gpu, compute_slices=1, **{name: getattr(mig, name) for name in fields})


@given(condition=conditions, now=st.floats(0, 20))
def test_there_is_one_taint_at_most_for_each_key_and_effect(condition, now):
    taints = gpu_taints(condition, XidRules(now=now))
    assert len({(taint.key, taint.effect) for taint in taints}) == len(taints) <= 16
    for taint in taints:
        assert taint.effect in ("NoSchedule", "None")
        assert len(taint.value) <= 63


@pytest.mark.parametrize(
    ("written", "reported"),
    [
        ("580.126.20", "580.126.20"),
        ("535.104.05", "535.104.5"),
        ("590.44", "590.44.0"),
        ("9.0", "9.0.0"),
        ("13", "13.0.0"),
        ("no version", None),
        (None, None),
    ],
)
def test_versions_are_semantic(written, reported):
    found = semantic_version(written)
    assert (None if found is None else found.version) == reported


def test_a_gpu_for_a_virtual_machine():
    vfio = VfioGpu(
        index=3,
        pci_address="0000:41:00.0",
        vendor_id="0x10de",
        device_id="0x2330",
        group=17,
        addressable_memory=1 << 37,
        pcie_root="pci0000:40",
        numa_node=0,
    )
    device = vfio_device(vfio)
    check_device(device)
    assert device.name == "gpu-vfio-3"
    assert device.attributes["iommuFDEnabled"].bool_ is False
    assert device.attributes["uuid"].string == "c6d656ef-bc10-58ab-8b52-b6bd2b19e909"


def published(gpus_):
    return asyncio.run(gpus_.view().pool("n")).devices


@pytest.mark.slow
@pytest.mark.parametrize("profile", profiles.machine_names())
def test_every_machine_publishes_its_gpus(make_gpus, profile):
    kit = make_gpus(profile)
    devices = published(kit)
    assert len(devices) == (0 if "mi300x" in profile else len(kit.machine.gpus))
    matrix = classes(kit.machine)
    for device, gpu in zip(devices, kit.machine.gpus, strict=False):
        check_device(device)
        attributes = device.attributes
        assert unknown_to_lint("gpu.nvidia.com", attributes) == set()
        assert attributes["uuid"].string == kit.inventory.gpus[gpu.index].uuid
        if gpu.numa_node is not None:
            assert attributes["resource.kubernetes.io/numaNode"].int_ == gpu.numa_node.value
        partner = attributes.get("nicPartner")
        if partner is not None:
            column = [nic.rdma_device or nic.if_name for nic in kit.machine.nics].index(partner.string)
            assert matrix[gpu.index][column].path_class == attributes["nicPartnerClass"].string


def test_eight_gpus_have_eight_nics_of_their_own(gpus):
    partners = [device.attributes["nicPartner"].string for device in published(gpus)]
    assert len(set(partners)) == 8


@pytest.mark.parametrize("template", ["aligned", "unaligned"])
def test_the_templates_of_the_seed_are_allocated_on_what_is_published(gpus, template):
    files = ("device-classes.yaml", f"resource-claim-template-{template}.yaml")
    wanted = read_manifests(EXAMPLES / name for name in files)
    node = Node(metadata=ObjectMeta(name="n"))
    _, nics = planned = slices_of(gpus.machine, "n")
    found = allocate(node, wanted.classes, [_slice("gpu.nvidia.com", published(gpus)), nics], wanted.claims)
    foreseen = allocate(node, wanted.classes, planned, wanted.claims)
    assert isinstance(found, Allocation)
    assert isinstance(foreseen, Allocation)
    assert found.results == foreseen.results
    given_gpus = [
        result.device for result in found.results[0].devices.results if result.driver == "gpu.nvidia.com"
    ]
    assert given_gpus == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]


def _slice(driver, devices):
    spec = ResourceSliceSpec(
        driver=driver,
        node_name="n",
        pool=ResourcePool(name="n", generation=1, resource_slice_count=1),
        devices=devices,
    )
    return ResourceSlice(metadata=ObjectMeta(name=driver), spec=spec)
