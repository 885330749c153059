"""The door: every trap of a claim or a class, judged by evaluation and allocation rather than by its text."""

from collections.abc import Iterator

from rackloom.claim.allocate.objects import DeviceClass, ResourceClaim
from rackloom.claim.allocate.outcome import Fault, Refusal
from rackloom.claim.traps.constraints import constraint_traps
from rackloom.claim.traps.evidence import Evidence, outcomes
from rackloom.claim.traps.finding import Finding, Trap
from rackloom.claim.traps.requests import asks_of, request_traps
from rackloom.claim.traps.selectors import selector_traps


def claim_traps(claim: ResourceClaim, evidence: Evidence) -> list[Finding]:
    """The traps of a claim; constraints are looked at once every request names a class."""
    found = [
        finding
        for number, request in enumerate(claim.spec.devices.requests)
        for ask, place in asks_of(request)
        for finding in request_traps(ask, evidence, ("devices", "requests", number, *place))
    ]
    if not any(one.trap is Trap.UNKNOWN_CLASS for one in found):
        found += constraint_traps(claim, evidence)
    if evidence.given and not found and _refused(claim, evidence):
        why = "no node can serve the claim, even with nothing in use"
        fix = "see rackloom claim explain for what takes each device away"
        found.append(Finding(trap=Trap.NO_NODE, path=("devices", "requests"), why=why, fix=fix))
    return found


def class_traps(device_class: DeviceClass, evidence: Evidence) -> Iterator[Finding]:
    """The traps of a class, whose selectors are asked of every device of every driver."""
    for number, one in enumerate(device_class.spec.selectors):
        path = ("selectors", number, "cel", "expression")
        expression = one.cel.expression if one.cel else ""
        yield from selector_traps(expression, evidence.devices, evidence, path)


def _refused(claim: ResourceClaim, evidence: Evidence) -> bool:
    """Whether every node says no. Of a profile, a fault may be a gap of what it knows."""
    no = (Refusal, Fault) if evidence.stock.observed else (Refusal,)
    return all(isinstance(one, no) for one in outcomes([evidence.stock], claim))
