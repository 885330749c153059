"""`rackloom admin import nico plan|apply|rollback`: takeover of a site that NICo has run.

`plan` reads NICo over REST, also over its admin gRPC if one is given, and our site over the admin
interface. It writes a plan into a file that only its owner may read, prints it, and changes nothing. `apply`
sends the steps to the site one by one. It can be repeated after any interruption. `rollback` undoes the steps
in reverse order. Neither changes a partition. If the site would change the fabric afterwards, the domain
stays paused and the exit code is 1.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.takeover.nico_rest import NicoClient, NicoReader, read_nico
from rackloom.cli.admin import (
    HERE,
    Connection,
    Place,
    RpcCaller,
    admin_command,
    connect,
    id_pages,
)
from rackloom.cli.common import (
    FILE,
    Format,
    beside_progress,
    columns,
    emit,
    progress,
    read_text,
    with_progress,
)
from rackloom.core.takeover.planner import plan_takeover
from rackloom.core.takeover.records import (
    PLAN_VERSION,
    AdoptPartition,
    CreateInstance,
    NicoFabricPartition,
    NicoMachine,
    NicoReading,
    PauseDomain,
    SettleDomain,
    SiteReading,
    Step,
    StepState,
    TakeoverPlan,
    is_sealed,
    kind_of_step,
    subject_of_step,
)
from rackloom.core.takeover.rollback import imported_steps, rollback_obstacles
from rackloom.errors import Misuse, Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json

OWNER_ONLY = 0o600
SHOWN_LENGTH = 80
"""Enough for two uuids: a domain, and the logical partition in the name of its partition."""

app = App(name="import", help="Take over what another control plane has run.")
nico = App(name="nico", help="Take over from NVIDIA Infra Controller (NICo).")
app.command(nico)


PlanFile = Annotated[Path, FILE, Parameter(help="A file of `rackloom admin import nico plan --out`.")]


@nico.command(name="plan")
@admin_command
def plan(
    *,
    url: Annotated[str, Parameter(help="https://HOST[:PORT] of NICo's REST.")],
    org: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", help="Organisation to take over; NAME=FILE for a token of its own. Repeat it."
        ),
    ],
    out: Annotated[Path, Parameter(help="The plan is written here.")],
    token_file: Annotated[Path | None, Parameter(help="File with a token for every organisation.")] = None,
    provider_org: Annotated[
        str | None, Parameter(help="Provider, as NAME or NAME=FILE: its machines are read too.")
    ] = None,
    nico_site: Annotated[
        str | None, Parameter(help="Name or id of NICo's site, where it has several.")
    ] = None,
    nico_ca: Annotated[Path | None, Parameter(help="Certificate authority of NICo's REST (PEM).")] = None,
    api_name: Annotated[str, Parameter(help="Last segment of NICo's base path.")] = "nico",
    nico_admin: Annotated[
        str | None, Parameter(help="HOST:PORT of NICo's admin gRPC; its records are read too.")
    ] = None,
    nico_admin_ca: Annotated[Path | None, Parameter(help="Its certificate authority (PEM).")] = None,
    nico_admin_cert: Annotated[Path | None, Parameter(help="Our certificate for it (PEM).")] = None,
    nico_admin_key: Annotated[Path | None, Parameter(help="Key of our certificate for it (PEM).")] = None,
    at: Place = HERE,
) -> None:
    """Read NICo and our site, and write an import plan. Nothing is changed."""
    tenants = [_reader(entry, token_file) for entry in org]
    if not tenants or len({reader.org for reader in tenants}) < len(tenants):
        raise Misuse("each organisation is to be named once", nearest_fix="give --org NAME for each")
    provider = None if provider_org is None else _reader(provider_org, token_file)
    admin = None
    if nico_admin is not None:
        admin = Connection(nico_admin, nico_admin_ca, nico_admin_cert, nico_admin_key)
        if None in (admin.ca, admin.cert, admin.key):
            fix = "give --nico-admin-ca, --nico-admin-cert and --nico-admin-key"
            raise Misuse("NICo's admin gRPC needs an authority, our certificate and its key", nearest_fix=fix)
    with progress("answers of NICo read") as step:
        client = NicoClient(url, api_name=api_name, ca=nico_ca, answered=step)
        try:
            reading = read_nico(client, tenants, provider=provider, site=nico_site)
        finally:
            client.close()
        if admin is not None:
            with connect(admin) as call_rpc:
                reading = _with_admin_records(reading, call_rpc)
    with progress("reading our site"), connect(at) as call_rpc:
        made = plan_takeover(reading, _read_site(call_rpc))
    _write_plan(out, made)
    emit(made, at.output, lambda: _plan_text(made))


@nico.command(name="apply")
@admin_command
def apply(file: PlanFile, *, at: Place = HERE) -> int:
    """Create the records of a plan and adopt its partitions. The fabric is not touched. Safe to repeat."""
    made = _read_plan(file)
    with connect(at) as call_rpc:
        _check_site(made, _read_site(call_rpc))
        return _run_steps(call_rpc, made, made.steps, undo=False, output=at.output)


@nico.command(name="rollback")
@admin_command
def rollback(file: PlanFile, *, at: Place = HERE) -> int:
    """Remove the records that `apply` created, and give up the partitions. The fabric is not touched."""
    made = _read_plan(file)
    with connect(at) as call_rpc:
        site = _read_site(call_rpc)
        _check_site(made, site)
        if obstacles := rollback_obstacles(made, site):
            raise Refused(f"nothing was removed: {'; '.join(obstacles)}", nearest_fix="remove these first")
        pauses = [step for step in made.steps if isinstance(step, PauseDomain)]
        ends = [step for step in made.steps if isinstance(step, SettleDomain)]
        steps = [*pauses, *reversed(imported_steps(made, site)), *ends]
        return _run_steps(call_rpc, made, steps, undo=True, output=at.output)


# Readings.


def _reader(entry: str, common: Path | None) -> NicoReader:
    name, _, own = entry.partition("=")
    file = Path(own) if own else common
    if file is None:
        raise Misuse(f"organisation {name} has no token", nearest_fix="give --token-file, or --org NAME=FILE")
    token = read_text(file, "write the token into it").strip()
    if not token or not token.isascii() or any(letter.isspace() for letter in token):
        raise Refused(f"{file} holds no token", nearest_fix="write the token alone into it")
    # NICo compares organisations in lower case.
    return NicoReader(name.lower(), token)


def _with_admin_records(reading: NicoReading, call_rpc: RpcCaller) -> NicoReading:
    """Add the places of machines and the physical partitions in NICo's records to a reading."""
    ids = call_rpc("FindMachineIds", pb.MachineSearchConfig()).machine_ids
    requests = [pb.MachinesByIdsRequest(machine_ids=page) for page in id_pages(ids)]
    places = [found for request in requests for found in call_rpc("FindMachinesByIds", request).machines]
    known = {machine.id: machine for machine in reading.machines}
    for found in places:
        info = found.nvlink_info
        if info.chassis_serial and info.gpus:
            before = known.get(found.id.id, NicoMachine(id=found.id.id))
            known[before.id] = msgspec.structs.replace(
                before, chassis_serial=info.chassis_serial, slot=info.gpus[0].slot_id
            )
    ids = call_rpc("FindNVLinkPartitionIds", pb.NVLinkPartitionSearchFilter()).partition_ids
    pages = [pb.NVLinkPartitionsByIdsRequest(partition_ids=page) for page in id_pages(ids)]
    fabric = tuple(
        NicoFabricPartition(
            domain=found.domain_uuid.value,
            number=found.nmx_m_id,
            logical_partition=found.logical_partition_id.value,
        )
        for page in pages
        for found in call_rpc("FindNVLinkPartitionsByIds", page).partitions
        if found.logical_partition_id.value
    )
    return msgspec.structs.replace(reading, machines=tuple(known.values()), fabric=fabric)


