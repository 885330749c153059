"""A tray or a GPU that the controllers do not list is of unknown health, and a missing tray is not Ready."""

from typing import Any

import pytest
from tests.carve.conftest import DOMAINS

from rackloom.carve.api.auth import Role
from rackloom.core.partitions.domain import GpuHealth

ADMIN = {"role": Role.PROVIDER_ADMIN}
TRAY = "chassis0-1"


def unlist(api: Any, *devices: int) -> None:
    """The controllers list these GPUs of the tray no longer."""
    api.site.observe_all()
    api.site.unlisted = {api.site.guid(DOMAINS[0], 1, device) for device in devices}
    api.site.observe_all()


def health_numbers(api: Any) -> tuple[int, int]:
    (site,) = api.get("site?includeMachineStats=true", **ADMIN).json()
    numbers = site["machineStats"]["totalByHealth"]
    return numbers["healthy"], numbers["unhealthy"]


def gpu_healths(api: Any) -> list[str]:
    shown = api.get(f"machine/{TRAY}?includeMetadata=true", **ADMIN).json()["metadata"]["nvLinkInfo"]
    assert api.get(f"machine/{TRAY}/nvlink-info", **ADMIN).json() == shown
    return [gpu["health"] for gpu in shown["gpus"]]


def phases(api: Any) -> tuple[str, dict[str, str]]:
    path = f"domain/nvlink/{DOMAINS[0]}?siteId={api.site.site_id}&includeComponents=true"
    shown = api.get(path, **ADMIN).json()
    return shown["operationStatus"], {
        tray["componentId"]: tray["operationStatus"] for tray in shown["components"]
    }


def test_a_missing_tray_is_neither_healthy_nor_ready(api: Any) -> None:
    unlist(api, 0, 1, 2, 3)
    assert health_numbers(api) == (5, 0)
    assert gpu_healths(api) == ["unknown"] * 4
    shown = api.get(f"machine/{TRAY}", **ADMIN).json()
    assert (shown["status"], shown["isMissingOnSite"], shown["isUsableByTenant"]) == ("Unknown", True, False)
    assert [found["id"] for found in api.get("machine?status=Unknown", **ADMIN).json()] == [TRAY]
    counted = api.get("infrastructure-provider/current/stats", **ADMIN).json()["machine"]
    assert (counted["total"], counted["ready"], counted["unknown"]) == (6, 5, 1)
    (site,) = api.get("site?includeMachineStats=true", **ADMIN).json()
    assert site["machineStats"]["totalByStatus"] == {"Ready": 5, "Unknown": 1}
    assert phases(api) == ("Unknown", {"chassis0-0": "Ready", TRAY: "Unknown", "chassis0-2": "Ready"})
    api.site.unlisted = set()
    api.site.observe_all()
    assert health_numbers(api) == (6, 0)
    assert phases(api)[0] == "Ready"


def test_a_missing_tray_cannot_be_promised(api: Any) -> None:
    for allocation in api.get("allocation", **ADMIN).json():
        (constraint,) = allocation["allocationConstraints"]
        path = f"allocation/{allocation['id']}/constraint/{constraint['id']}"
        assert api.patch(path, {"constraintValue": 1}, **ADMIN).status_code == 200
    unlist(api, 0, 1, 2, 3)
    (numbers,) = api.get("machine/instance-type/stats", **ADMIN).json()
    assert (numbers["allocated"], numbers["maxAllocatable"]) == (1, 4)


@pytest.mark.parametrize(("sick", "counted"), [(GpuHealth.HEALTHY, (5, 0)), (GpuHealth.DEGRADED, (5, 1))])
def test_a_tray_with_an_unlisted_gpu_is_not_healthy(api: Any, sick: GpuHealth, counted: Any) -> None:
    api.site.health[api.site.guid(DOMAINS[0], 1, 0)] = sick
    unlist(api, 3)
    assert health_numbers(api) == counted
    assert gpu_healths(api) == [sick.name.lower(), "healthy", "healthy", "unknown"]


def test_the_trays_of_an_unknown_domain_are_unknown(api: Any) -> None:
    api.site.observe_all()
    api.site.lose(DOMAINS[0])
    assert phases(api) == ("Unknown", {"chassis0-0": "Unknown", TRAY: "Unknown", "chassis0-2": "Unknown"})
    assert health_numbers(api) == (3, 0)


def test_an_instance_on_a_missing_tray_keeps_it_in_use(api: Any) -> None:
    api.site.observe_all()
    vpc = api.vpc()
    used = {api.instance(vpc, f"vm {number}")["machineId"] for number in range(6)}
    unlist(api, 0, 1, 2, 3)
    assert TRAY in used
    assert api.get(f"machine/{TRAY}", **ADMIN).json()["status"] == "InUse"
    assert phases(api) == ("InUse", {"chassis0-0": "InUse", TRAY: "Unknown", "chassis0-2": "InUse"})
