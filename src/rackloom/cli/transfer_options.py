"""Code that `transfer run` and `transfer serve` share: sizes, devices, addresses, and the secret.

`Sizes` describes one run. `Devices` gives the memory and NICs of this end: a single end, named
pairs, the nearest NIC for every GPU, or every pair of GPU and NIC. `allocated` and `claim` name the NICs
that a claim allocated. Measuring is refused if others are visible. The shared secret comes from a file or
from an environment variable, never from the command line.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rackloom.cli.common import read_text
from rackloom.errors import Misuse, Refused

if TYPE_CHECKING:
    from rackloom.core.transfer.pairing import GpuNicPair
    from rackloom.core.transfer.values import AllocatedDevices, EndConfig, TransferSpec
    from rackloom.topology.machine import Machine


SECRET_VARIABLE = "RACKLOOM_TRANSFER_SECRET"  # noqa: S105 (the name of the variable, not its value)
Words = Annotated[tuple[str, ...], Parameter(negative=())]
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of one run."""

    op: Literal["WRITE", "READ"] = "WRITE"
    "WRITE pushes from the initiator, READ pulls from the target."
    block_size: str = "1GiB"
    "Bytes in one block, such as 64MiB."
    batch_size: int = 1
    "Blocks in one request."
    iters: int = 100
    "Timed iterations per run."
    warmup: int = 20
    "Untimed iterations before them."
    timeout: float = 600.0
    "Seconds after which one run is aborted."

    def spec(self) -> "TransferSpec":
        """The measurement.

        Raises:
            Refused: a number is out of range.
        """
        from rackloom.core.transfer.values import TransferSpec

        return TransferSpec(
            op=self.op,
            block_size=parse_size(self.block_size),
            batch_size=self.batch_size,
            iters=self.iters,
            warmup_iters=self.warmup,
            timeout_seconds=self.timeout,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Devices:
    """The memory and NICs of this end, and the devices of its claim."""

    device: str = "cpu"
    "Memory of the buffer: cpu, cuda:0, or fabric:0 for multi-node NVLink. A PCI address may replace the 0."
    transport: Words = ()
    "UCX transport to pin. May be repeated. cma and other memory transports also need tcp."
    net_device: Words = ()
    "UCX device to pin. May be repeated. A single one is a promise that the report checks."
    pair: Words = ()
    "DEVICE=NIC, such as cuda:0=mlx5_0:1. May be repeated, the same number of times at both ends."
    every_gpu: bool = False
    "Pair every GPU of this process with its nearest NIC."
    sweep: bool = False
    "Pair every GPU of this process with every NIC, each alone: the whole matrix."
    allocated: Words = ()
    "NIC that the claim allocated, by any name. May be repeated. Measuring is refused if others are visible."
    claim: Path | None = None
    "File with the allocated ResourceClaims (kubectl get resourceclaims -o yaml), instead of --allocated."

    def config(self) -> "EndConfig":
        """The configuration of a single end."""
        from rackloom.core.transfer.values import EndConfig, UcxPins

        pins = UcxPins(_split_words(self.transport), _split_words(self.net_device))
        return EndConfig(ucx=pins, device=self.device, allocated=self.allocation())

    def allocation(self) -> "AllocatedDevices | None":
        """The devices of the claim, or None if no option names it.

        Raises:
            Refused: the file holds no allocated claim.
        """
        from rackloom.core.transfer.values import AllocatedDevices
        from rackloom.prove.transfer.devices import read_allocation

        if self.claim is not None:
            return read_allocation(self.claim)
        return AllocatedDevices(_split_words(self.allocated)) if self.allocated else None

    def pairs(self, machine: "Machine | None") -> "tuple[GpuNicPair, ...]":
        """The pairs that the options name. Empty for a single end.

        Raises:
            Refused: a pair is not DEVICE=NIC, or there is no GPU, machine or NIC to pair.
        """
        if not (self.every_gpu or self.sweep):
            return tuple(_parse_pair(text, machine) for text in self.pair)
        from rackloom.core.transfer.pairing import device_indices, every_pair, pair_up
        from rackloom.prove.transfer.buffers import CudaDriver

        addresses = CudaDriver().addresses()
        if not addresses:
            raise Refused("the CUDA driver finds no GPU to pair", nearest_fix="say --pair cpu=NIC instead")
        if machine is None:
            raise Refused(
                "this machine cannot be discovered", nearest_fix="say --pair DEVICE=NIC for each pair"
            )
        allocation = self.allocation()
        names = None if allocation is None else allocation.names
        choose = every_pair if self.sweep else pair_up
        return choose(machine, *device_indices(machine, addresses, names))


def parse_size(text: str) -> int:
    """Bytes from a number with an optional unit: 4096, 64MiB, 1GB.

    Raises:
        Refused: not a size.
    """
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise Misuse(f"{text!r} is not a size", nearest_fix="write bytes, or a number with KiB, MiB or GiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port from HOST:PORT. An IPv6 host may be in brackets.

    Raises:
        Refused: not an address with a port.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise Misuse(f"{text!r} is not HOST:PORT", nearest_fix="write it as 192.0.2.1:5555")
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_secret(file: Path | None) -> str:
    """The shared secret from `file` or from the environment. It is never read from the command line.

    Raises:
        Refused: there is none, or the file cannot be read.
    """
    if file is None:
        if secret := os.environ.get(SECRET_VARIABLE):
            return secret
        raise Misuse("no shared secret", nearest_fix=f"give --secret-file or set {SECRET_VARIABLE}")
    return read_text(file, "name a readable text file").strip()


def _parse_pair(text: str, machine: "Machine | None") -> "GpuNicPair":
    from rackloom.core.transfer.pairing import describe_pair
    from rackloom.prove.transfer.buffers import CudaDriver

    device, equals, nic = text.partition("=")
    if not equals or not device or not nic:
        raise Misuse(f"{text!r} is not DEVICE=NIC", nearest_fix="write it as cuda:0=mlx5_0:1 or cpu=eth0")
    _, _, which = device.partition(":")
    address = CudaDriver().address(int(which)) if which.isdecimal() else which or None
    return describe_pair(machine, device, address, nic)


def _split_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Split repeated or comma-separated words, as UCX does."""
    return tuple(part for word in words for part in word.split(",") if part)
