"""The order of the demonstration, and the steps that need no site: claims and a transfer.

The demo runs in a temporary home: two tenants carve two racks, a whole-rack job is placed and run, a GPU
is lost and found by the doctor, the job ends, claims are allocated, a buffer is transferred, and
everything is released. The command exits with 0 only if every step was verified.

The claim step allocates the two templates of examples/nixl-kv-transfer on two nodes. Whether the NICs are
near the GPUs is read from the topology and not from the claim. The transfer step writes a buffer between
two processes over NIXL and verifies data and path. Without NIXL it degrades to sockets, and the report
shows this, also in its last line.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rackloom.app.demo.job import LostGpu, RackJob
from rackloom.app.demo.story import (
    DEGRADED,
    DemoReport,
    DemoStep,
    DemoStory,
    Evidence,
    NotObserved,
    example_directory,
    step_mark,
)
from rackloom.app.demo.tenants import DemoTenant, DemoTenants
from rackloom.app.home import Home
from rackloom.app.process import keep_files_private
from rackloom.app.twin.up import running_twin
from rackloom.claim.manifests.read import read_manifests
from rackloom.core.allocate.driver_slices import GPU_DRIVER, device_classes, slices_of
from rackloom.core.allocate.explanation import render_explanation
from rackloom.core.allocate.objects import DeviceResult, Node, ObjectMeta, ResourceSlice
from rackloom.core.allocate.planning import PlacedClaim, RefusedClaim, allocate_each
from rackloom.core.transfer.records import TransferRecord
from rackloom.core.transfer.report import result_line
from rackloom.core.transfer.values import Arm, TransferSpec
from rackloom.prove.transfer.fallback import FALLBACK_LABEL, run_over_sockets
from rackloom.prove.transfer.installation import nixl_missing_reason
from rackloom.prove.transfer.record_files import save_record
from rackloom.prove.transfer.run import run_alignment
from rackloom.topology.affinity import Cell, classes
from rackloom.topology.machine import Machine, PathClass
from rackloom.topology.profiles import load_machine

# Claims, allocated as users of the example write them.


CLAIM_PROFILE = "azure-nd96isr-h100-v5"
CLAIM_NODES = ("h100-a", "h100-b")
EXPECTED = {"h100-4gpu-4nic-numa-aligned": "near", "h100-4gpu-4nic-numa-unaligned": "far"}


async def allocate_templates() -> Evidence:
    """Both claims on two nodes. Whether the NICs are near is read from the topology, not from the claim."""
    machine = load_machine(CLAIM_PROFILE)
    manifests = read_manifests(
        sorted(example_directory("nixl-kv-transfer").glob("resource-claim-template-*.yaml"))
    )
    slices = [slice_ for node in CLAIM_NODES for slice_ in slices_of(machine, node)]
    nodes = [Node(metadata=ObjectMeta(name=name)) for name in CLAIM_NODES]
    answers = allocate_each(nodes, device_classes(), slices, manifests.claims)
    seen = {
        answer.claim.rpartition("/")[2]: _allocation_evidence(machine, slices, answer) for answer in answers
    }
    found = {claim: shown["nicsAre"] for claim, shown in seen.items()}
    if found != EXPECTED:
        raise NotObserved("the claims did not get the NICs that their names promise", claims=seen)
    return {"profile": CLAIM_PROFILE, "nodes": list(CLAIM_NODES), "claims": seen}


def _allocation_evidence(
    machine: Machine, slices: Sequence[ResourceSlice], answer: PlacedClaim | RefusedClaim
) -> Evidence:
    if isinstance(answer, RefusedClaim):
        raise NotObserved(
            answer.reason, claim=answer.claim, why=[render_explanation(account) for account in answer.nodes]
        )
    numbers = _device_positions(slices)
    taken = answer.allocation.devices.results
    gpus = [numbers[_device_key(result)] for result in taken if result.driver == GPU_DRIVER]
    nics = [numbers[_device_key(result)] for result in taken if result.driver != GPU_DRIVER]
    matrix = classes(machine)
    cells = [matrix[gpu][nic] for gpu in gpus for nic in nics]
    return {
        "node": answer.node,
        "gpus": [machine.gpus[index].pci_address for index in gpus],
        "nics": [machine.nics[index].rdma_device for index in nics],
        "pathClasses": dict(Counter(cell.path_class for cell in cells)),
        "nicsAre": _nic_distance(cells),
    }


def _nic_distance(cells: Sequence[Cell]) -> str:
    """Near: every NIC on the socket of every GPU. Far: none of them."""
    crossing = sum(cell.path_class is PathClass.SYS for cell in cells)
    return {0: "near", len(cells): "far"}.get(crossing, "mixed")


def _device_positions(slices: Sequence[ResourceSlice]) -> dict[tuple[str, str, str], int]:
    """Driver, pool and name of a device -> its place in the machine profile."""
    return {
        (slice_.spec.driver, slice_.spec.pool.name, device.name): place
        for slice_ in slices
        for place, device in enumerate(slice_.spec.devices)
    }


def _device_key(result: DeviceResult) -> tuple[str, str, str]:
    return result.driver, result.pool, result.device


# The transfer.


TRANSFER_SPEC = TransferSpec(block_size=64 << 20, iters=5, warmup_iters=1)
"""Small, so that the demo ends within a minute on two cores. The example moves 1 GiB, 20 + 100 times."""
TRANSFER_SIZE = "64 MiB x 5 (the benchmark's own size is 1 GiB x 100)"


async def run_transfer(save: Path | None = None) -> Evidence:
    """WRITE over NIXL, aligned against unaligned if two NICs can be emulated, else one plain run.

    Degraded without NIXL, and if the rates are not reliable. `save`: the file for the record.
    """
    if (reason := nixl_missing_reason()) is not None:
        return await _transfer_over_sockets(reason)
    report = await asyncio.to_thread(run_alignment, TRANSFER_SPEC, runs=1)
    if not report.proved:
        raise NotObserved(report.verdict, label=report.label)
    if save is not None:
        record = TransferRecord(
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"), spec=TRANSFER_SPEC, report=report
        )
        await asyncio.to_thread(save_record, record, save)
    arms = [arm for arm in (report.aligned, report.unaligned, report.plain) if arm is not None]
    contention = [
        run.environment.contention for arm in arms for run in arm.runs if run.environment.contention
    ]
    return {
        **({DEGRADED: f"the rates are not reliable: {contention[0]}"} if contention else {}),
        "label": report.label,
        "verdict": report.verdict,
        "size": TRANSFER_SIZE,
        "arms": {arm.name: _arm_evidence(arm) for arm in arms},
        "declaredRatio": report.declared_ratio,
        "measuredRatio": report.measured_ratio,
        "results": [result_line(run) for arm in arms for run in arm.runs],
    }


async def _transfer_over_sockets(reason: str) -> Evidence:
    report = await asyncio.to_thread(run_over_sockets, TRANSFER_SPEC.total_bytes, TRANSFER_SPEC.iters)
    if not report.verified:
        raise NotObserved("the data did not arrive intact", label=FALLBACK_LABEL)
    return {
        DEGRADED: f"{FALLBACK_LABEL}: {reason}",
        "label": FALLBACK_LABEL,
        "size": TRANSFER_SIZE,
        "dataVerified": True,
    }


def _arm_evidence(arm: Arm) -> Evidence:
    run = arm.runs[0]
    return {
        "device": arm.device,
        "declaredGbps": arm.declared_gigabits,
        "GBps": round(arm.mean_GBps, 3),
        "p50Milliseconds": round(run.p50_seconds * 1000, 2),
        "dataVerified": run.verified,
        "path": run.path.evidence,
    }


# The order of all steps, and how they are printed.


RACK_PROFILE = "gb200-nvl72"
RACK_COUNT = 2
_SIMULATED_NOTE = (
    "Simulated: switch controllers, API server, kubelets, nvidia-imex. All programs of ours are real."
)
WHOLE_RACK, PART_OF_A_RACK = ("blue", 18), ("green", 6)
"""Two tenants, and how many compute trays each of them takes."""


def run_demo(print_line: Callable[[str], None]) -> DemoReport:
    """Run the demonstration. `print_line` gets the story while it happens."""
    import uvloop

    keep_files_private()

    def show(step: DemoStep) -> None:
        print_line(_step_text(step))

    print_line(f"{RACK_COUNT} racks of {RACK_PROFILE}. {_SIMULATED_NOTE}\n")
    with tempfile.TemporaryDirectory(prefix="rackloom-demo-") as directory:
        return uvloop.run(_run_story(Home(Path(directory)), DemoStory(show)))


async def _run_story(home: Home, story: DemoStory) -> DemoReport:
    async with (
        running_twin(home, port=0, racks=RACK_COUNT, profile=RACK_PROFILE) as whole,
        DemoTenant(whole.site, *WHOLE_RACK) as blue,
        DemoTenant(whole.site, *PART_OF_A_RACK) as green,
    ):
        tenants, job, lost_gpu = DemoTenants(blue, green), RackJob(whole, WHOLE_RACK[0]), LostGpu(whole)
        for name, act in (
            ("two tenants' logical partitions created", tenants.create_partitions),
            ("instances batch-created", tenants.create_instances),
            ("partitions observed in the fabric", tenants.see_partitions),
            ("NVLink domain of every GPU", tenants.see_domains),
            ("whole-rack job placed before it exists", job.place),
            ("whole-rack MPIJob running with its own channel", job.run),
            ("doctor: all layers agree", lost_gpu.check_healthy),
            ("a GPU lost under the job", lost_gpu.lose),
            ("doctor: found, with both sides and the fix", lost_gpu.check_found),
            ("healed, and the doctor agrees", lost_gpu.heal),
            ("job ended, nothing of it left", job.end),
        ):
            await story.step_if_holding(name, act)
        await story.step("claims allocated", allocate_templates)
        await story.step("transfer run", run_transfer)
        await story.step("everything released, fabric empty", tenants.release)
        await whole.nodes.settle()
        return story.report(await lost_gpu.doctor_says())


def _step_text(step: DemoStep) -> str:
    lines = _fact_lines(step.evidence)
    if step.degraded is not None:
        lines.insert(0, f"{DEGRADED}: {step.degraded}")
    facts = "\n".join(f"         {line}" for line in lines)
    return f"{step_mark(step)} {step.name} ({step.seconds:.2f} s)\n{facts}\n"


def _fact_lines(evidence: Evidence) -> list[str]:
    lines = []
    for name, value in evidence.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            lines += [name, *(f"  {key}: {_fact_text(inner)}" for key, inner in value.items())]
        elif name == "results":
            lines.append(f"{name}: {len(value)} RESULT lines, in --json")
        else:
            lines.append(f"{name}: {_fact_text(value)}")
    return lines


def _fact_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(_fact_text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report_summary(report: DemoReport) -> str:
    """The last lines of the story: how much was verified, and which steps showed less than they should."""
    verified = sum(step.ok for step in report.steps)
    seconds = sum(step.seconds for step in report.steps)
    lines = [
        "A site that keeps running, with all of this on it: rackloom up --demo",
        f"{verified} of {len(report.steps)} steps verified by observation in {seconds:.1f} s",
    ]
    less = [f"{step.name}: {step.degraded}" for step in report.steps if step.degraded is not None]
    if less:
        lines[-1] += f"; degraded: {'; '.join(less)}"
    lines.append(f"doctor: {report.doctor}")
    return "\n".join(lines)
