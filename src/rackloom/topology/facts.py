"""Facts that say where they come from.

Each layer of a rack sees only part of it, and some of what it sees is wrong (a virtual machine hides the
PCIe tree, a driver leaves out the NUMA node). A value without its source cannot be weighed against
another, so the topology room carries both.
"""

from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Source(StrEnum):
    """Who said so, in the words the command line prints."""

    SYSFS = "sysfs"
    """Read from the kernel of the machine (directly, or through a driver that reads it there)."""
    NVML = "nvml"
    VENDOR_FILE = "vendor-file"
    """A topology file that the vendor of the machine ships (NCCL XML)."""
    DECLARED = "declared"
    """Written down by a person or by vendor documentation; nothing on the machine confirms it."""
    NMX = "nmx"
    """Reported by an NVLink switch controller (NMX-C or NMX-M)."""


class Fact(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """A value and its source."""

    value: T
    source: Source


_DIRECTNESS = (Source.SYSFS, Source.NVML, Source.NMX, Source.VENDOR_FILE, Source.DECLARED)
"""Observed on the device's own machine, observed from elsewhere, written in a file, said."""


def directness(source: Source) -> int:
    """Rank of a source, 0 for the most direct: of two sources that agree, the lower one is named."""
    return _DIRECTNESS.index(source)


def least_direct(*sources: Source) -> Source:
    """Source of a conclusion that rests on facts of all `sources`: no better than the weakest of them."""
    return max(sources, key=directness)
