"""Moves the same bytes three ways over TCP loopback and prints ratios, one JSON object per line.

    python benchmarks/transfer.py [--size 67108864] [--iters 20] [--rounds 7] [--ucx-perftest PATH] [--quick]
    python benchmarks/transfer.py --where [--rounds 4]      # CPU time of a MiB by place; needs perf

ours: `rackloom transfer` (NIXL WRITE over UCX, tcp pinned to lo). Against `ucx_perftest` (ucp_put_bw, the
same transport, device and size; its program is in the PyPI package libucx-cu12) and against a raw TCP socket
between two processes. A round measures all three, one after the other, in turning order.

Each way polls with two processes, so anything else that runs makes a rate worthless. A round is contended,
and discarded, if processes that are not ours used more than a tenth of a processor during it, or if one of
our ends got less than 95% of one. The ratio of a comparison is the median over the rounds that are left, at
least 7, with the exact 95% interval of a median from the binomial distribution. With fewer there is no ratio,
and the exit code is 1.

`--where` says where each way spends its CPU time, also on a busy machine: `perf record` samples the CPU clock
of the whole process tree once with few and once with many iterations, and the difference belongs to the bytes
in between. Places are the kernel's copies from and to a process, the rest of the kernel, and user space.
"""

import argparse
import json
import math
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from rackloom.core.transfer.values import EndConfig, Promise, TransferSpec, UcxPins
from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.fallback import run_over_sockets
from rackloom.prove.transfer.installation import nixl_missing_reason
from rackloom.prove.transfer.run import EndLocation, Lane, run_lanes

ENOUGH = 7
FOREIGN = 0.1
"""Of one processor: what others may use during a measurement."""
GOAL = 0.95
_FINAL = re.compile(r"^Final:\s+(?P<figures>[\d.\s]+)$", re.MULTILINE)
"""ucx_perftest's last line: iterations; p50, average, overall us; average, overall MB/s; messages/s twice."""
_MIB = 1 << 20

Way = Callable[[], tuple[float, str | None]]
"""Measures once: GB/s, and why the number is suspect."""


class Contended(Exception):
    """Somebody else was running."""


def ours(spec: TransferSpec) -> Way:
    place = EndLocation(config=EndConfig(ucx=UcxPins(("tcp",), ("lo",))))

    def measure() -> tuple[float, str | None]:
        (report,) = run_lanes(spec, [Lane(place, place, Promise("lo"))])
        assert report.verified, "the data did not arrive intact"
        assert report.path.verdict == "holds", report.path.evidence
        return report.avg_GBps, report.environment.contention

    return measure


def ucx_perftest(program: Path, spec: TransferSpec) -> Way:
    library = program.parent.parent / "lib"
    bundled = next(program.parent.parent.parent.glob("libucx_cu*.libs"), library)
    environment = os.environ | {
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
        "LD_LIBRARY_PATH": f"{library}:{bundled}",
        # glibc writes what it allocates: else it would send the kernel's one page of zeros from the cache,
        # again and again, where a KV cache comes from memory.
        "MALLOC_PERTURB_": "165",
    }

    def measure() -> tuple[float, str | None]:
        port = str(free_port())
        command = [str(program), "-t", "ucp_put_bw", "-m", "host", "-s", str(spec.total_bytes)]
        command += ["-n", str(spec.iters), "-w", str(spec.warmup_iters), "-p", port]
        command += ["-O", "1"]  # as ours: the next transfer begins when the last one is complete
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                wait_for(int(port), server)
                done = subprocess.run(
                    [*command, "127.0.0.1"],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=300,
                    check=True,
                )
                server.wait(30)
            finally:
                server.kill()
        return overall_rate(done.stdout), None

    return measure


def raw_tcp(spec: TransferSpec) -> Way:
    def measure() -> tuple[float, str | None]:
        report = run_over_sockets(spec.total_bytes, spec.iters)
        assert report.verified, "the data did not arrive intact"
        return spec.total_bytes / report.avg_seconds / 1e9, None

    return measure


