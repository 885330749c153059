"""What an operator chooses for the IMEX plugin."""

from pathlib import Path

import msgspec

from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.node.imex.host import Kernel


class ImexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node."""

    node: str
    namespaces: tuple[str, ...]
    """Of IMEX daemons, their claims and clique objects. New ones come to the first; the others are those of
    earlier installations, whose daemons run until their ComputeDomain is deleted."""
    domains: Path
    """A directory for each ComputeDomain, which its daemon sees as /imexd."""
    mode: ImexMode = ImexMode.DRIVER_MANAGED
    isolation: Isolation = Isolation.DOMAIN
    """Of a node without the label."""
    kernel: Kernel = Kernel()
    boot_id: str = ""
    """Of the node; where it is empty, daemons of an earlier boot are not told from those of this one."""
