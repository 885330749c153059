"""Checks that take longer than a change may wait for: `make long NAME=hunt`.

A check is a list of units. Each unit is one command. Its result is added to `tests/long/NAME.json`, and its
output is kept below `build/long`. So the check can stop at any time and goes on with the next unit. If the
file is committed, it goes on in another checkout as well. It stops by itself after `MINUTES` (60). When
every unit has run, it prints the failures and starts from the beginning at the next call.

`hunt` looks for tests that depend on time. It runs `make test` three times and the tests in real time
(`tests/real_time.py`) five times, beside two processes that take the processor and one that writes to the
disk. No test runs a second time after a failure. `SAMPLE=yes` runs one small unit, which CI does.

Exit status: 1 if a unit failed, 3 if units are left.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "long"
OUTPUT = ROOT / "build" / "long"
QUICK, REAL_TIME = 3, 5
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(10_000))"
WRITE = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    with open(sys.argv[2], "wb") as file:
        file.write(bytes(32 << 20))
        os.fsync(file.fileno())
"""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Unit(msgspec.Struct, frozen=True):
    """One command of a check."""

    name: str
    command: list[str]
    environment: dict[str, str] = {}


class Result(msgspec.Struct, frozen=True):
    """The end of a unit: the tests that failed, or the end of the output if none is named."""

    unit: str
    status: int
    seconds: float
    load: float
    failures: list[str]
    commit: str
    """The commit of the checkout."""


def pytest(*words: str) -> list[str]:
    """A command that runs tests without a second try."""
    return [sys.executable, "-m", "pytest", "-q", "-n", "auto", *words]


def hunt() -> Iterator[Unit]:
    """The units of the hunt: the quick tests, then the tests in real time by folder."""
    for number in range(QUICK):
        yield Unit(f"quick-{number}", pytest("-m", "not slow", "--hypothesis-profile", "quick"))
    folders = sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py")))
    for number in range(REAL_TIME):
        for folder in folders:
            if folder not in ("cluster", "gpu", "install", "node"):
                yield Unit(f"{folder}-{number}", pytest("-m", "real_time", f"tests/{folder}"))
        loose = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("test_*.py"))]
        yield Unit(f"loose-{number}", pytest("-m", "real_time", *loose))
        asked = {"RACKLOOM_TEST_INSTALL": "1"}
        yield Unit(f"install-{number}", pytest("-n", "2", "--dist", "loadfile", "tests/install"), asked)
        cluster = sorted((ROOT / "tests/cluster").glob("**/test_*.py"))
        for part in range(6):
            files = [str(path.relative_to(ROOT)) for path in cluster[part::6]]
            command = pytest("-n", "2", "--dist", "loadfile", *files)
            yield Unit(f"cluster-{part}-{number}", command, {"RACKLOOM_TEST_CLUSTER": "1"})
        yield Unit(f"node-{number}", [sys.executable, "tests/node/run.py", "-q"])


CHECKS = {"hunt": hunt}
SAMPLES = {
    "hunt": Unit("sample", pytest("-m", "real_time", "tests/serving/test_http_server.py", "tests/claim/kube"))
}


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Two processes that spin and one that writes. They end with this process, however it ends."""
    with tempfile.TemporaryDirectory() as folder:
        file, parent = str(Path(folder) / "written"), str(os.getpid())
        started = [
            subprocess.Popen([sys.executable, "-c", *words])
            for words in ([SPIN, parent], [SPIN, parent], [WRITE, parent, file])
        ]
        try:
            yield
        finally:
            for process in started:
                process.kill()
                process.wait()


def run(unit: Unit) -> Result:
    """Run one unit on a busy machine."""
    begun = time.monotonic()
    # With CI set, a test in real time would run a second time.
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | unit.environment
    with busy_machine():
        done = subprocess.run(
            unit.command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    failures = _FAILED.findall(done.stdout)
    # pytest ends with 5 if a folder has no test in real time.
    status = 0 if done.returncode == 5 else done.returncode
    if status and not failures:
        failures = [(done.stdout + done.stderr)[-2000:]]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / f"{unit.name}.log").write_text(done.stdout + done.stderr)
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return Result(
        unit=unit.name,
        status=status,
        seconds=round(time.monotonic() - begun, 1),
        load=round(os.getloadavg()[0], 1),
        failures=failures,
        commit=head.stdout.strip(),
    )


def main(words: list[str] | None = None) -> int:
    """Run the units that are left, for an hour at most."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--sample", action="store_true", help="one small unit; keeps no result")
    asked = parser.parse_args(words)
    if asked.sample:
        result = run(SAMPLES[asked.name])
        print(f"{asked.name}: {result.unit}: {result.seconds} s, failed: {result.failures or 'none'}")
        return min(result.status, 1)
    file = RESULTS / f"{asked.name}.json"
    results = msgspec.json.decode(file.read_bytes(), type=list[Result]) if file.exists() else []
    units = list(CHECKS[asked.name]())
    done = {result.unit for result in results}
    left = [unit for unit in units if unit.name not in done]
    RESULTS.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * asked.minutes
    for number, unit in enumerate(left, 1):
        results.append(run(unit))
        file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        print(f"{unit.name}: status {results[-1].status}, {results[-1].seconds} s", flush=True)
        if number < len(left) and time.monotonic() > deadline:
            print(
                f"{asked.name}: {len(left) - number} of {len(units)} units are left; the same command goes on"
            )
            return 3
    for result in results:
        for failure in result.failures:
            print(f"FAILED in {result.unit} at load {result.load:.1f}: {failure}")
    file.unlink()
    return 1 if any(result.status for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
