"""Lint rules for requests, constraints and whole claims, judged by allocation.

`claim_findings` checks in this order. For each request: its class exists, its selectors and derived
attributes are sound, its count does not exceed the matching devices of a node, and no NIC that must not
carry tenant data matches. For each constraint: some device of every request publishes the attribute, and
some node can serve the claim with it. The check allocates the claim with and without the constraint. If
splitting the requests into pairs helps, that is the fix. Last, some node with nothing in use must serve a
claim without other findings. Counts, NICs and this last rule need given nodes.

Constraints are checked once every request names a known class. Without given nodes, claims are tried on
published machines without their selectors, which name one machine.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import msgspec

from rackloom.core.allocate.driver_slices import NIC_DRIVER
from rackloom.core.allocate.eligibility import CandidateDevice
from rackloom.core.allocate.lint.selectors import (
    FieldPath,
    LintContext,
    LintFinding,
    LintRule,
    allocation_outcomes,
    can_be_served,
    derived_findings,
    selector_findings,
)
from rackloom.core.allocate.objects import (
    DeviceClass,
    DeviceConstraint,
    DeviceRequest,
    RequestSpec,
    ResourceClaim,
)
from rackloom.core.allocate.outcome import Fault, Refusal
from rackloom.core.allocate.templates import inventory
from rackloom.core.allocate.templates.generate import selector_by_ids, selector_by_traits

# Rules for one request.


def request_specs(request: DeviceRequest) -> Iterator[tuple[RequestSpec, tuple[str | int, ...]]]:
    """The specs of a request: the exact one, or the alternatives. Each has its field in the request."""
    if request.exactly is not None:
        yield request.exactly, ("exactly",)
    for number, alternative in enumerate(request.first_available):
        yield alternative, ("firstAvailable", number)


def request_findings(ask: RequestSpec, context: LintContext, path: FieldPath) -> Iterator[LintFinding]:
    """Traps of the request spec at `path`."""
    name = ask.device_class_name
    if name not in context.classes:
        near = get_close_matches(name, context.classes, n=1, cutoff=0.4)
        fix = f"use {near[0]}, or add the DeviceClass" if near else "add the DeviceClass"
        why = f"there is no DeviceClass {name!r}"
        yield LintFinding(trap=LintRule.UNKNOWN_CLASS, path=(*path, "deviceClassName"), why=why, fix=fix)
        return
    met = context.of_class(name)
    clean = True
    for number, selector in enumerate(ask.selectors):
        field = (*path, "selectors", number, "cel", "expression")
        found = list(selector_findings(selector.cel.expression if selector.cel else "", met, context, field))
        yield from found
        clean = clean and not found
        met = context.passing(met, [selector])
    for number, derived in enumerate(ask.derived_attributes if clean else ()):
        yield from derived_findings(
            derived.expression, met, context, (*path, "derivedAttributes", number, "expression")
        )
    if not context.given:
        return
    # A broken selector matches nothing, so the count is not checked.
    if clean and ask.allocation_mode == "ExactCount":
        matching = {device.id for device in met}
        counts = (sum(device.id in matching for device in kind.devices) for kind in context.hardware.kinds)
        most = max(counts, default=0)
        if ask.count > most:
            why = f"{ask.count} devices are asked for and no node has more than {most} that match"
            fix = f"ask for {most} at most" if most else "ask for devices that a node has"
            yield LintFinding(trap=LintRule.COUNT, path=(*path, "count"), why=why, fix=fix)
    yield from _idle_nic_findings(ask, met, context, path)


def _idle_nic_findings(
    ask: RequestSpec, met: Sequence[CandidateDevice], context: LintContext, path: FieldPath
) -> Iterator[LintFinding]:
    """NICs that the request may be given and that must not carry data, RDMA devices apart from others."""
    idle = [device for device in met if device.id in context.excluded]
    hcas = [device for device in idle if inventory.scalar_attribute(device, inventory.RDMA)]
    rest = [device for device in idle if device not in hcas]
    for trap, devices in ((LintRule.IDLE_HCA, hcas), (LintRule.MANAGEMENT_NIC, rest)):
        if devices:
            named = ", ".join(f"{device.id.device} ({context.excluded[device.id]})" for device in devices)
            where = (*path, "selectors", len(ask.selectors) - 1) if ask.selectors else path
            yield LintFinding(
                trap=trap,
                path=where,
                why=f"it also matches {named}",
                fix=_selector_without_excluded(met, context),
            )


def _selector_without_excluded(met: Sequence[CandidateDevice], context: LintContext) -> str:
    """A selector for the same devices without the excluded ones."""
    kept = [device for device in met if device.id not in context.excluded]
    if not kept:
        return "ask for NICs that carry data"
    # Of several kinds of node, names and traits are those of the first: the fix is for one kind of machine.
    kind = next(kind for kind in context.hardware.kinds if kept[0] in kind.devices)
    here = [device for device in kept if device in kind.devices]
    nics = [device for device in kind.devices if device.id.driver == NIC_DRIVER]
    chosen = selector_by_traits(here, nics, inventory.NIC_TRAITS)
    chosen = chosen or selector_by_ids(here, nics, inventory.NIC_IDS)
    return f"select: {chosen.expression}" if chosen and chosen.expression else "select the NICs by address"


# Rules for constraints.


_PAIRS = "make pairs of requests (gpu-0/nic-0, ...) with a constraint each: rackloom claim template --pairs"
_FEWER = "ask for fewer devices, or select them by address: rackloom claim template"


def constraint_findings(claim: ResourceClaim, context: LintContext) -> Iterator[LintFinding]:
    """Traps of the constraints of a claim with known classes."""
    for number, constraint in enumerate(claim.spec.devices.constraints):
        kind = "matchAttribute" if constraint.match_attribute is not None else "distinctAttribute"
        path = ("devices", "constraints", number, kind)
        lacking = list(_unpublished_findings(claim, constraint, context, path))
        yield from lacking
        if constraint.match_attribute is not None and not lacking:
            yield from _one_value_findings(claim, number, context, path)


def _requests_covered(claim: ResourceClaim, device_constraint: DeviceConstraint) -> list[DeviceRequest]:
    names = {name.partition("/")[0] for name in device_constraint.requests}
    return [request for request in claim.spec.devices.requests if not names or request.name in names]


def _unpublished_findings(
    claim: ResourceClaim, device_constraint: DeviceConstraint, context: LintContext, path: FieldPath
) -> Iterator[LintFinding]:
    """A device without the attribute breaks the constraint. If all lack it, the claim is lost."""
    name = device_constraint.match_attribute or device_constraint.distinct_attribute or ""
    for request in _requests_covered(claim, device_constraint):
        met: list[CandidateDevice] = []
        for ask, _ in request_specs(request):
            # A derived attribute counts, even if the device does not publish it.
            if name in [derived.name for derived in ask.derived_attributes]:
                continue
            # Values of typical devices are made up, so all of the class may be given.
            of_class = context.of_class(ask.device_class_name)
            met += context.passing(of_class, ask.selectors) if context.given else of_class
        if met and all(context.lacks(device, name) for device in met):
            whom = f"none of the devices that request {request.name} matches"
            why = f"{whom if context.given else 'no driver that is known'} publishes {name}"
            fix = "select by NUMA node or address instead: rackloom claim template"
            yield LintFinding(trap=LintRule.UNPUBLISHED, path=path, why=why, fix=fix)
            return


def _one_value_findings(
    claim: ResourceClaim, number: int, context: LintContext, path: FieldPath
) -> Iterator[LintFinding]:
    """Judged by allocation: no node serves the claim, and some do without the constraint."""
    inventories = (context.hardware,) if context.given else context.machines
    asked = claim if context.given else _without_selectors(claim)
    if can_be_served(inventories, asked) or not can_be_served(
        inventories, _without_constraint(asked, number)
    ):
        return
    constraint = claim.spec.devices.constraints[number]
    names = ", ".join(request.name for request in _requests_covered(claim, constraint))
    where = "no node" if context.given else "no published machine"
    paired = _split_into_pairs(asked, number)
    yield LintFinding(
        trap=LintRule.ONE_VALUE,
        path=path,
        why=f"all devices of {names} must share one {constraint.match_attribute}, "
        f"and {where} has that many that do",
        fix=_PAIRS if paired is not None and can_be_served(inventories, paired) else _FEWER,
    )


def _without_constraint(claim: ResourceClaim, number: int) -> ResourceClaim:
    kept = [constraint for index, constraint in enumerate(claim.spec.devices.constraints) if index != number]
    return claim.with_devices(constraints=tuple(kept))


def _without_selectors(claim: ResourceClaim) -> ResourceClaim:
    """The claim without its selectors, which name one machine while others are tried."""
    requests = [
        msgspec.structs.replace(request, exactly=msgspec.structs.replace(request.exactly, selectors=()))
        if request.exactly is not None
        else request
        for request in claim.spec.devices.requests
    ]
    return claim.with_devices(requests=tuple(requests))


def _split_into_pairs(claim: ResourceClaim, number: int) -> ResourceClaim | None:
    """Split the requests of a constraint into single devices. None unless their counts are equal."""
    constraint = claim.spec.devices.constraints[number]
    covered = _requests_covered(claim, constraint)
    counts = {request.exactly.count if request.exactly else 0 for request in covered}
    count = counts.pop()
    if counts or len(covered) < 2 or count < 2:
        return None
    rest = [request for request in claim.spec.devices.requests if request not in covered]
    single = [
        DeviceRequest(
            name=f"{request.name}-{index}", exactly=msgspec.structs.replace(request.exactly, count=1)
        )
        for index in range(count)
        for request in covered
        if request.exactly is not None
    ]
    each = [
        msgspec.structs.replace(constraint, requests=tuple(f"{request.name}-{index}" for request in covered))
        for index in range(count)
    ]
    others = _without_constraint(claim, number).spec.devices.constraints
    return claim.with_devices(requests=(*rest, *single), constraints=(*others, *each))


# Whole claims and classes.


def claim_findings(claim: ResourceClaim, context: LintContext) -> list[LintFinding]:
    """The traps of a claim. Constraints are checked once every request names a known class."""
    found = [
        finding
        for number, request in enumerate(claim.spec.devices.requests)
        for ask, field in request_specs(request)
        for finding in request_findings(ask, context, ("devices", "requests", number, *field))
    ]
    # A constraint cannot be judged if the expression that derives its attribute is broken.
    broken = any("derivedAttributes" in finding.path for finding in found)
    if not broken and not any(finding.trap is LintRule.UNKNOWN_CLASS for finding in found):
        found += constraint_findings(claim, context)
    if context.given and not found:
        # On a profile, a fault may be a gap in the profile.
        no = (Refusal, Fault) if context.hardware.observed else (Refusal,)
        outcomes = allocation_outcomes([context.hardware], claim)
        if all(isinstance(outcome, no) for outcome in outcomes):
            why = "no node can serve the claim, even with nothing in use"
            fix = "see rackloom claim explain for what takes each device away"
            found.append(LintFinding(trap=LintRule.NO_NODE, path=("devices", "requests"), why=why, fix=fix))
    return found


def class_findings(device_class: DeviceClass, context: LintContext) -> Iterator[LintFinding]:
    """The traps of a class. Its selectors run on every device of every driver."""
    for number, selector in enumerate(device_class.spec.selectors):
        path = ("selectors", number, "cel", "expression")
        expression = selector.cel.expression if selector.cel else ""
        yield from selector_findings(expression, context.devices, context, path)
