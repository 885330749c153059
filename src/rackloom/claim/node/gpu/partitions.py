"""GPUs of which MIG devices are made on demand, as partitionable devices (KEP-4815). Pure.

A GPU that can be partitioned is published once as a whole, and once for each MIG device that could be made:
each profile at each of its places. All of them draw from the counters of the GPU: one for each kind of
engine, one for memory, and one of value 1 for each memory slice. The whole GPU draws everything. So the
scheduler never allocates the whole beside a part, nor two parts that overlap. The published devices stay the
same while MIG devices come and go.

A MIG device is made when a claim is prepared and destroyed when the claim is unprepared.
`inventory.blocking_claim` finds a claim that is not unprepared yet and has a part that another needs: kubelet
may prepare the next pod before it has ended the previous one.

A GPU with a MIG device that no claim on this node made is not partitioned: an operator's layout is published
as it exists (`inventory.mig_device`) and never changed. A GPU in MIG mode that would need a reset to leave it
(Ampere) is not published as a whole.

Names, capacities and counters are those of NVIDIA's DRA driver for GPUs 0.5 (DynamicMIG). The capacity of the
whole GPU is the largest of each kind among the profiles, as there.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rackloom.claim.node.gpu.inventory import (
    GpuInventory,
    GpuLocation,
    MigPartition,
    NodeGpu,
    gpu_device,
    mig_attributes,
    mig_device_name,
    quantities,
)
from rackloom.core.allocate.objects import Counter, CounterConsumption, CounterSet, Device

# The published devices.


def partition_name(gpu: NodeGpu, partition: MigPartition) -> str:
    """Name of a MIG device that could be made, which is also its name when it exists."""
    return mig_device_name(gpu.minor, partition.profile, partition.profile_id, partition.placement_start)


def partitionable_devices(gpu: NodeGpu, inventory: GpuInventory, location: GpuLocation) -> tuple[Device, ...]:
    """The whole GPU and the MIG devices that may be made of it, by name as in NVIDIA's driver.

    The scheduler takes the first that fits.
    """
    total = _total(gpu.partitions)
    whole = msgspec.structs.replace(
        gpu_device(gpu, inventory, location),
        capacity=quantities(**total),
        consumes_counters=_draws(gpu, total, _slices(gpu.partitions)),
    )
    parts = [_part(gpu, partition, inventory, location) for partition in gpu.partitions]
    shown = [whole, *parts] if gpu.is_published_whole else parts
    return tuple(sorted(shown, key=lambda device: device.name))


def counter_set(gpu: NodeGpu) -> CounterSet:
    """The totals of the GPU's counters."""
    counters = _counters(_total(gpu.partitions), _slices(gpu.partitions))
    return CounterSet(name=_counter_set_name(gpu), counters=counters)


def _part(gpu: NodeGpu, partition: MigPartition, inventory: GpuInventory, location: GpuLocation) -> Device:
    amounts = _amounts(partition)
    first, size = partition.placement_start, partition.placement_size
    return Device(
        name=partition_name(gpu, partition),
        attributes=mig_attributes(gpu, partition.profile, inventory, location),
        capacity=quantities(**amounts),
        consumes_counters=_draws(gpu, amounts, range(first, first + size)),
    )


def _amounts(partition: MigPartition) -> dict[str, int]:
    """By the name of the capacity. Memory is in bytes."""
    return {
        "memory": partition.memory_bytes,
        "multiprocessors": partition.multiprocessors,
        "copyEngines": partition.copy_engines,
        "decoders": partition.decoders,
        "encoders": partition.encoders,
        "jpegEngines": partition.jpeg_engines,
        "ofaEngines": partition.ofa_engines,
    }


def _total(partitions: Sequence[MigPartition]) -> dict[str, int]:
    """The largest profile has all of a GPU that MIG devices can have."""
    amounts = [_amounts(partition) for partition in partitions]
    return {name: max(amount[name] for amount in amounts) for name in amounts[0]}


def _slices(partitions: Sequence[MigPartition]) -> range:
    return range(max(partition.placement_start + partition.placement_size for partition in partitions))


def _draws(gpu: NodeGpu, amounts: Mapping[str, int], slices: Iterable[int]) -> tuple[CounterConsumption, ...]:
    counters = _counters(amounts, slices)
    return (CounterConsumption(counter_set=_counter_set_name(gpu), counters=counters),)


def _counters(amounts: Mapping[str, int], slices: Iterable[int]) -> dict[str, Counter]:
    """Names of counters are DNS labels: `copy-engines`."""
    engines = {re.sub("([A-Z])", r"-\1", name).lower(): amount for name, amount in amounts.items()}
    numbered = {f"memory-slice-{index}": 1 for index in slices}
    return {name: Counter(value=str(amount)) for name, amount in {**engines, **numbered}.items()}


def _counter_set_name(gpu: NodeGpu) -> str:
    return f"gpu-{gpu.minor}-counter-set"
