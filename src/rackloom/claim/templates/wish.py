"""What a template is asked to bring together."""

import re
from enum import StrEnum
from math import gcd

import msgspec

from rackloom.errors import Refused

MAX_DEVICES = 32
"""Devices that one claim can be given (resource.k8s.io/v1)."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Align(StrEnum):
    """What a GPU and a NIC must have in common."""

    NUMA = "numa"
    """A NUMA node."""
    PCIE = "pcie"
    """A PCIe switch or root, as near as the machine has it."""
    RAIL = "rail"
    """The NICs are the same ones on every node, each near a GPU of the claim."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a claim and how its devices are to be aligned."""

    gpus: int
    nics: int
    align: Align
    pairs: bool = False
    """One pair of requests for each unit of the ratio of GPUs to NICs, each aligned by itself."""
    unaligned: bool = False
    """NICs that are not near the GPUs: the other arm of a comparison."""
    rails: tuple[int, ...] = ()
    """Positions of the NICs on each node; empty: any that fit."""
    name: str | None = None

    @property
    def units(self) -> int:
        """How often the smallest ratio of GPUs to NICs is asked for."""
        return gcd(self.gpus, self.nics)

    @property
    def title(self) -> str:
        """The name of the template."""
        parts = [f"{self.gpus}gpu-{self.nics}nic-{self.align}", "pairs" if self.pairs else ""]
        parts.append("unaligned" if self.unaligned else "aligned")
        return self.name or "-".join(part for part in parts if part)

    @property
    def flags(self) -> str:
        """The wish as options of the command."""
        words = [f"--gpus {self.gpus} --nics {self.nics} --align {self.align}"]
        words += ["--pairs"] if self.pairs else []
        words += ["--unaligned"] if self.unaligned else []
        words += [f"--rail {' '.join(map(str, self.rails))}"] if self.rails else []
        return " ".join(words)


def require_sound(wish: Wish) -> None:
    """Refused where no machine could serve the wish."""
    if wish.gpus < 1 or wish.nics < 1:
        raise Refused("a claim with alignment has GPUs and NICs", nearest_fix="ask for at least one of each")
    if wish.gpus + wish.nics > MAX_DEVICES:
        raise Refused(f"{wish.gpus + wish.nics} devices are more than a claim can hold ({MAX_DEVICES})")
    if wish.rails and wish.align is not Align.RAIL:
        raise Refused("rails are pinned under --align rail only", nearest_fix="use --align rail")
    if wish.rails and len(set(wish.rails)) != wish.nics:
        fix = f"use --nics {len(set(wish.rails))}"
        raise Refused(f"{len(set(wish.rails))} rails for {wish.nics} NICs", nearest_fix=fix)
    if not _NAME.fullmatch(wish.title):
        fix = "use up to 63 of a-z, 0-9 and - with a letter or digit at both ends"
        raise Refused(f"{wish.title!r} cannot be the name of a template", nearest_fix=fix)