def overall_rate(output: str) -> float:
    """GB/s over all iterations from what ucx_perftest prints in MB/s of 2^20 bytes."""
    final = _FINAL.search(output)
    assert final is not None, output
    return float(final["figures"].split()[5]) * _MIB / 1e9


def measured(way: Way) -> float:
    """GB/s of one measurement.

    Raises:
        Contended: others used the processors during it.
    """
    busy, mine, start = processors_busy(), own_seconds(), time.monotonic()
    rate, suspect = way()
    wall = time.monotonic() - start
    foreign = (processors_busy() - busy - (own_seconds() - mine)) / wall
    if suspect is not None:
        raise Contended(suspect)
    if foreign > FOREIGN:
        raise Contended(f"others used {foreign:.2f} processors")
    return rate


def processors_busy() -> float:
    """Processor seconds of everybody since boot, those that the hypervisor took included."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds of this process and of all children it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def median_interval(numbers: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with at least 95%."""
    ordered, count = sorted(numbers), len(numbers)
    low, below = 0, 0.0
    while (below := below + math.comb(count, low) / 2**count) <= 0.025:
        low += 1
    assert low >= 1, f"{count} numbers cannot give 95%"
    return ordered[low - 1], ordered[count - low]


def rounds(ways: dict[str, Way], wanted: int, most: int) -> tuple[list[dict[str, float]], list[str]]:
    """Rates of `wanted` uncontended rounds, or what `most` attempts give; why the others were discarded."""
    kept: list[dict[str, float]] = []
    discarded: list[str] = []
    for attempt in range(most):
        names = sorted(ways, key=lambda name: (sorted(ways).index(name) + attempt) % len(ways))
        try:
            kept.append({name: measured(ways[name]) for name in names})
        except (Contended, Retry) as reason:
            discarded.append(str(reason))
        if len(kept) == wanted:
            break
    return kept, discarded


def row(
    against: str, kept: list[dict[str, float]], discarded: list[str], spec: TransferSpec
) -> dict[str, object]:
    """One comparison."""
    ratios = [rates["ours"] / rates[against] for rates in kept]
    enough = len(ratios) >= ENOUGH
    interval = median_interval(ratios) if enough else None
    return {
        "measure": "ratio",
        "of": "rackloom transfer",
        "against": against,
        "ratio": round(statistics.median(ratios), 4) if enough else None,
        "interval_95": [round(end, 4) for end in interval] if interval else None,
        "goal": GOAL,
        "rounds": len(kept),
        "contended_rounds": len(discarded),
        "first_reason": discarded[0] if discarded else None,
        "GBps": {name: round(statistics.median(rates[name] for rates in kept), 3) for name in kept[0]}
        if kept
        else {},
        "total_bytes": spec.total_bytes,
        "iters": spec.iters,
        "load": round(os.getloadavg()[0], 2),
        "cpus": os.cpu_count(),
    }


# Where the time goes.


FEW, MANY = 10, 60
"""Iterations of the two profiles whose difference counts: what happens before and after them cancels out."""
_SAMPLES_PER_S = 999
_SAMPLE = re.compile(r"^\s*[\d.]+%\s+(?P<count>\d+)\s+\[(?P<space>[k.])\]\s+(?P<symbol>\S+)", re.MULTILINE)
"""A row of `perf report -n --sort sym`: share, samples, kernel or user space, and the function."""


def where(names: Sequence[str], rounds: int, size: int, perftest: Path | None) -> list[dict[str, object]]:
    """CPU microseconds of a MiB by place, one row a way; the ways take turns."""
    if shutil.which("perf") is None:
        sys.exit("SKIPPED: perf is not installed")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            few, many = (profile(name, iters, size, perftest) for iters in (FEW, MANY))
            mib = (MANY - FEW) * size / _MIB
            found[name].append(
                {place: (many[place] - few[place]) / _SAMPLES_PER_S * 1e6 / mib for place in many}
            )
    return [
        {
            "measure": "cpu_us_per_mib",
            "way": name,
            **{place: round(statistics.median(run[place] for run in runs)) for place in runs[0]},
            "rounds": {place: sorted(round(run[place]) for run in runs) for place in runs[0]},
            "load": round(os.getloadavg()[0], 2),
        }
        for name, runs in found.items()
    ]


