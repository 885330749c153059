"""What the API server checks of a claim beyond the types of its fields."""

from collections.abc import Iterator

from rackloom.claim.allocate.objects import DeviceClaim, DeviceRequest
from rackloom.claim.manifests.documents import Document, FieldPath
from rackloom.errors import Refused


def check_claim(document: Document, claim: DeviceClaim, at: FieldPath) -> None:
    """Refuse a claim that the API server would not take, with the line of the field; `at` is its path."""
    names = [one.name for one in claim.requests]
    for number, one in enumerate(claim.requests):
        where = (*at, "requests", number)
        if one.name in names[:number]:
            raise _refused(document, where, f"two requests are called {one.name!r}", "give each its own name")
        if any(count < 0 for count in _counts(one)):
            raise _refused(document, where, f"request {one.name!r} has a negative count", "ask for 1 or more")
    known = {name for one in claim.requests for name in _names(one)}
    for number, constraint in enumerate(claim.constraints):
        strange = [name for name in constraint.requests if name not in known]
        if strange:
            raise _refused(
                document,
                (*at, "constraints", number),
                f"the constraint names request {strange[0]!r}, which the claim does not have",
                f"name {' or '.join(names)}",
            )


def _counts(one: DeviceRequest) -> Iterator[int]:
    if one.exactly is not None:
        yield one.exactly.count
    for alternative in one.first_available:
        yield alternative.count


def _names(one: DeviceRequest) -> Iterator[str]:
    yield one.name
    for alternative in one.first_available:
        yield f"{one.name}/{alternative.name}"


def _refused(document: Document, where: FieldPath, reason: str, fix: str) -> Refused:
    return Refused(f"{document.where(where)}: {reason}", nearest_fix=fix)
