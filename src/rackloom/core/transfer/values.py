"""The request of a transfer and its report, as values.

`TransferSpec` and `EndConfig` describe a measurement: sizes, iterations, memory, UCX pins, processors,
allocation. `Promise` is the placement's promise of the path. `EndRecord` and `Measurement` are the
observations of the ends. `TransferReport`, `Arm` and `AlignmentReport` are the conclusions: one run, the runs
of one placement, and all placements of one call.

The first sixteen fields of a `TransferReport` are those of the RESULT line of the nixl-kv-transfer
example, in its order. All later fields are ours, and fields are only ever added. Units are seconds, bytes and
decimal GB/s throughout. Line rates are in Gb/s.
"""

from typing import Literal

import msgspec

from rackloom.core.transfer.statistics import Interval
from rackloom.errors import Refused

TransferOp = Literal["WRITE", "READ"]
PathVerdict = Literal["holds", "does not hold", "unknown", "no promise"]

ShortfallCause = Literal["wrong rail", "contention", "degraded link", "misalignment"]

MAX_BLOCKS = 8192
"""Descriptors in one request: above it the list would not fit one control frame."""
MAX_ITERS = 100_000
"""Each iteration's time is kept and handed over in one line."""


def _require_range(name: str, number: float, low: int, high: int) -> None:
    if not low <= number <= high:
        raise Refused(f"{name}: {number}", nearest_fix=f"give {low} to {high}")


class AllocatedDevices(msgspec.Struct, frozen=True):
    """The devices that a claim allocated, by any name: HCA, netdev or PCI address."""

    names: tuple[str, ...]


class UcxPins(msgspec.Struct, frozen=True):
    """The UCX pins of one end. The ends differ if their hosts name devices differently."""

    transports: tuple[str, ...] = ()
    """UCX_TLS. Empty leaves the choice to UCX."""
    net_devices: tuple[str, ...] = ()
    """UCX_NET_DEVICES. Empty leaves the choice to UCX."""


class EndConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one end on its host."""

    ucx: UcxPins = UcxPins()
    device: str = "cpu"
    """The device with the buffer: `cpu`, `cuda:N` or `fabric:N`. N is an ordinal or a PCI address."""
    cores: tuple[int, ...] = ()
    """Processors that it may run on. Empty leaves the choice to the scheduler."""
    allocated: AllocatedDevices | None = None
    """The devices of its claim. It refuses to measure while it sees others. None: not checked."""


class TransferSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement: sizes in bytes, times in seconds. Defaults are the example's 1 GiB run.

    Raises:
        Refused: a number is out of range.
    """

    op: TransferOp = "WRITE"
    block_size: int = 1 << 30
    batch_size: int = 1
    iters: int = 100
    warmup_iters: int = 20
    seed: int = 1
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        _require_range("block size", self.block_size, 1, 1 << 40)
        _require_range("batch size", self.batch_size, 1, MAX_BLOCKS)
        _require_range("iterations", self.iters, 1, MAX_ITERS)
        _require_range("warm-up iterations", self.warmup_iters, 0, MAX_ITERS)
        _require_range("seed", self.seed, 0, 1 << 63)
        _require_range("timeout", self.timeout_seconds, 1, 86400)

    @property
    def total_bytes(self) -> int:
        """Bytes that one iteration moves, and the size of either buffer."""
        return self.block_size * self.batch_size

    @property
    def timed_bytes(self) -> int:
        """Bytes that all timed iterations move together."""
        return self.total_bytes * self.iters


class Promise(msgspec.Struct, frozen=True):
    """The placement's promise: the device that carries the bytes, and the declared rate of a shaper."""

    device: str | None = None
    declared_gigabits: float | None = None
    emulated: bool = False
    path_class: str | None = None
    """Path class of the GPU and the NIC of this pair, or None if not known."""
    nearest_class: str | None = None
    """Class of the nearest NIC that this GPU has."""


class DeviceTraffic(msgspec.Struct, frozen=True):
    """Bytes that one device counted during the timed iterations. Netdev counters include headers."""

    name: str
    kind: Literal["netdev", "rdma"]
    sent_bytes: int
    received_bytes: int


class PathProof(msgspec.Struct, frozen=True):
    """Which device carried the bytes, and how that is known."""

    verdict: PathVerdict
    evidence: str
    promised: str | None
    carried_by: tuple[str, ...]
    """Devices with counters that rose by the payload on the initiator's side. Empty within one memory."""
    expected_bytes: int
    protocols: tuple[str, ...]
    """Protocols that UCX reports for this operation, such as tcp/rdma0 or cma/memory."""
    initiator: tuple[DeviceTraffic, ...]
    target: tuple[DeviceTraffic, ...]


class EndUsage(msgspec.Struct, frozen=True):
    """CPU time and context switches of one end during the timed iterations."""

    wall_seconds: float
    cpu_seconds: float
    """CPU time of this end, all threads."""
    voluntary_switches: int
    involuntary_switches: int


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One netdev or one port of an RDMA device. None: the kernel does not report it."""

    name: str
    """`rdma0`, or `mlx5_0:1` with the port."""
    kind: Literal["netdev", "rdma"]
    state: str | None = None
    mtu: int | None = None
    gigabits: float | None = None
    """Current rate. None for virtual devices: the rate that the kernel prints for a veth means nothing."""
    numa_node: int | None = None
    pci_address: str | None = None
    pcie: str | None = None
    """Current PCIe link, such as `32.0 GT/s x16`."""
    pcie_best: str | None = None
    """The best link that both ends of that PCIe link support."""


class VisibleDevices(msgspec.Struct, frozen=True):
    """The devices that one end sees."""

    rdma_files: tuple[str, ...] = ()
    """Names in /dev/infiniband."""
    hcas: tuple[str, ...] = ()
    """HCAs that those files open. A file with an unknown HCA is listed by the file's name."""
    netdevs: tuple[str, ...] = ()
    """All but `lo`."""


