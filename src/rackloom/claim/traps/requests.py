"""Traps of one request: its class, its selectors, and what they let through."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.objects import DeviceRequest, DeviceSubRequest, ExactDeviceRequest
from rackloom.claim.allocate.slices import NIC_DRIVER
from rackloom.claim.templates import published
from rackloom.claim.templates.selectors import told_by_names, told_by_traits
from rackloom.claim.traps.evidence import Evidence
from rackloom.claim.traps.finding import FieldPath, Finding, Trap
from rackloom.claim.traps.selectors import selector_traps

Ask = ExactDeviceRequest | DeviceSubRequest


def asks_of(request: DeviceRequest) -> Iterator[tuple[Ask, tuple[str | int, ...]]]:
    """What a request asks for, or its alternatives, each with its place in the request."""
    if request.exactly is not None:
        yield request.exactly, ("exactly",)
    for number, one in enumerate(request.first_available):
        yield one, ("firstAvailable", number)


def request_traps(ask: Ask, evidence: Evidence, path: FieldPath) -> Iterator[Finding]:
    """Traps of what is asked for at `path`."""
    name = ask.device_class_name
    if name not in evidence.classes:
        near = get_close_matches(name, evidence.classes, n=1, cutoff=0.4)
        fix = f"use {near[0]}, or add the DeviceClass" if near else "add the DeviceClass"
        why = f"there is no DeviceClass {name!r}"
        yield Finding(trap=Trap.UNKNOWN_CLASS, path=(*path, "deviceClassName"), why=why, fix=fix)
        return
    met = evidence.of_class(name)
    clean = True
    for number, one in enumerate(ask.selectors):
        place = (*path, "selectors", number, "cel", "expression")
        found = list(selector_traps(one.cel.expression if one.cel else "", met, evidence, place))
        yield from found
        clean = clean and not found
        met = evidence.passing(met, [one])
    if evidence.given:
        yield from _too_many(ask, met, evidence, path) if clean else ()
        yield from _idle_nics(ask, met, evidence, path)


def _too_many(ask: Ask, met: Sequence[Candidate], evidence: Evidence, path: FieldPath) -> Iterator[Finding]:
    matching = {one.id for one in met}
    most = max((sum(one.id in matching for one in kind.devices) for kind in evidence.stock.kinds), default=0)
    if ask.allocation_mode == "ExactCount" and ask.count > most:
        why = f"{ask.count} devices are asked for and no node has more than {most} that match"
        fix = f"ask for {most} at most" if most else "ask for devices that a node has"
        yield Finding(trap=Trap.COUNT, path=(*path, "count"), why=why, fix=fix)


def _idle_nics(ask: Ask, met: Sequence[Candidate], evidence: Evidence, path: FieldPath) -> Iterator[Finding]:
    """NICs that the request may be given and that must not carry data, RDMA devices apart from others."""
    idle = [one for one in met if one.id in evidence.excluded]
    hcas = [one for one in idle if published.value_of(one, published.RDMA)]
    rest = [one for one in idle if one not in hcas]
    for trap, devices in ((Trap.IDLE_HCA, hcas), (Trap.MANAGEMENT_NIC, rest)):
        if devices:
            named = ", ".join(f"{one.id.device} ({evidence.excluded[one.id]})" for one in devices)
            where = (*path, "selectors", len(ask.selectors) - 1) if ask.selectors else path
            yield Finding(trap=trap, path=where, why=f"it also matches {named}", fix=_without(met, evidence))


def _without(met: Sequence[Candidate], evidence: Evidence) -> str:
    """A selector for the same devices without the excluded ones."""
    kept = [one for one in met if one.id not in evidence.excluded]
    if not kept:
        return "ask for NICs that carry data"
    # Of several kinds of node, names and traits are those of the first: the fix is for one kind of machine.
    kind = next(kind for kind in evidence.stock.kinds if kept[0] in kind.devices)
    here = [one for one in kept if one in kind.devices]
    nics = [one for one in kind.devices if one.id.driver == NIC_DRIVER]
    told = told_by_traits(here, nics, published.NIC_TRAITS) or told_by_names(here, nics, published.NIC_IDS)
    return f"select: {told.expression}" if told and told.expression else "select the NICs by address"
