"""What is in use on one node, by position: small enough to be compared for every pod."""

from collections.abc import Hashable, Iterable, Iterator
from fractions import Fraction

from rackloom.claim.allocate.amounts import number
from rackloom.claim.allocate.desk import Offer
from rackloom.claim.allocate.objects import AllocationResult, DeviceResult
from rackloom.claim.allocate.quantity import Quantity
from rackloom.claim.allocate.use import DeviceId, InUse


class Occupancy:
    """Dedicated devices as bits; of shared ones how many shares, and what these took."""

    def __init__(self) -> None:
        self._dedicated = 0
        self._shares: dict[int, int] = {}
        self._taken: dict[tuple[int, str], Fraction] = {}

    def key(self) -> Hashable:
        """Equal where the same positions are used the same way."""
        return self._dedicated, frozenset(self._shares.items()), frozenset(self._taken.items())

    def add(self, offer: Offer, results: Iterable[AllocationResult]) -> None:
        """Note what was given. Admin access holds nothing."""
        for at, one in _held(offer, results):
            if one.share_id is None:
                self._dedicated |= 1 << at
                continue
            self._shares[at] = self._shares.get(at, 0) + 1
            for name, amount in (one.consumed_capacity or {}).items():
                self._taken[at, name] = self._taken.get((at, name), Fraction(0)) + number(amount)

    def remove(self, offer: Offer, results: Iterable[AllocationResult]) -> None:
        """Note what was given back."""
        for at, one in _held(offer, results):
            if one.share_id is None:
                self._dedicated &= ~(1 << at)
            else:
                self._return(at, one)

    def _return(self, at: int, one: DeviceResult) -> None:
        self._shares[at] -= 1
        for name, amount in (one.consumed_capacity or {}).items():
            self._taken[at, name] -= number(amount)
        if not self._shares[at]:
            del self._shares[at]
            self._taken = {key: amount for key, amount in self._taken.items() if key[0] != at}

    def as_in_use(self, offer: Offer) -> InUse:
        """The same as books of devices."""
        devices = offer.candidates
        dedicated = (one.id for one in devices if self._dedicated >> one.position & 1)
        consumed: dict[DeviceId, dict[str, str]] = {}
        for (at, name), amount in self._taken.items():
            consumed.setdefault(devices[at].id, {})[name] = _exact(amount)
        return InUse(
            dedicated=frozenset(dedicated),
            shared=frozenset(devices[at].id for at in self._shares),
            consumed=consumed,
        )


def _held(offer: Offer, results: Iterable[AllocationResult]) -> Iterator[tuple[int, DeviceResult]]:
    """The devices of results that hold one, with their positions; those that are gone are left out."""
    for one in (one for result in results for one in result.devices.results if not one.admin_access):
        at = offer.positions.get(DeviceId(one.driver, one.pool, one.device))
        if at is not None:
            yield at, one


def _exact(amount: Fraction) -> str:
    """Quantities have no more than nine decimals, and so have their sums."""
    return str(Quantity(int(amount * 10**9), -9))
