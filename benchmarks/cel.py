"""Twenty selectors as users write them: evaluations on one core, and what compiling each costs.

    python benchmarks/cel.py [--seconds 0.5] [--quick]

One JSON object a row, in nanoseconds of CPU time: `with_view_ns` makes the view of the device for each
evaluation, as upstream does, `without_view_ns` finds it made, and `compile_ns` parses, checks and prepares
the selector. `upstream.py cel` has cel-go do the same. The selectors cover what users compose: comparisons,
membership, missing domains, presence, texts, patterns, versions, quantities and comprehensions.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rackloom.core.allocate.cel import compiler
from rackloom.core.allocate.cel.environment import DeviceView
from rackloom.core.allocate.objects import Device

DRIVER = "gpu.example.com"
DEVICES = 100
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


def nanoseconds(least: float, items: Sequence[Any], call: Callable[[Any], object]) -> float:
    """The CPU time of one call, over whole rounds that take `least` seconds together."""
    rounds, began, spent = 0, time.process_time_ns(), 0
    while not rounds or spent < least * 1e9:
        for item in items:
            call(item)
        rounds, spent = rounds + 1, time.process_time_ns() - began
    return spent / rounds / len(items)


def row(expression: str, items: Sequence[Device], seconds: float) -> dict[str, Any]:
    """The figures of one expression."""

    def view_of(device: Device) -> DeviceView:
        """As the allocator makes it of an object."""
        attributes = {name: msgspec.to_builtins(value) for name, value in device.attributes.items()}
        return DeviceView.of(
            DRIVER, attributes, {name: str(amount.value) for name, amount in device.capacity.items()}
        )

    matches = compiler.compile_selector(expression).matches
    views = [view_of(device) for device in items]
    # What was compiled before is remembered, and this is not what is measured.
    compiled_anew = compiler.compile_selector.__wrapped__
    return {
        "expression": expression,
        "devices": len(items),
        "matches": sum(map(matches, views)),
        "with_view_ns": round(nanoseconds(seconds, items, lambda device: matches(view_of(device)))),
        "without_view_ns": round(nanoseconds(seconds, views, matches)),
        "compile_ns": round(nanoseconds(seconds, [expression], compiled_anew)),
    }


def main() -> None:
    """Print a row for each expression."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="of CPU time for each figure")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works")
    asked = parser.parse_args()
    items = msgspec.convert(devices(DEVICES), list[Device])
    for expression in EXPRESSIONS:
        print(json.dumps(row(expression, items, 0 if asked.quick else asked.seconds)), flush=True)


if __name__ == "__main__":
    main()
