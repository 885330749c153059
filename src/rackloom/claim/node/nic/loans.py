"""What is lent to which pod: one file per device that has begun to leave the host.

The file is there before anything is moved and goes once all is as it was, so that after a crash it tells what
may be half done. It holds all that giving back needs; nothing else has to have survived.
"""

from pathlib import Path

from rackloom.claim.allocate.objects import Device
from rackloom.claim.node.nic.boot_files import BootFiles
from rackloom.claim.node.nic.moving import Attached
from rackloom.claim.node.nic.settings import Identity, LinkSettings, Setting


class Held(Setting, frozen=True, kw_only=True):
    """One NIC of a claim, as prepared."""

    device: str
    published: Device
    """As it was in the slice: what does not show while it is away is published from here."""
    identity: Identity | None = None
    """None for a NIC without an interface."""
    host: LinkSettings | None = None
    pod: LinkSettings | None = None
    rdma: str | None = None
    moves_rdma: bool = False


class Record(Setting, frozen=True, kw_only=True):
    """What the checkpoint keeps of a claim for this plugin."""

    pod: str
    """Its UID."""
    nics: tuple[Held, ...] = ()


class Loan(Setting, frozen=True, kw_only=True):
    """One NIC that is in a pod, or on its way there or back."""

    claim: str
    pod: str
    nic: Held
    netns: str
    """Path of the pod's network namespace."""
    netns_id: int
    """Its inode: the path alone may mean another one later."""
    boot_id: str
    attached: Attached | None = None
    """Set once all of it is in the pod."""
    address_until: float | None = None
    """Until when (seconds since boot) the kernel leaves its leased address on it; None for ever."""
    returning: bool = False

    @property
    def key(self) -> str:
        """Name of its file."""
        return f"{self.claim}-{self.nic.device}"


class Loans(BootFiles[Loan]):
    """The loans of this boot. After another one there are no pods, and the kernel has made all links anew."""

    def __init__(self, root: Path, boot_id: str) -> None:
        super().__init__(root, boot_id, Loan)

    def get(self, claim: str, device: str) -> Loan | None:
        """The loan of one device to one claim."""
        return self._known.get(f"{claim}-{device}")

    def of_claim(self, claim: str) -> tuple[Loan, ...]:
        """All loans of a claim."""
        return tuple(one for one in self._known.values() if one.claim == claim)