def _read_site(call_rpc: RpcCaller) -> SiteReading:
    reply = call_rpc("ShowTakeoverSite", ours.TakeoverSiteRequest())
    return decode_json(reply.reading, "the site", SiteReading)


# Plan files.


def _write_plan(file: Path, made: TakeoverPlan) -> None:
    """Write a new file that only its owner may read: user data of instances may contain tenants' secrets.

    An older plan is not overwritten, because a rollback needs it.
    """
    text = msgspec.json.format(msgspec.json.encode(made), indent=2)
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        with os.fdopen(handle, "wb") as stream:
            stream.write(text + b"\n")
    except FileExistsError:
        raise Refused(
            f"{file} is there already, and a rollback may need it", nearest_fix="give --out another name"
        ) from None
    except OSError as error:
        raise Refused(f"cannot write {file}: {error.strerror}") from error


def _read_plan(file: Path) -> TakeoverPlan:
    fix = "write one with: rackloom admin import nico plan --out FILE"
    try:
        made = decode_json(read_text(file, fix), str(file), TakeoverPlan)
    except Undecodable as error:
        raise Refused(f"{file} is not a plan of a takeover: {error.reason}", nearest_fix=fix) from None
    if made.version != PLAN_VERSION or not is_sealed(made):
        raise Refused(f"{file} was changed after it was written, or by another version", nearest_fix=fix)
    return made


