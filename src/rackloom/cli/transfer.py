"""`rackloom transfer run|serve|model`: measure a KV-cache transfer, or model it from the wiring.

`run` exits with 0 only if the data was verified and the promised device carried it. Without --target both
ends run on this host. With --emulate, shaped links between two network namespaces emulate an aligned and an
unaligned NIC. If a run fails, the complete runs before it are saved too. `serve` is the target for
initiators on other hosts. `model` moves nothing. The commands for saved records are in
`transfer_records`.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from rackloom.cli.common import Output, columns, emit, note, with_common_flags
from rackloom.cli.transfer_options import Devices, Sizes, parse_address, read_secret
from rackloom.errors import Misuse, Refused, Retry

if TYPE_CHECKING:
    from rackloom.core.transfer.model import ModelledPair, RateRange
    from rackloom.core.transfer.values import AlignmentReport, Arm, TransferReport, TransferSpec
    from rackloom.prove.transfer.run import RemoteTarget, RunObserver
    from rackloom.topology.machine import Machine


# `rackloom transfer model`.


@with_common_flags
def model(machine: str, *, block_size: str = "1GiB", batch_size: int = 1, output: Output = "table") -> None:
    """Model the transfer of a machine's GPU and NIC pairs from its wiring. Nothing is moved or measured.

    Parameters
    ----------
    machine
        Name as `rackloom topology list` prints it, or a machine saved as a .json file by `topology discover`.
    block_size
        Bytes in one block, such as 64MiB.
    batch_size
        Blocks in one request.
    """
    from rackloom.cli.topology import load_machine
    from rackloom.core.transfer.model import model_transfers as modelled

    spec = Sizes(block_size=block_size, batch_size=batch_size).spec()
    found = modelled(load_machine(machine), spec.total_bytes)
    headers = ("GPU", "NIC", "CLASS", "Gb/s", "ALONE GB/s", "ALONE ms", "TOGETHER GB/s")
    rows = [_model_row(pair) for pair in found.pairs]
    emit(found, output, lambda: "\n".join([columns(headers, rows), "", found.label]))


def _model_row(pair: "ModelledPair") -> tuple[str, ...]:
    return (
        f"{pair.gpu}{'*' if pair.own else ''}",
        pair.nic,
        pair.path_class.value,
        "?" if pair.line_rate_gigabits is None else str(pair.line_rate_gigabits),
        _rate_text(pair.alone),
        "?" if pair.alone is None else _range_text(pair.alone.best_ms, pair.alone.worst_ms),
        _rate_text(pair.together) if pair.own else "",
    )


def _rate_text(between: "RateRange | None") -> str:
    return "?" if between is None else _range_text(between.low_GBps, between.high_GBps)


def _range_text(low: float, high: float) -> str:
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"


# `rackloom transfer run` and `serve`.


app = App(name="transfer", help="Measure a KV-cache transfer with NIXL, and prove which device carried it.")
for _name, _help in (
    ("report", "Show a saved record as tables, JSON, HTML or SVG."),
    ("compare", "Compare two records, with a statistical test."),
    ("baseline", "Keep a record as the baseline of its kind of machine."),
    ("gate", "Fail if a record is slower than its baseline beyond noise."),
    ("evidence", "Add the output of nvbandwidth or nccl-tests to a record."),
):
    app.command(f"rackloom.cli.transfer_records:{_name}", name=_name, help=_help)

app.command("rackloom.cli.transfer:model", name="model", help="Model a transfer from the wiring alone.")


@app.command
@with_common_flags
def run(
    *,
    sizes: Sizes = Sizes(),  # noqa: B008 (frozen)
    devices: Devices = Devices(),  # noqa: B008
    runs: int = 3,
    emulate: bool = False,
    rates: tuple[float, float] | None = None,
    target: str | None = None,
    secret_file: Path | None = None,
    save: Path | None = None,
    textfile: Path | None = None,
    output: Output = "table",
) -> int:
    """Measure a transfer. Exit 0 only if the data was verified and the promised device carried it.

    Without --target both ends run on this host. With --pair or --every-gpu each pair is measured alone, then
    all at once.

    Parameters
    ----------
    sizes
        Sizes of one run.
    devices
        Memory and NICs of this end.
    runs
        Measurements per arm. The mean is reported.
    emulate
        Compare an aligned and an unaligned NIC, emulated by shaped links between two network namespaces.
        With --every-gpu, use the two as pairs.
    rates
        With --emulate: the declared rates of the two links, Gb/s.
    target
        HOST:PORT of a `rackloom transfer serve` to measure against. Pair k takes PORT + k.
    secret_file
        File with the secret shared with that target. Default: the variable RACKLOOM_TRANSFER_SECRET.
    save
        File for the record. If a run fails, the complete runs before it are kept there too.
    textfile
        Also write the result for the textfile collector of Prometheus' node exporter.
    """
    spec, log = sizes.spec(), _RunLog(output == "table")
    if emulate and (target is not None or devices not in (Devices(), Devices(every_gpu=True))):
        raise Misuse(
            "--emulate makes both ends and their devices itself",
            nearest_fix="leave out --target and what names devices, transports and allocations",
        )
    machine = None if emulate else _discover_machine()
    try:
        if emulate:
            report = _run_emulated(spec, rates, devices.every_gpu, runs, log.watch())
        else:
            report = _run_measured(spec, devices, machine, target, secret_file, runs, log.watch())
    except (Refused, Retry) as trouble:
        _write_textfile(textfile, None)
        if save is not None and log.runs:
            from rackloom.core.transfer.records import partial_report

            _save_record(save, spec, partial_report(log.runs, trouble.reason), machine, trouble.reason)
        raise
    emit(report, output, lambda: report_table(report))
    _write_textfile(textfile, report)
    if save is not None:
        _save_record(save, spec, report, machine, None)
    return 0 if report.proved else 1


@app.command
@with_common_flags
def serve(
    *,
    listen: str,
    devices: Devices = Devices(),  # noqa: B008
    secret_file: Path | None = None,
    once: bool = False,
    timeout: float = 600.0,
) -> None:
    """Serve as the target for initiators on other hosts, one after the other, until Ctrl-C.

    Parameters
    ----------
    devices
        Memory and NICs of this end.
    listen
        HOST:PORT for the control channel. Pair k takes PORT + k. The transfer takes the pinned devices.
    secret_file
        File with the shared secret. Default: the variable RACKLOOM_TRANSFER_SECRET.
    once
        End after the first completed measurement (of each pair).
    timeout
        With --once: seconds to wait for it.
    """
    from rackloom.prove.transfer import endpoints
    from rackloom.prove.transfer.channel import check_secret
    from rackloom.prove.transfer.installation import require_nixl

    require_nixl()
    secret = read_secret(secret_file)
    key = check_secret(secret)
    host, port = parse_address(listen)
    if devices.pair or devices.every_gpu or devices.sweep:
        from rackloom.core.transfer.pairing import pinned_config
        from rackloom.prove.transfer.processes import serve_targets

        base = devices.config()
        configs = [pinned_config(base, pair) for pair in devices.pairs(_discover_machine())]
        serve_targets(host, port, secret, configs, partial(print, flush=True), once=once, timeout=timeout)
        return
    deadline = time.monotonic() + timeout if once else None
    with endpoints.listen_for_initiator(host, port) as listener:
        print(f"listening on {host} port {listener.getsockname()[1]}", flush=True)
        endpoints.serve_target(
            listener,
            key,
            devices.config(),
            lambda peer, reason: note(f"{peer}: {reason}"),
            once=once,
            deadline=deadline,
        )


def report_table(report: "AlignmentReport") -> str:
    """A row per arm, and the verdict."""
    headers = ("ARM", "CARRIED BY", "DECLARED Gb/s", "GB/s", "SPREAD", "P50 ms", "P99 ms", "PATH")
    return "\n".join(["", columns(headers, map(_arm_row, report.arms)), "", report.label, report.verdict])


@dataclass(frozen=True)
class _RunLog:
    """The runs up to now. The RESULT line of each is printed at once, if at all."""

    print_results: bool
    runs: "list[TransferReport]" = field(default_factory=list)

    def watch(self) -> "RunObserver":
        from rackloom.prove.transfer.run import RunObserver

        return RunObserver(note, self._finished)

    def _finished(self, transfer_report: "TransferReport") -> None:
        from rackloom.core.transfer.report import result_line

        self.runs.append(transfer_report)
        if self.print_results:
            print(result_line(transfer_report), flush=True)


def _run_emulated(
    spec: "TransferSpec", rates: tuple[float, float] | None, pairs: bool, runs: int, watch: "RunObserver"
) -> "AlignmentReport":
    from rackloom.prove.transfer import emulation, run

    gigabits = rates or (emulation.ALIGNED_GIGABITS, emulation.UNALIGNED_GIGABITS)
    if not all(0.001 <= rate <= 1000 for rate in gigabits):
        raise Misuse(f"a link cannot be shaped to {gigabits}", nearest_fix="give Gb/s from 0.001 to 1000")
    if pairs:
        return run.run_emulated_pairs(spec, gigabits, runs=runs, watch=watch)
    return run.run_alignment(
        spec, runs=runs, aligned_gigabits=gigabits[0], unaligned_gigabits=gigabits[1], watch=watch
    )


def _run_measured(
    spec: "TransferSpec",
    devices: Devices,
    machine: "Machine | None",
    target: str | None,
    secret_file: Path | None,
    runs: int,
    watch: "RunObserver",
) -> "AlignmentReport":
    from rackloom.prove.transfer import run as transfer

    config, pairs = devices.config(), devices.pairs(machine)
    remote = None if target is None else _remote_targets(target, read_secret(secret_file), max(1, len(pairs)))
    if pairs:
        return transfer.run_pairs(spec, pairs, remote, config=config, runs=runs, watch=watch)
    if remote:
        return transfer.run_remote(spec, remote[0], config=config, runs=runs, watch=watch)
    return transfer.run_plain(spec, runs=runs, config=config, watch=watch)


def _remote_targets(target: str, secret: str, count: int) -> "list[RemoteTarget]":
    from rackloom.prove.transfer.run import RemoteTarget

    host, port = parse_address(target)
    return [RemoteTarget(host, port + k, secret) for k in range(count)]


def _discover_machine() -> "Machine | None":
    """The machine of this host, or None if kernel and driver do not describe it."""
    from rackloom.topology.discovery.discover import discover_machine

    with suppress(Refused, Retry):
        return discover_machine()
    return None


def _write_textfile(file: Path | None, report: "AlignmentReport | None") -> None:
    if file is not None:
        from rackloom.app.transfer_textfile import write_transfer_textfile

        write_transfer_textfile(file, report, time.time())


def _save_record(
    file: Path,
    spec: "TransferSpec",
    report: "AlignmentReport",
    machine: "Machine | None",
    incomplete: str | None,
) -> None:
    from datetime import UTC, datetime

    from rackloom.core.transfer.records import TransferRecord
    from rackloom.prove.transfer.record_files import save_record

    now = datetime.now(UTC).isoformat(timespec="seconds")
    save_record(
        TransferRecord(recorded_at=now, spec=spec, report=report, machine=machine, incomplete=incomplete),
        file,
    )


def _arm_row(arm: "Arm") -> tuple[str, ...]:
    """One arm, with the slowest percentiles and every path verdict of its runs."""
    from rackloom.core.transfer.comparison import arm_title

    carriers = dict.fromkeys(name for run in arm.runs for name in run.path.carried_by or run.path.protocols)
    return (
        arm_title(arm),
        "/".join(carriers),
        "-" if arm.declared_gigabits is None else f"{arm.declared_gigabits:g}",
        f"{arm.mean_GBps:.2f}",
        f"{arm.spread:.1%}",
        f"{1e3 * max(run.p50_seconds for run in arm.runs):.2f}",
        f"{1e3 * max(run.p99_seconds for run in arm.runs):.2f}",
        ", ".join(sorted({run.path.verdict for run in arm.runs})),
    )
