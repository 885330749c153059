"""A limited resource, shared by the addresses of the clients that ask for it.

While there is enough, every request is granted. Then the oldest share of the address that holds most is
evicted for an address that holds less (longest queue drop: Suter, Lakshman, Stiliadis, Choudhury, INFOCOM
1998). A share that is needed is not evicted. `address_key` names the owner: an IPv6 client counts as its
/64 network, because one host may use all addresses of it.
"""

import ipaddress
from collections import OrderedDict, defaultdict
from collections.abc import Callable


class HeldShare:
    """The part of a `FairShare` that one connection holds, until it is released or evicted."""

    def __init__(self, of: "FairShare", owner: str, amount: int, evict: Callable[[], None]) -> None:
        self.owner = owner
        self.amount = amount
        self.evict = evict
        self.is_needed = False
        """Whether it is busy, and must not be evicted."""
        self.idle_since = 0.0
        """By the clock of whoever took it."""
        self._of = of

    def release(self) -> None:
        """Release it; a second call changes nothing."""
        self._of.give_back(self)

    def renew(self) -> None:
        """Count as the youngest of its owner, because it was just used."""
        self._of.renew(self)


class FairShare:
    """See the module. Invariant: an address that asks for an equal part, or less, gets it.

    `most` is the limit of one address, even while no other asks.
    """

    def __init__(self, total: int, most: int) -> None:
        self._total = total
        self._most = most
        self._held: dict[str, int] = defaultdict(int)
        self._shares: dict[str, OrderedDict[HeldShare, None]] = defaultdict(OrderedDict)
        self.held = 0
        """By all together."""

    def take(self, owner: str, amount: int, evict: Callable[[], None]) -> HeldShare | None:
        """A share of `amount`; None where its owner has its part already. An eviction calls `evict`."""
        if amount > self._total or self._held.get(owner, 0) + amount > self._most:
            return None
        while self.held + amount > self._total:
            victim = self._victim(self._held.get(owner, 0))
            if victim is None:
                return None
            victim.release()
            victim.evict()
        share = HeldShare(self, owner, amount, evict)
        self.held += amount
        self._held[owner] += amount
        self._shares[owner][share] = None
        return share

    def give_back(self, share: HeldShare) -> None:
        """Free what the share held."""
        owned = self._shares.get(share.owner)
        if owned is None or share not in owned:
            return
        del owned[share]
        self.held -= share.amount
        self._held[share.owner] -= share.amount
        if not owned:
            del self._shares[share.owner], self._held[share.owner]

    def renew(self, share: HeldShare) -> None:
        """Make it the last share that its owner would lose."""
        owned = self._shares.get(share.owner)
        if owned is not None and share in owned:
            owned.move_to_end(share)

    def oldest_idle(self, owner: str) -> HeldShare | None:
        """The share that `owner` would lose first; None where it has none, or needs all."""
        return next((share for share in self._shares.get(owner, ()) if not share.is_needed), None)

    def _victim(self, more_than: int) -> HeldShare | None:
        """The oldest idle share of the address that holds most; None where none holds `more_than` so much."""
        for owner, amount in sorted(self._held.items(), key=lambda item: -item[1]):
            if amount <= more_than:
                return None
            found = self.oldest_idle(owner)
            if found is not None:
                return found
        return None


def plain_address(host: str) -> str:
    """The address as every listener writes it: an IPv4 address that is mapped into IPv6 as IPv4.

    A listener on `::` sees its IPv4 clients like that. What is no address is returned as it is.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)


def address_key(host: str) -> str:
    """The address as a key of `FairShare`: an IPv4 address, or the IPv6 network of one link (64 bits)."""
    try:
        address = ipaddress.ip_address(plain_address(host.partition("%")[0]))
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))
