"""The door: a wish and the hardware in, a verified template or a refusal with the nearest fix out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from rackloom.claim.allocate.objects import ResourceClaimTemplate
from rackloom.claim.templates.draft import Draft
from rackloom.claim.templates.hardware import Hardware, Stock
from rackloom.claim.templates.layout import groups_of
from rackloom.claim.templates.places import rails
from rackloom.claim.templates.verify import Verified, verify
from rackloom.claim.templates.wish import Align, Wish, require_sound
from rackloom.errors import Refused


@dataclass(frozen=True, slots=True)
class Generated:
    """A template that was verified."""

    template: ResourceClaimTemplate
    notes: tuple[str, ...]
    """For which machine it is, how its selectors were chosen and from which source, and what was verified."""
    verified: Verified


Elsewhere = tuple[str, Callable[[], Stock]]
"""An option that the user could add, and the stock that it would give."""


def generate(wish: Wish, stock: Stock, *, elsewhere: Iterable[Elsewhere] = ()) -> Generated:
    """The template of a wish. Refused with a fix that was tried, where there is one."""
    require_sound(wish)
    if not stock.kinds:
        raise Refused("no slice names a node", nearest_fix="pass the slices of the GPU and NIC drivers")
    try:
        return _attempt(wish, stock)
    except Refused as refused:
        if refused.nearest_fix is not None:
            raise
        fix = _fix(wish, stock, elsewhere)
        none = "" if fix else "; neither fewer devices nor another alignment helps"
        raise Refused(refused.reason + none, nearest_fix=fix) from None


def _attempt(wish: Wish, stock: Stock) -> Generated:
    """By the first kind of node that can; refused with the reason of the most frequent kind."""
    reasons: list[Refused] = []
    for kind in stock.kinds:
        try:
            return _for_kind(wish, stock, kind)
        except Refused as refused:
            reasons.append(refused)
    raise reasons[0]


def _for_kind(wish: Wish, stock: Stock, kind: Hardware) -> Generated:
    draft = Draft(stock, kind, wish, groups_of(kind, wish))
    verified = verify(stock, kind, wish, draft.template)
    return Generated(draft.template, tuple(_notes(wish, stock, kind, draft, verified)), verified)


def _notes(wish: Wish, stock: Stock, kind: Hardware, draft: Draft, verified: Verified) -> Iterator[str]:
    machine = kind.machine
    aligned = "NICs far from the GPUs" if wish.unaligned else "aligned"
    yield f"{wish.gpus} GPUs and {wish.nics} NICs, {aligned} ({wish.align}), for {machine.name}."
    yield f"Made from {stock.source} with: {wish.flags}"
    yield from (f"{', '.join(names)}: {told}" for told, names in draft.told.items())
    if wish.align is Align.RAIL:
        order = rails(kind)
        taken = ", ".join(str(order.index(nic)) for nic in verified.devices[0][1])
        yield f"rails {taken} of {len(order)} (NICs in the order of their addresses or names)"
    for nic in machine.nics:
        if nic.excluded is not None:
            yield f"left out: {kind.nics[nic.index].id.device} ({nic.excluded})"
    yield f"Verified by allocation: free, {verified.nodes} of {verified.of} nodes serve it, aligned as said."


def _fix(wish: Wish, stock: Stock, elsewhere: Iterable[Elsewhere]) -> str | None:
    """The nearest change that was tried and works."""
    for flag, other in elsewhere:
        if _works(wish, other()):
            return f"add {flag}"
    for near in _nearby(wish):
        if _works(near, stock):
            return f"ask for {near.flags}"
    return None


def _works(wish: Wish, stock: Stock) -> bool:
    try:
        require_sound(wish)
        _attempt(wish, stock)
    except Refused:
        return False
    return True


def _nearby(wish: Wish) -> Iterator[Wish]:
    """Changed wishes, nearest first: in pairs, any rail, fewer devices, another alignment, aligned."""
    change = msgspec.structs.replace
    for align in dict.fromkeys((wish.align, *Align)):
        kept = wish.rails if align is Align.RAIL else ()
        same = change(wish, align=align, rails=kept)
        yield same
        yield change(same, pairs=True)
        yield change(same, rails=())
        for units in range(wish.units - 1, 0, -1):
            gpus, nics = (count * units // wish.units for count in (wish.gpus, wish.nics))
            yield change(same, gpus=gpus, nics=nics, rails=())
            yield change(same, gpus=gpus, nics=nics, rails=(), pairs=True)
        yield change(same, gpus=1, nics=1, rails=())
    if wish.unaligned:
        yield from _nearby(change(wish, unaligned=False))
