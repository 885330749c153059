"""Saved records of measured transfers: the newest from each GPU (or host)."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rackloom.errors import Refused
from rackloom.prove.picture.values import TransferSeen
from rackloom.prove.transfer.records import Record, load
from rackloom.prove.transfer.values import TransferReport
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey
from rackloom.topology.machine import Machine


def read_transfers(folder: Path) -> tuple[TransferSeen, ...]:
    """The newest transfer of each pair of GPU and device in the records (*.json) of a folder.

    Raises Refused for a file there that is no record.
    """
    seen = (one for file in sorted(folder.glob("*.json")) for one in _transfers(file, load(file)))
    newest = {(one.node, _name(one.key), one.device): one for one in sorted(seen, key=lambda one: one.at)}
    return tuple(newest[name] for name in sorted(newest))


def _transfers(file: Path, record: Record) -> Iterator[TransferSeen]:
    at = _moment(file, record.recorded_at)
    for run in record.report.runs:
        verdict, reason = _verdict(run)
        yield TransferSeen(
            at=at,
            node=run.environment.initiator.hostname,
            key=_key(run.environment.initiator.device, record.machine),
            device=", ".join(run.path.carried_by) or run.path.promised or "",
            gigabytes_per_second=run.avg_GBps,
            verdict=verdict,
            reason=reason,
            emulated=run.emulated,
        )


def _moment(file: Path, said: str) -> float:
    try:
        return datetime.fromisoformat(said).timestamp()
    except (ValueError, OverflowError) as error:
        fix = "save one with `transfer run --save`"
        raise Refused(f"{file} is no transfer record: {said!r} is no time", nearest_fix=fix) from error


def _verdict(run: TransferReport) -> tuple[str, str]:
    """It fails when data or device were wrong or the rate was short; it holds when a promise was kept."""
    if not run.verified:
        return "fails", "the data that arrived differ from those that were sent"
    if run.path.verdict == "does not hold":
        return "fails", run.path.evidence
    if run.expectation.outcome == "short":
        causes = ", ".join(run.expectation.causes)
        return "fails", f"{run.expectation.sentence}{f' ({causes})' if causes else ''}"
    if run.path.verdict == "holds":
        return "holds", run.path.evidence
    if run.path.verdict == "no promise":
        return "no promise", run.path.evidence
    return "unknown", run.path.evidence


def _key(device: str, machine: Machine | None) -> GpuKey:
    """A device is `cuda:` or `fabric:` and a PCI address; an ordinal says nothing outside its process."""
    kind, _, address = device.partition(":")
    if kind not in ("cuda", "fabric") or ":" not in address:
        return GpuKey()
    gpus = () if machine is None else machine.gpus
    uuid = next((one.uuid for one in gpus if one.pci_address == address.lower()), None)
    return GpuKey(
        gpu_uuid=None if uuid is None else Fact(uuid, Source.NVML),
        pci_address=Fact(address.lower(), Source.SYSFS),
    )


def _name(key: GpuKey) -> str:
    known = key.gpu_uuid or key.pci_address
    return "" if known is None else known.value
