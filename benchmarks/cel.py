"""Twenty selectors as users write them: evaluations on one core, and what compiling each costs.

    .venv/bin/python benchmarks/cel.py [--seconds 0.5] [--input]

One JSON object a row, in nanoseconds of processor time. `with_view_ns` makes the view of the device for each
evaluation, as upstream does. `without_view_ns` finds it made. `compile_ns` parses, checks and prepares the
selector, with nothing remembered from others of its form. `matches` of `devices` satisfy it. `--input` prints
the devices and expressions instead, so that cel-go can be measured on the same.

The devices are those of the drivers that most clusters run: a GPU with what NVIDIA's driver publishes, with a
network interface and a rack beside. The expressions are those of the drivers' examples and of the Kubernetes
documentation, with the names of that device.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rackloom.core.allocate.cel import compiler, generate
from rackloom.core.allocate.cel.environment import DeviceView
from rackloom.core.allocate.objects import Device

DRIVER = "gpu.nvidia.com"
DEVICES = 64
GPU = f"device.attributes['{DRIVER}']"
ROOT = "device.attributes['resource.kubernetes.io']"
EXPRESSIONS = (
    f"device.driver == '{DRIVER}'",
    f"device.driver == '{DRIVER}' && {GPU}.type == 'gpu'",
    f"{GPU}.productName == 'NVIDIA H200'",
    f"{GPU}.productName.lowerAscii().matches('^.*h200.*$')",
    f"{GPU}.architecture in ['Hopper', 'Blackwell']",
    f"{GPU}.uuid == 'GPU-00000007-0000'",
    f"{GPU}.index < 4",
    f"{ROOT}.pcieRoot == 'pci0000:03'",
    f"has({GPU}.numaNode) && {GPU}.numaNode == 0",
    f"{GPU}.?numaNode.orValue(0) == 1",
    f"'{DRIVER}' in device.attributes && !('rdma' in {GPU})",
    f"{GPU}.driverVersion.compareTo(semver('570.0.0')) >= 0",
    f"{GPU}.cudaComputeCapability.isGreaterThan(semver('9.0.0')) || {GPU}.driverVersion.major() > 575",
    f"device.capacity['{DRIVER}'].memory.compareTo(quantity('100Gi')) >= 0",
    f"{GPU}.uuid.startsWith('GPU-') && {GPU}.pciBusID.endsWith('0')",
    f"['H100', 'H200', 'B200'].exists(name, {GPU}.productName.contains(name))",
    f"['brand', 'architecture', 'uuid'].all(name, name in {GPU})",
    f"cel.bind(gpu, {GPU}, gpu.architecture == 'Hopper' ? gpu.index % 2 == 0 : gpu.index > 2)",
    f"['Hopper', 'Blackwell'].exists_one(name, {GPU}.architecture == name)",
    f"{GPU}.exists(name, name == 'brand') && [1, 2, 3].filter(n, n > {GPU}.index).size() == 0",
)


def devices(count: int) -> list[dict[str, Any]]:
    """Devices as a ResourceSlice has them."""
    return [_device(at) for at in range(count)]


def _device(at: int) -> dict[str, Any]:
    hopper = at % 4 < 3
    return {
        "name": f"gpu-{at}",
        "attributes": {
            "type": {"string": "gpu"},
            "uuid": {"string": f"GPU-{at:08}-0000"},
            "index": {"int": at % 8},
            "minor": {"int": at % 8},
            "productName": {"string": ("NVIDIA H100", "NVIDIA H200", "NVIDIA H200", "NVIDIA B200")[at % 4]},
            "brand": {"string": "Nvidia"},
            "architecture": {"string": "Hopper" if hopper else "Blackwell"},
            "cudaComputeCapability": {"version": "9.0.0" if hopper else "10.0.0"},
            "driverVersion": {"version": f"{565 + at % 20}.86.10"},
            "cudaDriverVersion": {"version": "12.8.0"},
            "pciBusID": {"string": f"0000:{at:02x}:00.0"},
            "numaNode": {"int": at % 8 // 4},
            "resource.kubernetes.io/pcieRoot": {"string": f"pci0000:{at % 8:02x}"},
        },
        "capacity": {"memory": {"value": "80Gi" if at % 4 == 0 else "141Gi" if hopper else "192Gi"}},
    }


def nanoseconds(least: float, items: Sequence[Any], call: Callable[[Any], object]) -> float:
    """Processor time of one call, over whole rounds that take `least` seconds together."""
    rounds, began = 0, time.process_time_ns()
    while (spent := time.process_time_ns() - began) < least * 1e9 or not rounds:
        for item in items:
            call(item)
        rounds += 1
    return spent / rounds / len(items)


def row(expression: str, items: Sequence[Device], seconds: float) -> dict[str, Any]:
    """The figures of one expression."""
    program = compiler.compile_selector(expression)
    views = [DeviceView.of_device(DRIVER, device) for device in items]
    matches = program.matches
    return {
        "expression": expression,
        "devices": len(items),
        "matches": sum(map(matches, views)),
        "with_view_ns": round(
            nanoseconds(seconds, items, lambda device: matches(DeviceView.of_device(DRIVER, device)))
        ),
        "without_view_ns": round(nanoseconds(seconds, views, matches)),
        "compile_ns": round(nanoseconds(seconds, [expression], compiled_anew)),
    }


def compiled_anew(expression: str) -> compiler.Program:
    """The selector as it is compiled where none of its form was compiled before."""
    generate.code_of.cache_clear()
    return compiler.compile_selector.__wrapped__(expression)


def main() -> None:
    """Print a row for each expression."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="processor time for each figure")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    parser.add_argument("--input", action="store_true", help="print the devices and expressions")
    args = parser.parse_args()
    made = devices(DEVICES)
    if args.input:
        print(json.dumps({"driver": DRIVER, "devices": made, "expressions": EXPRESSIONS}))
        return
    items = msgspec.convert(made, list[Device])
    for expression in EXPRESSIONS:
        print(json.dumps(row(expression, items, 0 if args.quick else args.seconds)), flush=True)


if __name__ == "__main__":
    main()
