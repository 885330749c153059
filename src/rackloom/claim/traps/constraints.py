"""Traps of constraints: an attribute that nothing publishes, or one value forced on too many devices."""

from collections.abc import Iterator

import msgspec

from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.objects import DeviceConstraint, DeviceRequest, ResourceClaim
from rackloom.claim.traps.evidence import Evidence, served
from rackloom.claim.traps.finding import FieldPath, Finding, Trap
from rackloom.claim.traps.requests import Ask, asks_of

_PAIRS = "make pairs of requests (gpu-0/nic-0, ...) with a constraint each: rackloom claim template --pairs"
_FEWER = "ask for fewer devices, or select them by address: rackloom claim template"


def constraint_traps(claim: ResourceClaim, evidence: Evidence) -> Iterator[Finding]:
    """Traps of the constraints of a claim whose classes are known."""
    for number, one in enumerate(claim.spec.devices.constraints):
        kind = "matchAttribute" if one.match_attribute is not None else "distinctAttribute"
        path = ("devices", "constraints", number, kind)
        lacking = list(_unpublished(claim, one, evidence, path))
        yield from lacking
        if one.match_attribute is not None and not lacking:
            yield from _one_value(claim, number, evidence, path)


def _covered(claim: ResourceClaim, one: DeviceConstraint) -> list[DeviceRequest]:
    names = {name.partition("/")[0] for name in one.requests}
    return [request for request in claim.spec.devices.requests if not names or request.name in names]


def _unpublished(
    claim: ResourceClaim, one: DeviceConstraint, evidence: Evidence, path: FieldPath
) -> Iterator[Finding]:
    """A device without the attribute breaks the constraint: where all lack it, the claim is lost."""
    name = one.match_attribute or one.distinct_attribute or ""
    for request in _covered(claim, one):
        met = [device for ask, _ in asks_of(request) for device in _matched(ask, evidence)]
        if met and all(evidence.lacks(device, name) for device in met):
            whom = f"none of the devices that request {request.name} matches"
            why = f"{whom if evidence.given else 'no driver that is known'} publishes {name}"
            fix = "select by NUMA node or address instead: rackloom claim template"
            yield Finding(trap=Trap.UNPUBLISHED, path=path, why=why, fix=fix)
            return


def _matched(ask: Ask, evidence: Evidence) -> list[Candidate]:
    """The devices that an ask may be given; values of typical devices are made up, so all of its class."""
    met = evidence.of_class(ask.device_class_name)
    return evidence.passing(met, ask.selectors) if evidence.given else met


def _one_value(claim: ResourceClaim, number: int, evidence: Evidence, path: FieldPath) -> Iterator[Finding]:
    """Judged by allocation: no node serves the claim, and some do without the constraint."""
    stocks = (evidence.stock,) if evidence.given else evidence.machines
    asked = claim if evidence.given else _anywhere(claim)
    if served(stocks, asked) or not served(stocks, _without(asked, number)):
        return
    constraint = claim.spec.devices.constraints[number]
    names = ", ".join(request.name for request in _covered(claim, constraint))
    where = "no node" if evidence.given else "no published machine"
    paired = _in_pairs(asked, number)
    yield Finding(
        trap=Trap.ONE_VALUE,
        path=path,
        why=f"all devices of {names} must share one {constraint.match_attribute}, "
        f"and {where} has that many that do",
        fix=_PAIRS if paired is not None and served(stocks, paired) else _FEWER,
    )


def _changed(claim: ResourceClaim, **fields: object) -> ResourceClaim:
    devices = msgspec.structs.replace(claim.spec.devices, **fields)
    return msgspec.structs.replace(claim, spec=msgspec.structs.replace(claim.spec, devices=devices))


def _without(claim: ResourceClaim, number: int) -> ResourceClaim:
    kept = [one for index, one in enumerate(claim.spec.devices.constraints) if index != number]
    return _changed(claim, constraints=tuple(kept))


def _anywhere(claim: ResourceClaim) -> ResourceClaim:
    """The claim without selectors, which name one machine where others are looked at."""
    requests = [
        msgspec.structs.replace(one, exactly=msgspec.structs.replace(one.exactly, selectors=()))
        if one.exactly is not None
        else one
        for one in claim.spec.devices.requests
    ]
    return _changed(claim, requests=tuple(requests))


def _in_pairs(claim: ResourceClaim, number: int) -> ResourceClaim | None:
    """The claim with the requests of a constraint split into single devices; None unless counts are equal."""
    constraint = claim.spec.devices.constraints[number]
    covered = _covered(claim, constraint)
    counts = {one.exactly.count if one.exactly else 0 for one in covered}
    count = counts.pop()
    if counts or len(covered) < 2 or count < 2:
        return None
    rest = [one for one in claim.spec.devices.requests if one not in covered]
    single = [
        DeviceRequest(name=f"{one.name}-{index}", exactly=msgspec.structs.replace(one.exactly, count=1))
        for index in range(count)
        for one in covered
        if one.exactly is not None
    ]
    each = [
        msgspec.structs.replace(constraint, requests=tuple(f"{one.name}-{index}" for one in covered))
        for index in range(count)
    ]
    others = _without(claim, number).spec.devices.constraints
    return _changed(claim, requests=(*rest, *single), constraints=(*others, *each))
