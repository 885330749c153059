"""`rackloom admin plan`, `apply`, `domain` and `tray`: what will be done to a rack, and when it may be."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin_client import HERE, At, Domain, MachineId, Printed, Reason, as_dict, connect, order
from rackloom.cli.output import columns, emit
from rackloom.errors import Refused, why

domain = App(name="domain", help="NVLink domains.")
tray = App(name="tray", help="Trays under maintenance.")


def plan(
    domain: Domain,
    *,
    to: Annotated[
        Path | None, Parameter(help="Also write the plan into this file, for `rackloom admin apply`.")
    ] = None,
    at: At = HERE,
    output: Printed = "table",
) -> None:
    """Show what would be done to a domain now; nothing is done."""
    with connect(at) as site:
        text = site.operator("MakePlan", ours.PlanRequest(domain=domain)).plan
    if to is not None:
        try:
            to.write_text(text + "\n")
        except OSError as error:
            raise Refused(f"cannot write {to}: {error.strerror}") from error
    emit(msgspec.json.decode(text), output, lambda: _plan_table(msgspec.json.decode(text)))


def apply(
    file: Annotated[Path, Parameter(help="What `rackloom admin plan --to` wrote.")],
    *,
    at: At = HERE,
    output: Printed = "table",
) -> int:
    """Carry out a plan. Refused when fabric or intent are no longer as the plan found them."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"{file} cannot be read: {why(error)}",
            nearest_fix="write one with: rackloom admin plan --to FILE",
        ) from error
    with connect(at) as site:
        outcomes = site.operator("ApplyPlan", ours.ApplyRequest(plan=text)).outcomes
    rows = [(one.kind, one.partition_name, one.state, one.message) for one in outcomes]
    heads = ("OPERATION", "PARTITION", "RESULT", "MESSAGE")
    emit([as_dict(one) for one in outcomes], output, lambda: columns(heads, rows))
    return 0 if all(one.state == "done" for one in outcomes) else 1


@domain.command(name="show")
def domain_show(
    domain: Annotated[str | None, Parameter(help="Only this one.")] = None,
    *,
    at: At = HERE,
    output: Printed = "table",
) -> None:
    """Show what is known of domains, and which GPUs something stands in the way of."""
    with connect(at) as site:
        found = site.operator("ShowDomains", ours.DomainsRequest(domain=domain or "")).domains
    emit([as_dict(one) for one in found], output, lambda: _domains_table(found))


@domain.command(name="pause")
def domain_pause(domain: Domain, *, reason: Reason, at: At = HERE) -> None:
    """Do nothing to a domain until it is resumed; it is observed as ever."""
    order(at, "PauseDomain", ours.DomainRequest(domain=domain, reason=reason))


@domain.command(name="resume")
def domain_resume(domain: Domain, *, reason: Reason = "", at: At = HERE) -> None:
    """Work on a domain again."""
    order(at, "ResumeDomain", ours.DomainRequest(domain=domain, reason=reason))


@tray.command(name="cordon")
def tray_cordon(machine_id: MachineId, *, reason: Reason, at: At = HERE) -> None:
    """Place nothing new on a tray; what runs there stays."""
    order(at, "CordonTray", ours.TrayRequest(machine_id=machine_id, reason=reason))


@tray.command(name="uncordon")
def tray_uncordon(machine_id: MachineId, *, reason: Reason = "", at: At = HERE) -> None:
    """Use a tray again, and join the GPUs of its instance again if it was drained."""
    order(at, "UncordonTray", ours.TrayRequest(machine_id=machine_id, reason=reason))


@tray.command(name="drain")
def tray_drain(machine_id: MachineId, *, reason: Reason, at: At = HERE) -> None:
    """Take the GPUs of a tray out of all partitions. Its instance stays and is not Ready meanwhile."""
    order(at, "DrainTray", ours.TrayRequest(machine_id=machine_id, reason=reason))


def _plan_table(plan: dict[str, Any]) -> str:
    observed = plan["observation"]
    lines = [f"domain {observed['domain']}, as observed at {_moment(observed['observed_at'])}"]
    rows = [(one["type"], one["name"], _gpus(one.get("guids", ()))) for one in plan["operations"]]
    lines.append(columns(("OPERATION", "PARTITION", "GPUS"), rows) if rows else "nothing to do")
    lines += [f"blocked: GPUs {_gpus(one['guids'])}: {one['reason']}" for one in plan["blocked"]]
    return "\n".join(lines)


def _domains_table(found: Sequence[Any]) -> str:
    rows = [
        (
            one.domain,
            _moment(one.observed_at.seconds) if one.HasField("observed_at") else one.doubt,
            one.pause_reason if one.HasField("pause_reason") else "-",
            str(len(one.blocked)),
        )
        for one in found
    ]
    table = columns(("DOMAIN", "OBSERVED", "PAUSED", "BLOCKED"), rows)
    return "\n".join((table, *(_blocked(gpu) for one in found for gpu in one.blocked)))


def _blocked(gpu: Any) -> str:
    fix = f"; fix: {gpu.fix}" if gpu.HasField("fix") else ""
    return f"blocked: GPU {gpu.guid:#x} since {_moment(gpu.since.seconds)}: {gpu.reason}{fix}"


def _gpus(guids: Sequence[int]) -> str:
    return " ".join(f"{guid:#x}" for guid in guids) or "-"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
