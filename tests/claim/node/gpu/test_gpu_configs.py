"""Absurd configurations for the devices of a claim."""

import asyncio
import random

from tests.fuzz import tries

from rackloom.claim.node.gpu.inventory import MigDevice, NodeGpu
from rackloom.claim.node.gpu.monitor import GpuCondition, PublishedGpu
from rackloom.claim.node.gpu.sharing import claimed_gpus, plan_sharing
from rackloom.core.cluster.claims import AllocatedClaim, AllocatedDevice, ClaimRef, OpaqueConfig
from rackloom.errors import Refused

GPU = NodeGpu(minor=0, uuid="GPU-1", pci_address="0000:01:00.0", product="", memory_bytes=0)
MIG = MigDevice(
    uuid="MIG-1",
    profile="1g",
    gpu_instance=0,
    compute_instance=0,
    profile_id=0,
    placement_start=0,
    placement_size=1,
    memory_bytes=0,
)
WHOLE = GpuCondition(gpu=GPU)
NAMES = {"gpu-0": PublishedGpu(condition=WHOLE), "mig-0": PublishedGpu(condition=WHOLE, mig=MIG)}
WORDS = [
    "apiVersion",
    "kind",
    "sharing",
    "strategy",
    "timeSlicingConfig",
    "interval",
    "mpsConfig",
    "defaultActiveThreadPercentage",
    "defaultPinnedDeviceMemoryLimit",
    "defaultPerDevicePinnedMemoryLimit",
    "multiUser",
    "iommu",
    "backendPolicy",
]
VALUES = (
    *(
        "resource.nvidia.com/v1beta1",
        "GpuConfig",
        "MigDeviceConfig",
        "VfioDeviceConfig",
        "TimeSlicing",
        "MPS",
    ),
    *("Long", "1G", "1", "-1", "1e400", "0x", "GPU-1", "", "9" * 400, "\0", "LegacyOnly"),
    *(None, True, -1, 0, 50, 101, 2**70, 1.5, float("inf"), [], {}, [[]]),
)
PLAIN = {"apiVersion": "resource.nvidia.com/v1beta1"}


def anything(rng, depth=0):
    if depth > 3 or rng.random() < 0.4:
        return rng.choice(VALUES)
    if rng.random() < 0.2:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(WORDS): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def written(rng):
    """Mostly close to a good one: complete nonsense is refused at its first word."""
    kind = rng.choice(("GpuConfig", "MigDeviceConfig", "VfioDeviceConfig"))
    strategy = rng.choice(("TimeSlicing", "MPS"))
    mps = {rng.choice(WORDS): anything(rng) for _ in range(rng.randrange(3))}
    sharing = {"strategy": strategy, rng.choice(("mpsConfig", "timeSlicingConfig")): mps}
    whole = {**PLAIN, "kind": kind, "sharing": sharing}
    return whole if rng.random() < 0.7 else {**whole, rng.choice(WORDS): anything(rng)}


def test_ten_thousand_configs_are_understood_or_refused():
    rng = random.Random(6)
    refused = 0
    for _ in range(many := tries(10_000)):
        configs = tuple(
            OpaqueConfig(source="FromClaim", requests=rng.choice(((), ("r",))), parameters=written(rng))
            for _ in range(rng.randrange(1, 3))
        )
        result = AllocatedDevice(driver="d", request="r", pool="n", device=rng.choice(("gpu-0", "mig-0")))
        ref = ClaimRef(namespace="d", name="c", uid="u")
        claim = AllocatedClaim(ref=ref, results=(result,), configs=configs, fingerprint="f")
        try:
            sharing = plan_sharing("u", claimed_gpus(claim, NAMES.get))
        except Refused:
            refused += 1
        else:
            assert set(sharing.time_slices.values()) <= {0, 1, 2, 3}
            assert all(daemon.threads_percent in {None, *range(101)} for daemon in sharing.daemons)
    assert many // 10 < refused < many - 1


def test_a_gpu_that_went_away_is_waited_for(gpus):
    """An unreadable file is reported with its reason. No word about GPUs that are not known to be gone."""

    async def story():
        view = gpus.view()
        await view.observe()
        gpus.inventory_file.write_text("{")
        await view.observe()
        (first, *_) = view.health("n")
        assert first.health.value == "Unknown"
        assert "cannot use inventory" in first.message
        assert len((await view.pool("n")).devices) == 8

    asyncio.run(story())
