"""Reads saved transfer records: the newest measurement of each pair of GPU and device.

`read_transfers` reads every *.json file of a folder and refuses a file that is no transfer record. A
measurement fails if its data differ, if another device than the promised one carried them, or if the rate
fell below the topology's promise. It holds if a promise was kept. Otherwise there was no promise,
or the result is unknown.

A GPU is identified by the PCI address in the record and, if the record includes the discovered
machine, by the UUID found at that address. CUDA ordinals mean nothing outside the process that used them.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rackloom.core.diagnosis.snapshot import MeasuredTransfer
from rackloom.core.transfer.records import TransferRecord
from rackloom.core.transfer.values import TransferReport
from rackloom.errors import Refused
from rackloom.prove.transfer.record_files import load_record
from rackloom.topology.join_key import Fact, GpuKey, Source
from rackloom.topology.machine import Machine


def read_transfers(folder: Path) -> tuple[MeasuredTransfer, ...]:
    """The newest transfer of each pair of GPU and device in the records (*.json) of a folder.

    Raises Refused for a file there that is no record.
    """
    transfers = (
        transfer
        for file in sorted(folder.glob("*.json"))
        for transfer in _measured_transfers(file, load_record(file))
    )
    newest = {
        (transfer.node, _gpu_name(transfer.key), transfer.device): transfer
        for transfer in sorted(transfers, key=lambda transfer: transfer.at)
    }
    return tuple(newest[name] for name in sorted(newest))


def _measured_transfers(file: Path, record: TransferRecord) -> Iterator[MeasuredTransfer]:
    at = _recorded_at(file, record.recorded_at)
    for run in record.report.runs:
        verdict, reason = _verdict(run)
        yield MeasuredTransfer(
            at=at,
            node=run.environment.initiator.hostname,
            key=_gpu_key(run.environment.initiator.device, record.machine),
            device=", ".join(run.path.carried_by) or run.path.promised or "",
            gigabytes_per_second=run.avg_GBps,
            verdict=verdict,
            reason=reason,
            emulated=run.emulated,
        )


def _recorded_at(file: Path, time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError) as error:
        fix = "save one with `transfer run --save`"
        raise Refused(f"{file} is no transfer record: {time!r} is no time", nearest_fix=fix) from error


def _verdict(run: TransferReport) -> tuple[str, str]:
    """Fails if data or device were wrong or the rate was short. Holds if a promise was kept."""
    if not run.verified:
        return "fails", "the data that arrived differ from those that were sent"
    if run.path.verdict == "does not hold":
        return "fails", run.path.evidence
    if run.expectation.outcome == "short":
        causes = ", ".join(run.expectation.causes)
        return "fails", f"{run.expectation.sentence}{f' ({causes})' if causes else ''}"
    return run.path.verdict, run.path.evidence


def _gpu_key(device: str, machine: Machine | None) -> GpuKey:
    """The key of `cuda:` or `fabric:` and a PCI address. An ordinal means nothing outside its process."""
    kind, _, address = device.partition(":")
    if kind not in ("cuda", "fabric") or ":" not in address:
        return GpuKey()
    gpus = () if machine is None else machine.gpus
    uuid = next((gpu.uuid for gpu in gpus if gpu.pci_address == address.lower()), None)
    return GpuKey(
        gpu_uuid=None if uuid is None else Fact(uuid, Source.NVML),
        pci_address=Fact(address.lower(), Source.SYSFS),
    )


def _gpu_name(key: GpuKey) -> str:
    known = key.gpu_uuid or key.pci_address
    return "" if known is None else known.value
