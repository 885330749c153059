"""A record against a baseline: does a node still deliver what it did, and if not, what changed. Pure.

A slower rate has very different owners: whoever placed the pod (misalignment, wrong rail), whoever runs the
hardware (a link that came up at half its rate), whoever shared the host (contention), or nobody yet.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from rackloom.errors import Refused
from rackloom.prove.transfer.comparison import contended, counterpart, rates_of, title, unlike
from rackloom.prove.transfer.expectation import degraded, farther, link_named
from rackloom.prove.transfer.intervals import Ratio, compare_rates
from rackloom.prove.transfer.links import Link
from rackloom.prove.transfer.records import Record
from rackloom.prove.transfer.values import Arm, Host
from rackloom.topology.machine import Machine

TOLERANCE = 0.02
"""A slowdown below this share is no regression however certain it is: emulated pairs repeat within 1%."""
BLIND = 0.25
"""A measurement too noisy to show a loss of this share says nothing: misalignment cost the example 29.5%."""
ENOUGH_RUNS = 3

Outcome = Literal["holds", "regressed", "unknown"]


class Finding(msgspec.Struct, frozen=True):
    """One arm against its baseline."""

    arm: str
    outcome: Outcome
    node: str
    device: str
    ratio: Ratio | None
    """Now over baseline; None where there is nothing to compare."""
    reason: str


def check_baseline(record: Record) -> Record:
    """The record, if it is good enough to judge others by.

    Raises:
        Refused: it is incomplete, unproved, contended, or has too few runs to know its noise.
    """
    problem = next(_flaws(record), None)
    if problem is not None:
        raise Refused(f"this record cannot be a baseline: {problem}", nearest_fix="measure again")
    return record


def judge(record: Record, baseline: Record) -> tuple[Finding, ...]:
    """One finding for each arm of the baseline; an arm that is missing from the record is unknown.

    Raises:
        Refused: the two did not measure the same thing, or not on the same kind of machine.
    """
    difference = unlike(baseline, record) or other_topology(record.machine, baseline.machine)
    if difference:
        raise Refused(
            f"the baseline was measured on another topology or another way: {difference}",
            nearest_fix="keep one baseline for each kind of machine and measurement",
        )
    return tuple(_judge_arm(counterpart(old, record.report.arms), old) for old in baseline.report.arms)


def other_topology(mine: Machine | None, theirs: Machine | None) -> str | None:
    """What tells two machines apart beyond the state of their links, or None. Names do not count."""
    if mine is None or theirs is None:
        return None if mine is theirs else "only one of the two records has a topology"
    for what, a, b in (("GPUs", _gpus(mine), _gpus(theirs)), ("NICs", _nics(mine), _nics(theirs))):
        if a != b:
            return f"{len(a)} and {len(b)} {what}" if len(a) != len(b) else f"{what} in other places"
    return None


def _judge_arm(new: Arm | None, old: Arm) -> Finding:
    if new is None:
        reason = f"was not measured; {'an arm' if old.gpu == 'cpu' else 'a GPU'} of the baseline is missing"
        return Finding(title(old), "unknown", _node(old), _device(old), None, reason)
    ratio = compare_rates(rates_of(old), rates_of(new))
    outcome, reason = _misplaced(new, old) or _slower(new, old, ratio)
    return Finding(title(new), outcome, _node(new), _device(new), ratio, reason)


def _slower(new: Arm, old: Arm, ratio: Ratio) -> tuple[Outcome, str]:
    change = f"{ratio.ratio - 1:+.1%} against the baseline"
    if ratio.interval is None:
        return "unknown", f"{change}; {ENOUGH_RUNS} runs each are needed to know the noise"
    if ratio.interval.high < 1 - TOLERANCE:
        if weather := contended(new):
            return "unknown", f"{change}, but contended: {weather}"
        return "regressed", f"{change}, {_weakened(new, old) or 'nothing that was observed explains it'}"
    if ratio.interval.low < 1 - BLIND:
        return "unknown", f"{change}; the noise hides anything down to {ratio.interval.low - 1:+.0%}"
    return "holds", f"{change}, within noise" if ratio.ratio < 1 - TOLERANCE else change


def _misplaced(new: Arm, old: Arm) -> tuple[Outcome, str] | None:
    """Data, rail and class are proved by observation; no rate is needed to see that they are wrong."""
    run, was = new.runs[0], old.runs[0]
    if not all(one.verified for one in new.runs):
        return "regressed", "the data did not arrive intact"
    wrong = [one for one in new.runs if one.path.verdict == "does not hold"]
    if wrong:
        return "regressed", f"wrong rail: {wrong[0].path.evidence}"
    if farther(run.path_class, was.path_class):
        return "regressed", f"misalignment: {run.path_class} where the baseline was {was.path_class}"
    return None


def _weakened(new: Arm, old: Arm) -> str | None:
    """Why bandwidth could have degraded at either end, if its links show it."""
    shaped, was_shaped = new.declared_gigabits, old.declared_gigabits
    if shaped is not None and was_shaped is not None and shaped < was_shaped:
        return (
            f"degraded link, {new.device} is shaped to {shaped:g} Gb/s where it had {was_shaped:g} (emulated)"
        )
    run, was = new.runs[0].environment, old.runs[0].environment
    ends = ((run.initiator, was.initiator), (run.target, was.target))
    return next((reason for here, before in ends for reason in _weaker(here, before, _device(new))), None)


def _weaker(now: Host, before: Host, device: str) -> Iterator[str]:
    link, was = link_named(now, device), link_named(before, device)
    if link is None:
        return
    if reason := degraded(link):
        yield f"degraded link on {now.hostname}, {reason}"
    if was is not None and (change := _change(link, was)):
        yield f"degraded link on {now.hostname}, {change}"


def _change(link: Link, was: Link) -> str | None:
    if link.gigabits is not None and was.gigabits is not None and link.gigabits < was.gigabits:
        return f"{link.name} came up at {link.gigabits:g} Gb/s where it had {was.gigabits:g}"
    if link.mtu is not None and was.mtu is not None and link.mtu < was.mtu:
        return f"{link.name} has MTU {link.mtu} where it had {was.mtu}"
    return None


def _flaws(record: Record) -> Iterator[str]:
    if record.incomplete is not None:
        yield f"it is incomplete, {record.incomplete}"
    if not record.report.proved:
        yield record.report.verdict
    for arm in record.report.arms:
        if reason := contended(arm):
            yield f"{title(arm)} was contended, {reason}"
        if len(arm.runs) < ENOUGH_RUNS:
            yield f"{title(arm)} has {len(arm.runs)} runs, {ENOUGH_RUNS} are needed to know the noise"


def _node(arm: Arm) -> str:
    run = arm.runs[0].environment
    ends = dict.fromkeys((run.initiator.hostname, run.target.hostname))
    return " to ".join(ends)


def _device(arm: Arm) -> str:
    return arm.device or ", ".join(arm.runs[0].path.carried_by) or "memory"


def _gpus(machine: Machine) -> list[tuple[object, ...]]:
    return [(gpu.pci_address, gpu.product) for gpu in machine.gpus]


def _nics(machine: Machine) -> list[tuple[object, ...]]:
    return [(nic.pci_address, nic.pci_id) for nic in machine.nics]
