"""Run a CEL conformance file through the public call.

    python tests/conformance/run_cel.py FILE [FILE ...]

It understands two formats, the table of cases and the probe file. data/cel/README.md explains both. The last
line is `N passed, M failed`. The exit status is 1 if anything failed.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rackloom.core.allocate.cel import compiler, environment, errors

Outcome = dict[str, Any]


def view_of(device: dict[str, Any]) -> environment.DeviceView:
    """The device of a case, in API JSON."""
    capacity = {name: of["value"] for name, of in (device.get("capacity") or {}).items()}
    return environment.DeviceView.of(
        device.get("driver", ""),
        device.get("attributes") or {},
        capacity,
        bool(device.get("allowMultipleAllocations")),
    )


def outcome(expression: str, device: dict[str, Any], **options: Any) -> Outcome:
    """The result of compiling and matching: exactly one of match, compileError and matchError is set."""
    found: Outcome = dict.fromkeys(
        ("match", "compileError", "matchError", "maxCost", "actualCost", "outputType")
    )
    try:
        program = compiler.compile_selector(expression, **options)
    except errors.CompileError as error:
        return found | {"compileError": str(error)}
    found |= {"maxCost": program.max_cost, "outputType": program.output}
    result = program.evaluate(view_of(device))
    found["actualCost"] = result.cost
    if result.error is not None:
        return found | {"matchError": str(result.error)}
    if program.matches(view_of(device)) is not result.value:
        return found | {"matchError": "matches and evaluate disagree"}
    return found | {"match": result.value}


def kind(of: Outcome) -> Any:
    """The part that always counts: the truth value, or which kind of error it was."""
    if of["compileError"] is not None:
        return "compile error"
    return "match error" if of["matchError"] is not None else of["match"]


def check_run(case: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Differences of one run of a table case, costs and output type included."""
    features = run["features"]
    found = outcome(
        case["expression"],
        case["device"],
        environment=case["environment"],
        consumable_capacity=features["consumableCapacity"],
        list_type_attributes=features["listTypeAttributes"],
    )
    wanted = run["upstream"]
    differences = compare(wanted, found, ("maxCost", "actualCost", "outputType"))
    for text, error in (("compileErrorContains", "compileError"), ("matchErrorContains", "matchError")):
        part = case["expect"].get(text)
        if part and part.lower() not in (found[error] or "").lower():
            differences.append(f"{error}: {part!r} is not in {found[error]!r}")
    return differences


def compare(wanted: Outcome, found: Outcome, also: tuple[str, ...] = ()) -> list[str]:
    """The differences in kind, and in the fields named by `also`."""
    differences = []
    if kind(wanted) != kind(found):
        shown = found["compileError"] or found["matchError"] or ""
        differences.append(f"wanted {kind(wanted)}, found {kind(found)} {shown}")
    differences += [
        f"{name}: wanted {wanted[name]}, found {found[name]}"
        for name in also
        if wanted.get(name) is not None and wanted[name] != found[name]
    ]
    return differences


def checks(data: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Name and differences of everything in a file."""
    for case in data.get("cases", ()):
        for run in case["runs"]:
            yield f"{case['name']} {run['features']}", check_run(case, run)
    for probe in data.get("probes", ()):
        device = probe.get("device") or data["device"]
        yield probe["expression"], compare(probe, outcome(probe["expression"], device))


def main(paths: list[str]) -> int:
    passed = failed = 0
    for path in paths:
        for name, differences in checks(json.loads(Path(path).read_text())):
            passed, failed = passed + (not differences), failed + bool(differences)
            for difference in differences:
                sys.stdout.write(f"{name}: {difference}\n")
    sys.stdout.write(f"{passed} passed, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
