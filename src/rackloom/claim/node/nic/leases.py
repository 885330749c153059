"""The leases of a node's NICs: the grants of DHCP servers, and the store that a restart reads back.

`LeaseStore` keeps one file for each leased NIC of a claim, from prepare to unprepare. A restarted plugin
checks at once whether its leases still stand. `dhcp` requests leases, `renewal` keeps them.
"""

import time
from collections.abc import Iterator

import msgspec

from rackloom.claim.node.storage import BootScopedFiles
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.domains.network_config import RouteConfig
from rackloom.core.nics.attachment import NicValue, PreparedNic
from rackloom.core.nics.lease import DhcpLease, restored_lease


class LeasedAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A server's grant: one address, and the routes of option 121, but not a router (option 3)."""

    lease: DhcpLease
    routes: tuple[RouteConfig, ...] = ()


def boot_seconds() -> float:
    """Seconds since the machine was booted, those in which it slept too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseRecord(NicValue, frozen=True, kw_only=True):
    """The lease of one NIC, and all that is needed to prolong and to report it."""

    ref: ClaimRef
    pod: str
    """UID of the pod."""
    pod_name: str
    nic: PreparedNic
    lease: DhcpLease
    boot_id: str

    @property
    def claim(self) -> str:
        """UID of the claim."""
        return self.ref.uid

    @property
    def key(self) -> str:
        """Name of its file."""
        return f"{self.claim}-{self.nic.device}"


class LeaseStore(BootScopedFiles[LeaseRecord]):
    """The leases of this boot. After a reboot every claim is prepared again, and requests a new lease."""

    shape = LeaseRecord

    def _read(self) -> Iterator[LeaseRecord]:
        for record in super()._read():
            yield msgspec.structs.replace(record, lease=restored_lease(record.lease))
