"""How a lease stands, in words for people. Pure; `wall_of` turns seconds since boot into those since 1970."""

from collections.abc import Callable, Mapping

import msgspec

from rackloom.claim.kube.timestamps import whole_time
from rackloom.claim.node.nic.lease import LOST, Lease, Outlook

WallOf = Callable[[float], float]

_REASONS: Mapping[Outlook, str] = {
    Outlook.HELD: "DHCPLeaseHeld",
    Outlook.SILENT: "DHCPRenewalFailed",
    Outlook.EXPIRED: "DHCPLeaseExpired",
    Outlook.REFUSED: "DHCPLeaseRefused",
}
_HOLDS: Mapping[Outlook, str] = {Outlook.HELD: "True", Outlook.SILENT: "Unknown"}


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a condition and an Event say of a lease."""

    holds: str
    """`True`, `False` or `Unknown`."""
    reason: str
    message: str
    lost: bool


def standing(lease: Lease, wall_of: WallOf) -> Standing:
    """In which of the four ways it stands, and since when."""
    return Standing(
        holds=_HOLDS.get(lease.outlook, "False"),
        reason=_REASONS[lease.outlook],
        message=_message(lease, wall_of),
        lost=lease.outlook in LOST,
    )


def _message(lease: Lease, wall_of: WallOf) -> str:
    address, server, end = lease.grant.address, lease.grant.server, whole_time(wall_of(lease.until))
    match lease.outlook:
        case Outlook.HELD:
            return f"{address} is held: server {server} gave it"
        case Outlook.SILENT:
            since = whole_time(wall_of(lease.silent_since or lease.asked_at))
            return f"{address} is held until {end}; no DHCP server has answered since {since}"
        case Outlook.EXPIRED:
            return (
                f"the lease of {address} ended at {end}, and no DHCP server has prolonged it; delete the pod"
            )
        case Outlook.REFUSED:
            return f"a DHCP server refused to prolong {address}; delete the pod, so that it gets another"