def profile(name: str, iters: int, size: int, perftest: Path | None) -> dict[str, int]:
    """Samples by place of one measurement of one way, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "perf.data")
        command = [sys.executable, __file__, "--way", name, "--iters", str(iters), "--size", str(size)]
        if perftest is not None:
            command += ["--ucx-perftest", str(perftest)]
        record = ["perf", "record", "-o", str(data), "-e", "cpu-clock", "-F", str(_SAMPLES_PER_S)]
        subprocess.run([*record, *command], capture_output=True, timeout=300, check=True)
        report = ["perf", "report", "-i", str(data), "--sort", "sym", "--stdio", "-n"]
        return places(subprocess.run(report, capture_output=True, text=True, timeout=60, check=True).stdout)


def places(report: str) -> dict[str, int]:
    """Samples by place in what perf reports."""
    counts = {"copied_from_process": 0, "copied_to_process": 0, "rest_of_kernel": 0, "user_space": 0}
    for row in _SAMPLE.finditer(report):
        if row["symbol"].startswith("_copy_from_iter"):
            place = "copied_from_process"
        elif row["symbol"].startswith("_copy_to_iter"):
            place = "copied_to_process"
        else:
            place = "rest_of_kernel" if row["space"] == "k" else "user_space"
        counts[place] += int(row["count"])
    return counts


def found_perftest(given: Path | None) -> Path | None:
    """The program that was named, on the PATH, or in libucx-cu12."""
    if given is not None:
        return given
    if on_path := shutil.which("ucx_perftest"):
        return Path(on_path)
    package = find_spec("libucx")
    inside = Path(str(package.origin)).parent / "bin" / "ucx_perftest" if package else None
    return inside if inside is not None and inside.exists() else None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Until `server` listens; a connection of ours would be taken for the client's."""
    address = f"{port:04X} "
    deadline = time.monotonic() + 30
    while server.poll() is None and time.monotonic() < deadline:
        listening = [
            line for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()
        ]
        if any(f":{address}" in line and " 0A " in line for line in listening):
            return
        time.sleep(0.02)
    raise Retry("ucx_perftest did not listen", after=1.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare rackloom transfer with ucx_perftest and a raw socket."
    )
    parser.add_argument("--size", type=int, default=64 * _MIB, help="bytes per iteration")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=ENOUGH, help="uncontended rounds wanted")
    parser.add_argument("--attempts", type=int, default=40, help="rounds to try at most")
    parser.add_argument("--ucx-perftest", type=Path, help="the program, from PyPI's libucx-cu12")
    parser.add_argument(
        "--quick", action="store_true", help="one attempt of a small size: for tests of this file"
    )
    parser.add_argument("--where", action="store_true", help="where each way spends CPU time, by perf")
    parser.add_argument("--way", help="measure this way once, and print GB/s")
    args = parser.parse_args()
    if reason := nixl_missing_reason():
        sys.exit(f"SKIPPED: {reason}")
    size, iters, attempts = (_MIB, 3, 1) if args.quick else (args.size, args.iters, args.attempts)
    spec = TransferSpec(block_size=size, iters=iters, warmup_iters=3, timeout_seconds=120)
    ways = {"ours": ours(spec), "raw TCP loopback": raw_tcp(spec)}
    program = found_perftest(args.ucx_perftest)
    if program is None:
        print("SKIPPED against ucx_perftest: install libucx-cu12 or give --ucx-perftest", file=sys.stderr)
    else:
        ways["ucx_perftest"] = ucx_perftest(program, spec)
    if args.way is not None:
        print(ways[args.way]()[0])
        return 0
    if args.where:
        for found in where(list(ways), args.rounds, size, program):
            print(json.dumps(found), flush=True)
        return 0
    try:
        kept, discarded = rounds(ways, args.rounds, attempts)
    except Refused as refused:
        sys.exit(str(refused))
    others = [name for name in ways if name != "ours"]
    for name in others:
        print(json.dumps(row(name, kept, discarded, spec)), flush=True)
    return 0 if len(kept) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