class HostFacts(msgspec.Struct, frozen=True):
    """The facts about a host that a number measured on it depends on."""

    hostname: str
    kernel: str
    processors: int
    usable_processors: int
    load_average: float
    """One-minute load when the end started, before it made any itself."""
    python: str
    nixl: str
    ucx: UcxPins
    ucx_version: str | None = None
    gpu_driver: str | None = None
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    """Processors that the end was pinned to. Empty if it was not pinned."""
    links: tuple[Link, ...] = ()
    visible: VisibleDevices = VisibleDevices()


class EndRecord(msgspec.Struct, frozen=True):
    """The observations of one end about itself over the timed iterations."""

    digest: str
    """blake2b-256 of the whole buffer after the last iteration, hexadecimal."""
    traffic: tuple[DeviceTraffic, ...]
    usage: EndUsage
    host: HostFacts


class Measurement(msgspec.Struct, frozen=True):
    """The initiator's report to its parent process."""

    backend: str
    connect_seconds: float
    """From loading the peer's metadata to a request that can be posted."""
    first_seconds: float
    """The very first transfer: it pays for lazily made connections."""
    seconds: tuple[float, ...]
    post_seconds: tuple[float, ...]
    protocols: tuple[str, ...]
    initiator: EndRecord
    target: EndRecord
    copy_seconds: float | None = None
    """Time that the initiator's GPU needs to copy one buffer within itself. None for host memory."""
    began: float = 0.0
    """CLOCK_MONOTONIC of the initiator's host, seconds, when the timed iterations began and ended."""
    ended: float = 0.0


class RunEnvironment(msgspec.Struct, frozen=True):
    """The circumstances of a measurement. Rates cannot be compared without them."""

    initiator: HostFacts
    target: HostFacts
    initiator_usage: EndUsage
    target_usage: EndUsage
    contention: str | None
    """Why the numbers are suspect, or None if both ends had a processor to themselves."""


class RateExpectation(msgspec.Struct, frozen=True):
    """A rate against the topology's promise."""

    outcome: Literal["met", "short", "unknown"] = "unknown"
    gigabits: float | None = None
    """Line rate of the promised device, or the declared rate of an emulated one."""
    share: float | None = None
    """Measured / line rate."""
    causes: tuple[ShortfallCause, ...] = ()
    """Observed causes of a shortfall, nearest to certain first. Empty if no observation explains it."""
    sentence: str = "no device was promised, so no rate was"


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """One measured pair of ends. Seconds, bytes, decimal GB/s."""

    event: str = "result"
    backend: str
    requested_backend: str = "UCX"
    op: TransferOp
    device: str = "cpu"
    block_size: int
    batch_size: int
    total_bytes: int
    iters: int
    warmup_iters: int
    avg_seconds: float
    min_seconds: float
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    avg_GBps: float  # noqa: N815 (the example's own spelling)
    verified: bool
    """The sink's buffer, wiped before the timed iterations, equals the source's afterwards."""
    emulated: bool
    declared_gigabits: float | None
    """The declared rate of a shaper in Gb/s, or None on hardware."""
    avg_post_seconds: float
    """The part of avg_seconds until the post returned. All of it on a blocking transport such as cma."""
    avg_transfer_seconds: float
    """The rest: polling until the transfer was done."""
    connect_seconds: float
    first_seconds: float
    path: PathProof
    environment: RunEnvironment
    path_class: str | None = None
    """PIX, PXB, PHB, NODE or SYS of GPU and NIC, or None if not known."""
    expectation: RateExpectation = RateExpectation()
    copy_GBps: float | None = None  # noqa: N815
    """Copy rate within the initiator's GPU, the most a transfer on it could reach. None without a GPU."""
    began: float = 0.0
    ended: float = 0.0


class Arm(msgspec.Struct, frozen=True):
    """The runs of one placement and their mean."""

    name: str
    device: str | None
    declared_gigabits: float | None
    runs: tuple[TransferReport, ...]
    mean_GBps: float  # noqa: N815
    spread: float
    """(fastest - slowest) / mean of the runs."""
    interval: Interval | None = None
    """95% interval of mean_GBps over the runs, or None with a single run."""
    gpu: str = "cpu"
    together: bool = False
    """Whether all pairs were driven at once."""
    overlap: float | None = None
    """Of pairs driven at once: the share of the longest one's time in which all were being timed."""


class AlignmentReport(msgspec.Struct, frozen=True, kw_only=True):
    """An aligned and an unaligned arm, interleaved, or one plain arm with nothing to compare it to."""

    emulated: bool
    label: str
    """One sentence that belongs beside every number of this report."""
    aligned: Arm | None = None
    unaligned: Arm | None = None
    plain: Arm | None = None
    pairs: tuple[Arm, ...] = ()
    """One arm per GPU and NIC, each alone, then the same all at once."""
    declared_ratio: float | None = None
    measured_ratio: float | None = None
    proved: bool
    """Every run verified its data, and the promised device carried it in every run that had a promise."""
    verdict: str

    @property
    def runs(self) -> tuple[TransferReport, ...]:
        """All runs, the arms in order."""
        return tuple(run for arm in self.arms for run in arm.runs)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms."""
        return (*(arm for arm in (self.aligned, self.unaligned, self.plain) if arm), *self.pairs)
