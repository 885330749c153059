"""One small domain, described in a line per test."""

from typing import Any

import msgspec
import pytest

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    DefaultPartitionPolicy,
    DomainIntent,
    DomainLimits,
    DomainObservation,
    GpuAssignment,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    OwnedPartition,
    PartitionHealth,
)

DOMAIN = "00000000-0000-4000-8000-00000000d001"


class Case:
    """GPUs 1 to `gpus`, all healthy, managed and in no partition. The methods change them."""

    def __init__(self, gpus: int = 8) -> None:
        self.observation = DomainObservation(
            domain=DOMAIN,
            gpus=tuple(_gpu(guid) for guid in range(1, gpus + 1)),
            partitions=(),
            limits=DomainLimits(),
            observed_at=0.0,
        )
        self.intent = DomainIntent(
            domain=DOMAIN,
            assignments=(),
            owned=(),
            managed=frozenset(range(1, gpus + 1)),
            default_partition=DefaultPartitionPolicy.NONE,
            revision=1,
        )

    def stands(self, number: int, name: str, *guids: int, guid_based: bool = True) -> "Case":
        """A partition is on the switch."""
        made = ObservedPartition(
            id=number,
            name=name,
            members=frozenset(guids),
            health=PartitionHealth.HEALTHY,
            guid_based=guid_based,
            multicast_groups=0,
        )
        return self.observe(partitions=(*self.observation.partitions, made))

    def default(self, *guids: int) -> "Case":
        """The factory default partition is on the switch."""
        return self.stands(DEFAULT_PARTITION_ID, "Default Partition", *guids)

    def owns(self, name: str, logical_partition: str) -> "Case":
        """The name is recorded as ours."""
        mine = OwnedPartition(name=name, logical_partition=logical_partition, partition_id=None)
        return self.want(owned=(*self.intent.owned, mine))

    def assign(self, logical_partition: str, *guids: int, tenant: str | None = None) -> "Case":
        """A tenant (by default one named after the partition) wants GPUs in a logical partition."""
        owner = tenant or f"of-{logical_partition}"
        new = (GpuAssignment(guid=guid, logical_partition=logical_partition, tenant=owner) for guid in guids)
        return self.want(assignments=(*self.intent.assignments, *new))

    def keep(self) -> "Case":
        """The default partition is to stay."""
        return self.want(default_partition=DefaultPartitionPolicy.KEEP)

    def trays(self) -> "Case":
        """Free GPUs are to be with their tray."""
        return self.want(default_partition=DefaultPartitionPolicy.TRAY)

    def ill(self, guid: int, health: GpuHealth = GpuHealth.NO_NVLINK) -> "Case":
        """A GPU is not healthy."""
        changed = tuple(
            msgspec.structs.replace(gpu, health=health) if gpu.guid == guid else gpu
            for gpu in self.observation.gpus
        )
        return self.observe(gpus=changed)

    def absent(self, *guids: int) -> "Case":
        """GPUs are not listed."""
        return self.observe(gpus=tuple(gpu for gpu in self.observation.gpus if gpu.guid not in guids))

    def present(self, guid: int) -> "Case":
        """A healthy GPU is listed again."""
        return self.observe(gpus=(*self.observation.gpus, _gpu(guid)))

    def unmanaged(self, *guids: int) -> "Case":
        """GPUs are on no machine of the site."""
        return self.want(managed=self.intent.managed - set(guids))

    def limit(self, partitions: int) -> "Case":
        """The domain holds no more partitions than this."""
        return self.observe(limits=DomainLimits(max_partitions=partitions))

    def observe(self, **changes: Any) -> "Case":
        self.observation = msgspec.structs.replace(self.observation, **changes)
        return self

    def want(self, **changes: Any) -> "Case":
        self.intent = msgspec.structs.replace(self.intent, **changes)
        return self


def _gpu(guid: int) -> ObservedGpu:
    seat, module = divmod(guid - 1, 4)
    return ObservedGpu(
        guid=guid,
        chassis_serial="C1",
        slot=seat,
        tray_index=seat,
        module_id=module + 1,
        health=GpuHealth.HEALTHY,
    )


@pytest.fixture
def case() -> Case:
    return Case()
