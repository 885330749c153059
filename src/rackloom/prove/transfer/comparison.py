"""Two records side by side, arm by arm. Pure."""

from collections.abc import Iterator, Sequence

import msgspec

from rackloom.errors import Refused
from rackloom.prove.transfer.intervals import Ratio, compare_rates
from rackloom.prove.transfer.records import Record
from rackloom.prove.transfer.values import Arm

TEST = (
    "Welch's t-test on the logarithms of the mean rates of the runs, two-sided, 95%. It assumes independent "
    "runs whose logarithms are roughly normal; the variances may differ. p is that of the exact Mann-Whitney "
    "test, which assumes no distribution but needs four runs on each side to fall below 0.05."
)


class Compared(msgspec.Struct, frozen=True):
    """One arm that both records have."""

    name: str
    before_GBps: float  # noqa: N815
    after_GBps: float  # noqa: N815
    ratio: Ratio
    contended: str | None
    """The first reason on either side to distrust the rates, or None."""

    @property
    def sentence(self) -> str:
        """What can be said of the difference."""
        if self.ratio.interval is None:
            return "cannot be told: a single run has no known noise"
        low, high = self.ratio.interval.low, self.ratio.interval.high
        verdict = "differs" if self.ratio.differs else "no difference beyond noise"
        suspect = f"; NOT reliable, {self.contended}" if self.contended else ""
        return f"{verdict} (x{self.ratio.ratio:.3f}, 95% {low:.3f} to {high:.3f}){suspect}"


def compare_records(before: Record, after: Record) -> tuple[Compared, ...]:
    """The arms of A and B by name, alone and together apart.

    Raises:
        Refused: they did not measure the same thing, or have no arm in common.
    """
    if reason := unlike(before, after):
        raise Refused(
            f"the two records cannot be compared: {reason}", nearest_fix="measure both the same way"
        )
    pairs = [(arm, counterpart(arm, after.report.arms)) for arm in before.report.arms]
    compared = tuple(_compare(old, new) for old, new in pairs if new is not None)
    if not compared:
        names = " and ".join(", ".join(arm.name for arm in one.report.arms) for one in (before, after))
        raise Refused(
            f"the two records have no arm in common: {names}", nearest_fix="measure the same pairs again"
        )
    return compared


def counterpart(arm: Arm, others: Sequence[Arm]) -> Arm | None:
    """The arm of the same name; else the only one of the same GPU, which may have been given another NIC."""
    candidates = [other for other in others if other.together == arm.together]
    named = [other for other in candidates if other.name == arm.name]
    same_gpu = [other for other in candidates if other.gpu == arm.gpu != "cpu"]
    if named:
        return named[0]
    return same_gpu[0] if len(same_gpu) == 1 else None


def title(arm: Arm) -> str:
    """How an arm is called in front of people."""
    notes = (("all at once", arm.together), ("emulated", any(run.emulated for run in arm.runs)))
    return ", ".join([arm.name, *(note for note, holds in notes if holds)])


def rates_of(arm: Arm) -> list[float]:
    """GB/s of each run."""
    return [run.avg_GBps for run in arm.runs]


def contended(arm: Arm) -> str | None:
    """The first reason to distrust the rates of an arm, or None."""
    return next((run.environment.contention for run in arm.runs if run.environment.contention), None)


def unlike(before: Record, after: Record) -> str | None:
    """Why the rates of two records say nothing about each other, or None."""
    return next(_differences(before, after), None)


def _differences(before: Record, after: Record) -> Iterator[str]:
    for field in ("op", "block_size", "batch_size", "iters"):
        a, b = getattr(before.spec, field), getattr(after.spec, field)
        if a != b:
            yield f"{field.replace('_', ' ')} {a} against {b}"
    if before.report.emulated != after.report.emulated:
        yield "one is emulated and the other is not"


def _compare(before: Arm, after: Arm) -> Compared:
    return Compared(
        title(after),
        before.mean_GBps,
        after.mean_GBps,
        compare_rates(rates_of(before), rates_of(after)),
        contended(before) or contended(after),
    )
