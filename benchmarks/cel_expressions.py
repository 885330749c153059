"""Twenty selectors that users of DRA write, and the devices that they are asked about.

`upstream.py cel` has Rackloom and cel-go evaluate each. They cover what selectors are made of: comparisons,
membership, missing domains, presence tests, texts, patterns, versions, quantities and comprehensions.
"""

from typing import Any

DRIVER = "gpu.example.com"
_GPU = f'device.attributes["{DRIVER}"]'
_CAPACITY = f'device.capacity["{DRIVER}"]'
MODELS = ("h100", "h200", "b200", "gb200")

EXPRESSIONS = (
    f'device.driver == "{DRIVER}"',
    f'{_GPU}.model == "h200"',
    f"{_GPU}.healthy && {_GPU}.numaNode == 0",
    f"{_GPU}.serial > 50 && {_GPU}.serial <= 90",
    f'{_GPU}.model in ["h100", "b200"]',
    f'{_GPU}.serial > 20 && {_GPU}.model in ["h200", "gb200"]',
    f'!({_GPU}.model == "h100") || {_GPU}.numaNode == 1',
    f'{_GPU}.numaNode == 0 ? {_GPU}.model == "h100" : {_GPU}.model == "b200"',
    f'"model" in {_GPU} && {_GPU}.model != "b200"',
    f'has(device.attributes["{DRIVER}"].model)',
    'device.attributes["other.example.com"].?speed.orValue(7) == 7',
    f'{_GPU}.uuid.startsWith("GPU-1")',
    f'{_GPU}.uuid.matches("^GPU-[0-9]*5$")',
    f'{_GPU}.model.lowerAscii().contains("b2")',
    f"{_GPU}.driverVersion.major() >= 580",
    f'{_GPU}.driverVersion.isGreaterThan(semver("570.20.0"))',
    f'{_CAPACITY}.memory.compareTo(quantity("100Gi")) >= 0',
    f'{_CAPACITY}.memory.isGreaterThan(quantity("141Gi")) && {_GPU}.healthy',
    f'["h200", "gb200", "b200"].exists(m, m == {_GPU}.model)',
    f"cel.bind(gpu, {_GPU}, gpu.serial % 2 == 0 && gpu.numaNode == 0)",
)


def devices(count: int) -> list[dict[str, Any]]:
    """Devices that differ, as a ResourceSlice has them."""
    return [
        {
            "name": f"d{at}",
            "attributes": {
                "uuid": {"string": f"GPU-{at}"},
                "model": {"string": MODELS[at % len(MODELS)]},
                "serial": {"int": at},
                "numaNode": {"int": at // 4 % 2},
                "healthy": {"bool": at % 5 != 0},
                "driverVersion": {"version": f"{565 + at % 20}.10.{at}"},
            },
            "capacity": {"memory": {"value": ("80Gi", "141Gi", "180Gi")[at % 3]}},
        }
        for at in range(count)
    ]
