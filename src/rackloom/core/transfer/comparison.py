"""Two transfer records side by side, and a record judged against a baseline.

Records can be compared only if they measured the same thing: operation, sizes, iterations, both emulated
or neither. Arms are matched by name, or else by GPU, because a GPU may have been given another NIC.
`statistics.compare_rates` decides whether the rates differ beyond noise.

`check_baseline` refuses a baseline that is incomplete, unproved, contended or has fewer than three runs
per arm. `judge_record` then decides for each arm of the baseline, in this order: data not intact, wrong
rail, or a farther path class is a regression at any rate. A slowdown is a regression if its whole interval
is beyond 2%, but unknown if the run was contended. Noise that could hide a loss of 25% makes the arm
unknown. Otherwise it holds. A regression names its likely cause: placement, a degraded link (not up,
below its own PCIe capability, or with a lower rate or MTU than at the baseline), or nothing that was
observed. A baseline of another topology is refused.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from rackloom.core.transfer.proof import degraded_reason, is_farther, link_named
from rackloom.core.transfer.records import TransferRecord
from rackloom.core.transfer.statistics import Ratio, compare_rates
from rackloom.core.transfer.values import Arm, HostFacts, Link
from rackloom.errors import Refused
from rackloom.topology.machine import Machine

# Comparison of two records.


TEST_DESCRIPTION = (
    "Welch's t-test on the logarithms of the mean rates of the runs, two-sided, 95%. It assumes independent "
    "runs whose logarithms are roughly normal; the variances may differ. p is that of the exact Mann-Whitney "
    "test, which assumes no distribution but needs four runs on each side to fall below 0.05."
)


def contention_of_arm(arm: Arm) -> str | None:
    """The first reason to distrust the rates of an arm, or None."""
    return next((run.environment.contention for run in arm.runs if run.environment.contention), None)


class ArmComparison(msgspec.Struct, frozen=True):
    """One arm that both records have."""

    name: str
    before_GBps: float  # noqa: N815
    after_GBps: float  # noqa: N815
    ratio: Ratio
    contended: str | None
    """The first reason on either side to distrust the rates, or None."""

    @property
    def sentence(self) -> str:
        """The difference in words."""
        if self.ratio.interval is None:
            return "cannot be told: a single run has no known noise"
        low, high = self.ratio.interval.low, self.ratio.interval.high
        verdict = "differs" if self.ratio.differs else "no difference beyond noise"
        suspect = f"; NOT reliable, {self.contended}" if self.contended else ""
        return f"{verdict} (x{self.ratio.ratio:.3f}, 95% {low:.3f} to {high:.3f}){suspect}"


def compare_records(before: TransferRecord, after: TransferRecord) -> tuple[ArmComparison, ...]:
    """The arms of A and B by name. Arms alone and arms together are compared separately.

    Raises:
        Refused: they did not measure the same thing, or have no arm in common.
    """
    if reason := record_difference(before, after):
        raise Refused(
            f"the two records cannot be compared: {reason}", nearest_fix="measure both the same way"
        )
    pairs = [(arm, matching_arm(arm, after.report.arms)) for arm in before.report.arms]
    compared = tuple(
        ArmComparison(
            arm_title(new),
            old.mean_GBps,
            new.mean_GBps,
            compare_rates(run_rates(old), run_rates(new)),
            contention_of_arm(old) or contention_of_arm(new),
        )
        for old, new in pairs
        if new is not None
    )
    if not compared:
        names = " and ".join(", ".join(arm.name for arm in record.report.arms) for record in (before, after))
        raise Refused(
            f"the two records have no arm in common: {names}", nearest_fix="measure the same pairs again"
        )
    return compared


def matching_arm(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """The arm of the same name, or else the only one of the same GPU, which may now have another NIC."""
    candidates = [known for known in arms if known.together == arm.together]
    named = [known for known in candidates if known.name == arm.name]
    same_gpu = [known for known in candidates if known.gpu == arm.gpu != "cpu"]
    if named:
        return named[0]
    return same_gpu[0] if len(same_gpu) == 1 else None


def arm_title(arm: Arm) -> str:
    """The name of an arm in tables and messages."""
    notes = (("all at once", arm.together), ("emulated", any(run.emulated for run in arm.runs)))
    return ", ".join([arm.name, *(note for note, holds in notes if holds)])


def run_rates(arm: Arm) -> list[float]:
    """GB/s of each run."""
    return [run.avg_GBps for run in arm.runs]


def record_difference(before: TransferRecord, after: TransferRecord) -> str | None:
    """Why the rates of two records cannot be compared, or None."""
    for field in ("op", "block_size", "batch_size", "iters"):
        a, b = getattr(before.spec, field), getattr(after.spec, field)
        if a != b:
            return f"{field.replace('_', ' ')} {a} against {b}"
    if before.report.emulated != after.report.emulated:
        return "one is emulated and the other is not"
    return None


# Gate: a record against a baseline.


TOLERANCE = 0.02
"""A slowdown below this share is no regression however certain it is: emulated pairs repeat within 1%."""
HIDDEN_LOSS = 0.25
"""Noise that could hide a loss of this share proves nothing: misalignment cost the example 29.5%."""
ENOUGH_RUNS = 3

BaselineOutcome = Literal["holds", "regressed", "unknown"]


class BaselineFinding(msgspec.Struct, frozen=True):
    """One arm against its baseline."""

    arm: str
    outcome: BaselineOutcome
    node: str
    device: str
    ratio: Ratio | None
    """Now / baseline, or None if there is nothing to compare."""
    reason: str


def check_baseline(record: TransferRecord) -> TransferRecord:
    """The record, if it is good enough to judge others by.

    Raises:
        Refused: it is incomplete, unproved, contended, or has too few runs to know its noise.
    """
    problem = next(_baseline_flaws(record), None)
    if problem is not None:
        raise Refused(f"this record cannot be a baseline: {problem}", nearest_fix="measure again")
    return record


def judge_record(record: TransferRecord, baseline: TransferRecord) -> tuple[BaselineFinding, ...]:
    """One finding for each arm of the baseline. An arm that is missing from the record is unknown.

    Raises:
        Refused: the two did not measure the same thing, or not on the same kind of machine.
    """
    difference = record_difference(baseline, record) or topology_difference(record.machine, baseline.machine)
    if difference:
        raise Refused(
            f"the baseline was measured on another topology or another way: {difference}",
            nearest_fix="keep one baseline for each kind of machine and measurement",
        )
    return tuple(_judge_arm(matching_arm(old, record.report.arms), old) for old in baseline.report.arms)


def topology_difference(mine: Machine | None, theirs: Machine | None) -> str | None:
    """How two machines differ beyond the state of their links, or None. Names do not count."""
    if mine is None or theirs is None:
        return None if mine is theirs else "only one of the two records has a topology"
    gpus = [[(gpu.pci_address, gpu.product) for gpu in machine.gpus] for machine in (mine, theirs)]
    nics = [[(nic.pci_address, nic.pci_id) for nic in machine.nics] for machine in (mine, theirs)]
    for what, (a, b) in (("GPUs", gpus), ("NICs", nics)):
        if a != b:
            return f"{len(a)} and {len(b)} {what}" if len(a) != len(b) else f"{what} in other places"
    return None


def _judge_arm(new: Arm | None, old: Arm) -> BaselineFinding:
    if new is None:
        reason = f"was not measured; {'an arm' if old.gpu == 'cpu' else 'a GPU'} of the baseline is missing"
        return _baseline_finding(old, "unknown", None, reason)
    ratio = compare_rates(run_rates(old), run_rates(new))
    outcome, reason = _judge_path(new, old) or _judge_rate(new, old, ratio)
    return _baseline_finding(new, outcome, ratio, reason)


def _baseline_finding(
    arm: Arm, outcome: BaselineOutcome, ratio: Ratio | None, reason: str
) -> BaselineFinding:
    run = arm.runs[0].environment
    nodes = " to ".join(dict.fromkeys((run.initiator.hostname, run.target.hostname)))
    return BaselineFinding(arm_title(arm), outcome, nodes, _device_of_arm(arm), ratio, reason)


def _judge_rate(new: Arm, old: Arm, ratio: Ratio) -> tuple[BaselineOutcome, str]:
    change = f"{ratio.ratio - 1:+.1%} against the baseline"
    if ratio.interval is None:
        return "unknown", f"{change}; {ENOUGH_RUNS} runs each are needed to know the noise"
    if ratio.interval.high < 1 - TOLERANCE:
        if contention := contention_of_arm(new):
            return "unknown", f"{change}, but contended: {contention}"
        return "regressed", f"{change}, {_degradation(new, old) or 'nothing that was observed explains it'}"
    if ratio.interval.low < 1 - HIDDEN_LOSS:
        return "unknown", f"{change}; the noise hides anything down to {ratio.interval.low - 1:+.0%}"
    return "holds", f"{change}, within noise" if ratio.ratio < 1 - TOLERANCE else change


def _judge_path(new: Arm, old: Arm) -> tuple[BaselineOutcome, str] | None:
    """A regression that is proved at any rate: wrong data, wrong rail, or a farther path class."""
    if not all(run.verified for run in new.runs):
        return "regressed", "the data did not arrive intact"
    wrong = [run.path.evidence for run in new.runs if run.path.verdict == "does not hold"]
    if wrong:
        return "regressed", f"wrong rail: {wrong[0]}"
    now, was = new.runs[0].path_class, old.runs[0].path_class
    if is_farther(now, was):
        return "regressed", f"misalignment: {now} where the baseline was {was}"
    return None


def _degradation(new: Arm, old: Arm) -> str | None:
    """Why bandwidth could have degraded at either end, if its links show it."""
    shaped, was_shaped = new.declared_gigabits, old.declared_gigabits
    if shaped is not None and was_shaped is not None and shaped < was_shaped:
        return (
            f"degraded link, {new.device} is shaped to {shaped:g} Gb/s where it had {was_shaped:g} (emulated)"
        )
    run, was = new.runs[0].environment, old.runs[0].environment
    ends = ((run.initiator, was.initiator), (run.target, was.target))
    device = _device_of_arm(new)
    return next((reason for now, before in ends for reason in _link_degradations(now, before, device)), None)


def _link_degradations(now: HostFacts, before: HostFacts, device: str) -> Iterator[str]:
    link, was = link_named(now, device), link_named(before, device)
    if link is None:
        return
    if reason := degraded_reason(link):
        yield f"degraded link on {now.hostname}, {reason}"
    if was is not None and (change := _link_change(link, was)):
        yield f"degraded link on {now.hostname}, {change}"


def _link_change(link: Link, was: Link) -> str | None:
    if link.gigabits is not None and was.gigabits is not None and link.gigabits < was.gigabits:
        return f"{link.name} came up at {link.gigabits:g} Gb/s where it had {was.gigabits:g}"
    if link.mtu is not None and was.mtu is not None and link.mtu < was.mtu:
        return f"{link.name} has MTU {link.mtu} where it had {was.mtu}"
    return None


def _baseline_flaws(record: TransferRecord) -> Iterator[str]:
    if record.incomplete is not None:
        yield f"it is incomplete, {record.incomplete}"
    if not record.report.proved:
        yield record.report.verdict
    for arm in record.report.arms:
        if reason := contention_of_arm(arm):
            yield f"{arm_title(arm)} was contended, {reason}"
        if len(arm.runs) < ENOUGH_RUNS:
            yield f"{arm_title(arm)} has {len(arm.runs)} runs, {ENOUGH_RUNS} are needed to know the noise"


def _device_of_arm(arm: Arm) -> str:
    return arm.device or ", ".join(arm.runs[0].path.carried_by) or "memory"