def _check_site(made: TakeoverPlan, site: SiteReading) -> None:
    if made.site.id != site.id:
        raise Refused(f"the plan is for site {made.site.name!r}, and this is {site.name!r}")


# Steps.


def _run_steps(
    call_rpc: RpcCaller, made: TakeoverPlan, steps: Sequence[Step], *, undo: bool, output: Format
) -> int:
    """Run steps one by one, print the outcome of each, and return the exit code."""
    reason = f"takeover from NICo, plan {made.digest[:12]}"
    outcomes: list[dict[str, str]] = []
    try:
        for step in with_progress(steps, "steps done"):
            text = msgspec.json.encode(step).decode()
            reply = call_rpc("RunTakeoverStep", ours.TakeoverStepRequest(step=text, undo=undo, reason=reason))
            kind, subject = _step_words(step)
            outcomes.append(
                {"step": kind, "subject": subject, "state": reply.state, "message": reply.message}
            )
            if output == "table":
                with beside_progress():
                    print("  ".join(_short(part) for part in outcomes[-1].values() if part), flush=True)
    finally:
        # Also print the steps that were done before a failure.
        if output != "table":
            emit(outcomes, output, str)
    return 1 if any(outcome["state"] == StepState.KEPT for outcome in outcomes) else 0


def _step_words(step: Step) -> tuple[str, str]:
    if isinstance(step, PauseDomain | SettleDomain):
        return kind_of_step(step), step.domain
    return kind_of_step(step), subject_of_step(step).partition("/")[2]


def _plan_text(made: TakeoverPlan) -> str:
    words = [_step_words(step) for step in made.steps]
    rows = [
        (kind, _short(subject), _step_detail(step))
        for (kind, subject), step in zip(words, made.steps, strict=True)
    ]
    lines = [
        f"site {made.nico_site.name} of NICo into {made.site.name}, organisations {', '.join(made.orgs)}",
        columns(("STEP", "ID", "DETAIL"), rows) if rows else "nothing to do",
        f"{len(made.present)} records are here already",
    ]
    lines += [f"left as it is: {left.kind} {_short(left.name)}: {left.reason}" for left in made.left_alone]
    lines += [f"note: {note}" for note in made.notes]
    return "\n".join(lines)


def _short(name: str) -> str:
    """Shorten a name for display: NICo's partition names list the GUIDs of all members."""
    return name if len(name) <= SHOWN_LENGTH or " " in name else f"{name[:SHOWN_LENGTH]}..."


def _step_detail(step: Step) -> str:
    match step:
        case CreateInstance():
            return f"{step.org}/{step.name} on {step.machine}, {len(step.interfaces)} GPUs"
        case AdoptPartition():
            return f"{len(step.guids)} GPUs, equal to those of logical partition {step.logical_partition}"
        case PauseDomain() | SettleDomain():
            return ""
    fields: dict[str, Any] = msgspec.structs.asdict(step)
    owner = "/".join(str(fields[key]) for key in ("org", "name") if key in fields)
    return owner or str(fields.get("type_id") or fields.get("why") or "")
