"""`rackloom transfer`: measure what a placement delivers, with proof of the data and of the path."""

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from rackloom.errors import Refused

if TYPE_CHECKING:
    from rackloom.prove.transfer.values import AlignmentReport, Arm, TransferSpec, Ucx

app = App(name="transfer", help="Measure a KV-cache transfer with NIXL, and prove which device carried it.")

SECRET_VARIABLE = "RACKLOOM_TRANSFER_SECRET"  # noqa: S105 (the name of the variable, not its value)
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


@app.command
def run(
    *,
    op: Literal["WRITE", "READ"] = "WRITE",
    block_size: str = "1GiB",
    batch_size: int = 1,
    iters: int = 100,
    warmup: int = 20,
    runs: int = 3,
    emulate: bool = False,
    target: str | None = None,
    secret_file: Path | None = None,
    transport: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    net_device: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    timeout: float = 600.0,
    output: Annotated[Literal["table", "json"], Parameter(name=["--output", "-o"])] = "table",
) -> int:
    """Measure; exit 0 only if the data was verified and the promised device carried it.

    Without --target both ends run on this host.

    Parameters
    ----------
    op
        WRITE pushes from the initiator, READ pulls from the target.
    block_size
        Bytes in one block, such as 64MiB.
    batch_size
        Blocks in one request.
    iters
        Timed iterations per run.
    warmup
        Iterations before them.
    runs
        Measurements per arm; the mean is reported.
    emulate
        Compare an aligned and an unaligned NIC, emulated by shaped links between two network namespaces.
    target
        HOST:PORT of a `rackloom transfer serve` to measure against.
    secret_file
        File with the secret shared with that target; else the variable RACKLOOM_TRANSFER_SECRET.
    transport
        UCX transport to pin, may be repeated.
    net_device
        UCX device to pin, may be repeated. A single one is a promise that the report checks.
    timeout
        Seconds after which one run is given up.
    output
        table prints RESULT lines and a verdict, json the whole report.
    """
    from rackloom.cli.output import emit
    from rackloom.prove.transfer import run as transfer
    from rackloom.prove.transfer.values import TransferSpec, Ucx

    spec = TransferSpec(
        op=op,
        block_size=parse_size(block_size),
        batch_size=batch_size,
        iters=iters,
        warmup_iters=warmup,
        timeout_seconds=timeout,
    )
    pins = Ucx(transport, net_device)
    if emulate and (target is not None or pins != Ucx()):
        raise Refused(
            "--emulate makes both ends and their devices itself",
            nearest_fix="leave out --target, --transport and --net-device",
        )
    if target is not None:
        report = _against(target, secret_file, spec, pins, runs)
    elif emulate:
        report = transfer.run_alignment(spec, runs=runs, on_step=_say)
    else:
        report = transfer.run_plain(spec, runs=runs, ucx=pins, on_step=_say)
    emit(report, output, lambda: table(report))
    return 0 if report.proved else 1


@app.command
def serve(
    *,
    listen: str,
    secret_file: Path | None = None,
    transport: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    net_device: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    once: bool = False,
    timeout: float = 600.0,
) -> None:
    """Be the target for initiators on other hosts, one after the other, until Ctrl-C.

    Parameters
    ----------
    listen
        HOST:PORT for the control channel. The transfer itself takes the pinned devices.
    secret_file
        File with the shared secret; else the variable RACKLOOM_TRANSFER_SECRET.
    transport
        UCX transport to pin, may be repeated.
    net_device
        UCX device to pin, may be repeated.
    once
        End after the first completed measurement.
    timeout
        With --once: seconds to wait for it.
    """
    from rackloom.prove.transfer import target
    from rackloom.prove.transfer.channel import check_secret
    from rackloom.prove.transfer.memory import require
    from rackloom.prove.transfer.values import Ucx

    require()
    secret = check_secret(read_secret(secret_file))
    host, port = parse_address(listen)
    deadline = time.monotonic() + timeout if once else None
    with target.listen(host, port) as listener:
        print(f"listening on {host} port {listener.getsockname()[1]}", flush=True)
        target.serve(
            listener,
            secret,
            Ucx(transport, net_device),
            lambda peer, reason: _say(f"{peer}: {reason}"),
            once=once,
            deadline=deadline,
        )


def table(report: "AlignmentReport") -> str:
    """RESULT lines, a row per arm, and the verdict."""
    from rackloom.cli.output import columns
    from rackloom.prove.transfer.report import result_line

    arms = [arm for arm in (report.aligned, report.unaligned, report.plain) if arm]
    headers = ("ARM", "CARRIED BY", "DECLARED Gb/s", "GB/s", "SPREAD", "P50 ms", "P99 ms", "PATH")
    lines = [result_line(one) for one in report.runs]
    return "\n".join([*lines, "", columns(headers, map(_row, arms)), "", report.label, report.verdict])


def parse_size(text: str) -> int:
    """Bytes from a number with an optional unit: 4096, 64MiB, 1GB.

    Raises:
        Refused: not a size.
    """
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise Refused(f"{text!r} is not a size", nearest_fix="write bytes, or a number with KiB, MiB or GiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port from HOST:PORT; an IPv6 host may stand in brackets.

    Raises:
        Refused: not an address with a port.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise Refused(f"{text!r} is not HOST:PORT", nearest_fix="write it as 192.0.2.1:5555")
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_secret(file: Path | None) -> str:
    """The shared secret from `file` or from the environment; never from the command line.

    Raises:
        Refused: there is none, or the file cannot be read.
    """
    if file is None:
        if secret := os.environ.get(SECRET_VARIABLE):
            return secret
        raise Refused("no shared secret", nearest_fix=f"give --secret-file or set {SECRET_VARIABLE}")
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"the secret file cannot be read: {error}", nearest_fix="name a readable text file"
        ) from error


def _row(arm: "Arm") -> tuple[str, ...]:
    """One arm; of its runs the slowest percentiles and every path verdict."""
    carriers = dict.fromkeys(name for run in arm.runs for name in run.path.carried_by or run.path.protocols)
    return (
        arm.name,
        "/".join(carriers),
        "-" if arm.declared_gigabits is None else f"{arm.declared_gigabits:g}",
        f"{arm.mean_GBps:.2f}",
        f"{arm.spread:.1%}",
        f"{1e3 * max(run.p50_seconds for run in arm.runs):.2f}",
        f"{1e3 * max(run.p99_seconds for run in arm.runs):.2f}",
        ", ".join(sorted({run.path.verdict for run in arm.runs})),
    )


def _against(
    address: str, secret_file: Path | None, spec: "TransferSpec", pins: "Ucx", runs: int
) -> "AlignmentReport":
    from rackloom.prove.transfer.run import run_remote

    host, port = parse_address(address)
    secret = read_secret(secret_file)
    return run_remote(spec, address=host, port=port, secret=secret, ucx=pins, runs=runs, on_step=_say)


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
