"""Which address a DHCP server gave for which NIC of which claim: one file each, from prepare to unprepare."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rackloom.claim.node.nic.boot_files import BootFiles
from rackloom.claim.node.nic.lease import Lease, woken
from rackloom.claim.node.nic.loans import Held
from rackloom.claim.node.nic.settings import Setting
from rackloom.claim.node.values import ClaimRef


class LeaseRecord(Setting, frozen=True, kw_only=True):
    """The lease of one NIC, and all that is needed to prolong it and to tell of it."""

    ref: ClaimRef
    pod: str
    """UID of the pod."""
    pod_name: str
    nic: Held
    lease: Lease
    boot_id: str

    @property
    def key(self) -> str:
        """Name of its file."""
        return f"{self.ref.uid}-{self.nic.device}"


class Leases(BootFiles[LeaseRecord]):
    """The leases of this boot. After another one every claim is prepared anew, and asks anew."""

    def __init__(self, root: Path, boot_id: str) -> None:
        super().__init__(root, boot_id, LeaseRecord)

    def _read(self) -> Iterator[LeaseRecord]:
        for record in super()._read():
            yield msgspec.structs.replace(record, lease=woken(record.lease))

    def get(self, claim: str, device: str) -> LeaseRecord | None:
        """That of one device of one claim."""
        return self._known.get(f"{claim}-{device}")

    def of_claim(self, claim: str) -> tuple[LeaseRecord, ...]:
        """All of a claim."""
        return tuple(one for one in self._known.values() if one.ref.uid == claim)
