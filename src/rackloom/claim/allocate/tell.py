"""An explanation in words: what the command line prints and what an event can carry."""

from collections.abc import Iterator

from rackloom.claim.allocate.causes import Kind
from rackloom.claim.allocate.explain import Cut, Explanation, Removed, RequestAccount

_WORDS = {
    Kind.IN_USE: "in use",
    Kind.BINDING_CONDITIONS: "has binding conditions",
    Kind.COMPATIBILITY_GROUPS: "has compatibility groups",
    Kind.CLASS_SELECTOR: "not of the class",
    Kind.REQUEST_SELECTOR: "selector is false",
    Kind.SELECTOR_FAILS: "selector fails",
    Kind.OTHER_NODE: "other node",
    Kind.CAPACITY: "capacity",
    Kind.COUNTERS: "counters",
    Kind.TAINT: "taint",
    Kind.CONSTRAINT: "constraint",
    Kind.ATTRIBUTE_MISSING: "attribute missing",
}
_SHOWN_VALUES = 8


def told(explanation: Explanation) -> str:
    """The explanation as lines of text."""
    return "\n".join(_lines(explanation))


def _lines(explanation: Explanation) -> Iterator[str]:
    yield f"node {explanation.node}"
    if explanation.fault is not None:
        yield f"  {explanation.fault}"
    for pool in explanation.unusable_pools:
        yield f"  pool {pool.pool} is {pool.trouble}: {pool.reason}"
    for account in explanation.requests:
        yield from _request(account)
    for cut in explanation.constraints:
        yield from _constraint(cut)
    if explanation.conflict:
        together = " with ".join(explanation.conflict)
        yield f"  cannot be met{' together' if len(explanation.conflict) > 1 else ''}: {together}"


def _request(account: RequestAccount) -> Iterator[str]:
    wanted = "all devices" if account.wanted is None else account.wanted
    yield (
        f"  {account.claim}, request {account.request}: wants {wanted},"
        f" {len(account.left)} of {account.devices} devices are left"
    )
    for removed in account.removed:
        yield f"    {len(removed.devices):>4} {_cause(removed)}"


def _cause(removed: Removed) -> str:
    words = _WORDS[removed.cause]
    return f"{words}: {removed.detail}" if removed.detail else words


def _constraint(cut: Cut) -> Iterator[str]:
    yield f"  {cut.constraint}: {'' if cut.values else 'no device is left to compare'}".rstrip()
    for count in cut.values[:_SHOWN_VALUES]:
        devices = ", ".join(f"{request} {number}" for request, number in count.devices.items())
        yield f"    {count.value}: {devices}"
    if len(cut.values) > _SHOWN_VALUES:
        yield f"    and {len(cut.values) - _SHOWN_VALUES} more values"
