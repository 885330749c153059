"""A partition member without NVLink shares no memory, so no answer may report that it does."""

from typing import Any

import pytest

from rackloom.core.partitions.domain import GpuHealth
from rackloom.core.partitions.planner import NO_NVLINK


def falls(site: Any, demo: Any, instance: str, health: GpuHealth, device: int = 0) -> None:
    domain, slot = demo.where(instance)
    site.health[site.guid(domain, slot, device)] = health
    site.observe(domain)


@pytest.fixture
def joined(small_site: Any, demo: Any) -> str:
    """An instance with its first GPU in its partition."""
    instance_id: str = demo.instance([(demo.partition(), 0)])
    small_site.converge()
    assert demo.status(instance_id) == "Ready"
    return instance_id


def test_a_member_that_loses_nvlink_is_not_ready_until_it_has_it_again(
    small_site: Any, demo: Any, joined: str
) -> None:
    falls(small_site, demo, joined, GpuHealth.NO_NVLINK)
    ((status, reason),) = demo.interfaces(joined).values()
    assert status == "Pending"
    # In the words of one that could not even join.
    assert reason.startswith(f"{NO_NVLINK.reason}: the GPU is in partition ")
    assert demo.status(joined) == "Configuring"
    falls(small_site, demo, joined, GpuHealth.HEALTHY)
    assert demo.interfaces(joined) == {0: ("Ready", None)}
    assert demo.status(joined) == "Ready"


@pytest.mark.parametrize("health", [GpuHealth.UNKNOWN, GpuHealth.DEGRADED, GpuHealth.DEGRADED_BANDWIDTH])
def test_a_member_that_is_slow_shares_memory(
    small_site: Any, demo: Any, joined: str, health: GpuHealth
) -> None:
    falls(small_site, demo, joined, health)
    assert demo.status(joined) == "Ready"


def test_a_gpu_that_joins_nothing_needs_no_nvlink(small_site: Any, demo: Any, joined: str) -> None:
    falls(small_site, demo, joined, GpuHealth.NO_NVLINK, device=1)
    assert demo.status(joined) == "Ready"


def test_a_gpu_without_nvlink_can_leave(small_site: Any, demo: Any, joined: str) -> None:
    falls(small_site, demo, joined, GpuHealth.NO_NVLINK)
    demo.release(joined)
    small_site.converge()
    assert demo.status(joined) is None
