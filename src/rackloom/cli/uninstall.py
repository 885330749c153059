"""`rackloom uninstall`: print the plan of a removal from a cluster, or carry it out with --yes.

Tables name a single object, and count several of a kind. JSON and YAML name all of them. If a step takes
more than a second, one line on a terminal shows the objects that it waits for.
"""

import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from rackloom.cli.common import (
    NAMESPACE,
    Flag,
    Kubeconfig,
    KubeContext,
    Output,
    emit,
    shows_progress,
    with_common_flags,
)

if TYPE_CHECKING:
    from rackloom.claim.cluster.uninstall.executor import FinishedStep, UninstallOutcome
    from rackloom.claim.cluster.uninstall.plan import UninstallPlan, UninstallStep


_WIDTH = 100
_MAX_EXAMPLES = 4
"""The number of objects of a stalled step for which the reason is printed."""
_PROGRESS_AFTER = 1.0
"""Seconds after which a terminal shows the objects that a step waits for."""


@with_common_flags
def uninstall(
    *,
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
    namespace: Annotated[str, NAMESPACE] = "rackloom-system",
    helm_release: str | None = None,
    yes: Flag = False,
    timeout: Annotated[float, Parameter(validator=Number(gt=0, lte=86_400))] = 120.0,
    output: Output = "table",
) -> int:
    """Remove an installation of deploy/kubernetes and the objects that it created, as cluster administrator.

    Prints the plan and changes nothing. With --yes it acts, and reports a step as done once the cluster no
    longer has its objects. Objects that pods still use are never removed. They are reported with the command
    that ends the use. Objects of other programs stay, and are listed with the reason. It may be interrupted
    at any point and called again, also after `kubectl delete -k`. Exit code 0 if nothing blocks it, or if all
    is done.

    - `rackloom uninstall` prints the plan, and anything that blocks it
    - `rackloom uninstall --yes` removes it
    - `rackloom uninstall --context lab -o json` prints the plan for another cluster, for a program

    Parameters
    ----------
    namespace
        The driver's namespace. Rackloom's other namespaces are found by their label.
    helm_release
        The Helm release by which it was installed. Objects of other releases stay.
    yes
        Act.
    timeout
        Seconds without progress after which a step is given up.
    """
    from rackloom.app.uninstall import ProgressListener, UninstallTarget, perform_removal, plan_removal

    target = UninstallTarget(
        kubeconfig=kubeconfig, context=context, namespace=namespace, helm_release=helm_release
    )
    progress = _Progress(shows_progress())
    if not yes:
        found = plan_removal(target)
        emit(_plan_value(found), output, lambda: _plan_table(found))
        return 1 if found.blockers else 0

    def done(step: "FinishedStep") -> None:
        progress.clear()
        if output == "table":
            first = f"ok {step.seconds:6.1f} s  {step.phase:<12} "
            print("\n".join(_wrapped(_objects_text(step.objects), first)), flush=True)

    outcome = perform_removal(target, timeout, ProgressListener(done, progress.waiting))
    progress.clear()
    value = {"done": outcome.done, "timed_out": outcome.timed_out, "rest": _plan_value(outcome.rest)}
    emit(value, output, lambda: _outcome_table(outcome))
    return 1 if outcome.rest.steps else 0


class _Progress:
    """One line on a terminal during a long step."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._shown = False

    def waiting(self, step: "UninstallStep", seconds: float) -> None:
        """Show the step that is not done yet."""
        if self._is_terminal and seconds > _PROGRESS_AFTER:
            line = f"{step.phase}: {_objects_text(step.objects)} ({seconds:.0f} s)"
            print(f"\r\x1b[K{line[:100]}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        """Clear the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


def _plan_table(found: "UninstallPlan") -> str:
    from rackloom.claim.cluster.uninstall.plan import PHASE_TITLES

    if not found.steps:
        return "\n".join(["nothing of Rackloom is here to remove", *_left_lines(found)])
    lines = []
    for number, step in enumerate(found.steps, 1):
        lines.append(f"{number:2} {step.phase:<12} {PHASE_TITLES[step.phase]}")
        lines += _wrapped(_objects_text(step.objects), " " * 16)
    ending = _blocked_lines(found) or ["", "nothing blocks it: rackloom uninstall --yes does it"]
    return "\n".join([*lines, *ending, *_left_lines(found)])


def _outcome_table(outcome: "UninstallOutcome") -> str:
    rest = outcome.rest
    if not rest.steps:
        end = "what was to be removed is gone" if rest.left else "nothing of Rackloom is left"
        return "\n".join([end, *_left_lines(rest)])
    step = rest.steps[0]
    first = "stands still" if outcome.timed_out else "held"
    lines = _wrapped(_objects_text(step.objects), f"{first:<12} {step.phase:<12} ")
    lines += [f"  {what} is still there: {why}" for what, why in list(step.waits.items())[:_MAX_EXAMPLES]]
    later = ", ".join(each.phase for each in rest.steps[1:])
    lines += [f"not begun: {later}"] if later else []
    return "\n".join([*lines, *_blocked_lines(rest), *_left_lines(rest)])


def _blocked_lines(found: "UninstallPlan") -> list[str]:
    lines = [""] if found.blockers else []
    for blocker in found.blockers:
        lines.append(f"blocked: {blocker.what} {blocker.why}")
        lines.append(f"  fix: {blocker.fix}")
    return lines


def _left_lines(found: "UninstallPlan") -> list[str]:
    lines = ["", "stays:"] if found.left else []
    for left in found.left:
        lines.append(f"  {left.what}: {left.why}")
        lines += [f"    {left.fix}"] if left.fix else []
    return lines


def _objects_text(objects: tuple[str, ...]) -> str:
    """A single object by name, several of a kind by number. JSON and YAML name them all."""
    kinds = Counter(name.partition(" ")[0] for name in objects)
    alone = {name.partition(" ")[0]: name for name in objects}
    return ", ".join(alone[kind] if count == 1 else f"{kind} ({count})" for kind, count in kinds.items())


def _wrapped(text: str, first: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plan_value(found: "UninstallPlan") -> dict[str, Any]:
    from rackloom.claim.cluster.uninstall.plan import PHASE_TITLES

    steps = [
        {
            "phase": step.phase,
            "what": PHASE_TITLES[step.phase],
            "objects": step.objects,
            "waits": step.waits,
            "blockers": step.blockers,
        }
        for step in found.steps
    ]
    return {"blocked": bool(found.blockers), "steps": steps, "left": found.left}
