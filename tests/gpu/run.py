"""Runs every check of `tests/gpu/checks.py` on this machine: a line for each, a report as JSON, an exit code.

python tests/gpu/run.py --report build/gpu-report.json

Exit code 0: no check failed. Without a GPU all are skipped, which shows nothing, and the last line reports
it. The docstring of each check states the two sides that it compares. No check changes a setting of a
GPU: if there is no MIG device, or MPS would need another compute mode, the check is skipped.
`--driver-root DIR` names a driver that the loader does not find, and `--only CHECK ...` runs some.

A machine without a package index gets the wheels carried (`make test-gpu WHEELS=build/wheels`). On one with
an index, with the same Python and processor:

    PIP="python3 -m pip download --require-hashes -d build/wheels"
    $PIP --only-binary :all: -r requirements/runtime.txt
    $PIP --only-binary :all: --no-deps -r requirements/nixl.txt

For another Python name it (`--python-version 3.12 --platform manylinux_2_28_x86_64`). Without the second
line the transfer is skipped.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

from tests.gpu.checks import CHECKS, Differs, Figures, Machine, Skipped

say = partial(print, flush=True)
FORMAT = "rackloom-gpu-report/1"
Record = dict[str, Any]


def outcome_of(check: Callable[[Machine], Figures], machine: Machine) -> Record:
    """One check's record: its outcome, the reason, and its figures."""
    began = time.monotonic()
    record: Record = {"check": check.__name__, "compares": (check.__doc__ or "").strip(), "outcome": "passed"}
    try:
        lacking = machine.lacks_gpu
        if lacking is not None:
            raise Skipped(lacking)
        record["figures"] = check(machine)
    except Skipped as skipped:
        record |= {"outcome": "skipped", "reason": str(skipped)}
    except ModuleNotFoundError as lacking:
        record |= {
            "outcome": "skipped",
            "reason": f"Python has no {lacking.name} here (requirements/runtime.txt)",
        }
    except Differs as difference:
        record |= {"outcome": "failed", "reason": str(difference)}
    except Exception as error:
        # A check that stops early has shown nothing. Its record names the place.
        record |= {
            "outcome": "failed",
            "reason": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }
    record["seconds"] = round(time.monotonic() - began, 3)
    return record


def report_of(
    machine: Machine, checks: Sequence[Callable[[Machine], Figures]], report: Callable[[str], None]
) -> Record:
    """All records. Each is reported as soon as it is complete."""
    records = []
    if machine.lacks_gpu is None:
        try:
            _ = machine.settings  # as they are before the first check
        except (Differs, Skipped, OSError) as trouble:
            report(f"the GPUs' settings cannot be read: {trouble}")
    for check in checks:
        record = outcome_of(check, machine)
        records.append(record)
        report(f"{record['outcome'].upper():8} {record['check']} ({record['seconds']} s){_reason(record)}")
    return {
        "format": FORMAT,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernel": platform.release(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "outcomes": dict(Counter(record["outcome"] for record in records)),
        "checks": records,
    }


def _reason(record: Record) -> str:
    return f": {record['reason']}" if "reason" in record else ""


def verdict(report: Record) -> tuple[int, str]:
    """The exit code, and the last line."""
    outcomes = Counter(report["outcomes"])
    if outcomes["failed"]:
        return 1, f"{outcomes['failed']} of {outcomes.total()} checks FAILED"
    if not outcomes["passed"]:
        return 0, f"NOTHING WAS SHOWN: all {outcomes.total()} checks were skipped"
    return 0, f"{outcomes['passed']} of {outcomes.total()} checks passed, {outcomes['skipped']} skipped"


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--report", type=Path, default=Path("build/gpu-report.json"), help="where the report goes"
    )
    parser.add_argument(
        "--driver-root", type=Path, help="where the driver is installed, if not where it is found"
    )
    parser.add_argument(
        "--only", nargs="*", metavar="CHECK", help=", ".join(check.__name__ for check in CHECKS)
    )
    options = parser.parse_args(words)
    unknown = set(options.only or ()) - {check.__name__ for check in CHECKS}
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}")
    checks = [check for check in CHECKS if not options.only or check.__name__ in options.only]
    report = report_of(Machine(driver_root=options.driver_root), checks, say)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=1) + "\n")
    code, line = verdict(report)
    say(f"{line}; report: {options.report}")
    return code


if __name__ == "__main__":
    sys.exit(main())
