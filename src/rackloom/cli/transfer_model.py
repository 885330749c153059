"""`rackloom transfer model`: what to expect of a machine on which nothing can be moved."""

from typing import TYPE_CHECKING

from rackloom.cli.output import Output

if TYPE_CHECKING:
    from rackloom.prove.transfer.model import Between, ModelledPair


def model(machine: str, *, block_size: str = "1GiB", batch_size: int = 1, output: Output = "table") -> None:
    """Model the transfer of a machine's GPU and NIC pairs from its wiring; nothing is moved or measured.

    Parameters
    ----------
    machine
        Name as `rackloom topology list` prints it, or a machine saved as a .json file by `topology discover`.
    block_size
        Bytes in one block, such as 64MiB.
    batch_size
        Blocks in one request.
    output
        How to print.
    """
    from rackloom.cli.output import columns, emit
    from rackloom.cli.topology import load_machine
    from rackloom.cli.transfer_options import Sizes
    from rackloom.prove.transfer.model import model as modelled

    spec = Sizes(block_size=block_size, batch_size=batch_size).spec()
    found = modelled(load_machine(machine), spec.total_bytes)
    headers = ("GPU", "NIC", "CLASS", "Gb/s", "ALONE GB/s", "ALONE ms", "TOGETHER GB/s")
    rows = [_row(pair) for pair in found.pairs]
    emit(found, output, lambda: "\n".join([columns(headers, rows), "", found.label]))


def _row(pair: "ModelledPair") -> tuple[str, ...]:
    return (
        f"{pair.gpu}{'*' if pair.own else ''}",
        pair.nic,
        pair.path_class.value,
        "?" if pair.line_rate_gigabits is None else str(pair.line_rate_gigabits),
        _rate(pair.alone),
        "?" if pair.alone is None else _range(pair.alone.best_ms, pair.alone.worst_ms),
        _rate(pair.together) if pair.own else "",
    )


def _rate(between: "Between | None") -> str:
    return "?" if between is None else _range(between.low_GBps, between.high_GBps)


def _range(low: float, high: float) -> str:
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
