"""The opaque configs of `gpu.nvidia.com`: GpuConfig, MigDeviceConfig, VfioDeviceConfig.

Source: `resource.nvidia.com/v1beta1` of NVIDIA's DRA driver for GPUs, version 0.5.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from rackloom.claim.allocate.quantity import Quantity
from rackloom.claim.opaque.decode import ConfigValue, read_strictly, refuse
from rackloom.errors import Refused

API_VERSION = "resource.nvidia.com/v1beta1"
_MEBIBYTE = 1 << 20
_MEBIBYTE_QUANTITY, _MOST = Quantity(_MEBIBYTE), Quantity(2**63 - 1)


class Strategy(StrEnum):
    """How several containers share one GPU."""

    TIME_SLICING = "TimeSlicing"
    MPS = "MPS"


class Interval(StrEnum):
    """A time slice, as `nvidia-smi compute-policy --set-timeslice` knows them: 0 to 3 in this order."""

    DEFAULT = "Default"
    SHORT = "Short"
    MEDIUM = "Medium"
    LONG = "Long"

    @property
    def number(self) -> int:
        """The tool's own number for it."""
        return list(Interval).index(self)


class BackendPolicy(StrEnum):
    """Which of VFIO's interfaces a passed-through GPU is given by."""

    LEGACY_ONLY = "LegacyOnly"
    PREFER_IOMMUFD = "PreferIommuFD"


class TimeSlicing(ConfigValue, frozen=True, kw_only=True):
    """Time slices for all that share the GPU."""

    interval: Interval = Interval.DEFAULT


class Mps(ConfigValue, frozen=True, kw_only=True):
    """What each client of a Multi-Process Service daemon may use by default."""

    default_active_thread_percentage: int | None = None
    default_pinned_device_memory_limit: str | None = None
    default_per_device_pinned_memory_limit: Mapping[str, str] = {}
    multi_user: bool | None = None


class Sharing(ConfigValue, frozen=True, kw_only=True):
    """A strategy, with the settings of that strategy only."""

    strategy: Strategy
    time_slicing_config: TimeSlicing | None = None
    mps_config: Mps | None = None


class MigSharing(ConfigValue, frozen=True, kw_only=True):
    """As for a GPU; a MIG device has no time slices of its own, so TimeSlicing changes nothing there."""

    strategy: Strategy
    mps_config: Mps | None = None


class Iommu(ConfigValue, frozen=True, kw_only=True):
    """How the IOMMU is reached from inside."""

    backend_policy: BackendPolicy = BackendPolicy.LEGACY_ONLY
    enable_api_device: bool = msgspec.field(default=False, name="enableAPIDevice")


class GpuConfig(ConfigValue, frozen=True, kw_only=True):
    """For a whole GPU."""

    sharing: Sharing | None = None


class MigDeviceConfig(ConfigValue, frozen=True, kw_only=True):
    """For a MIG device."""

    sharing: MigSharing | None = None


class VfioDeviceConfig(ConfigValue, frozen=True, kw_only=True):
    """For a GPU that is passed through to a virtual machine."""

    iommu: Iommu | None = None


DeviceConfig = GpuConfig | MigDeviceConfig | VfioDeviceConfig
_SHAPES: dict[str, type[DeviceConfig]] = {
    "GpuConfig": GpuConfig,
    "MigDeviceConfig": MigDeviceConfig,
    "VfioDeviceConfig": VfioDeviceConfig,
}


def decode_gpu_config(parameters: Mapping[str, Any]) -> DeviceConfig:
    """Read and check what a claim says for driver `gpu.nvidia.com`. Raises Refused."""
    if parameters.get("apiVersion") != API_VERSION:
        raise Refused(
            f"config: apiVersion is {parameters.get('apiVersion')!r}", nearest_fix=f"use {API_VERSION}"
        )
    kind = parameters.get("kind")
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise Refused(f"config: kind is {kind!r}", nearest_fix=f"use one of {', '.join(_SHAPES)}")
    config = read_strictly(parameters, shape, shape.__name__)
    refuse(shape.__name__, tuple(_problems(config)))
    return config


def pinned_memory_limits(mps: Mps, uuids: Sequence[str]) -> dict[str, str]:
    """Each GPU's limit as the MPS daemon takes it, `"953M"`; `uuids` are the claim's GPUs in order.

    A per-device entry, by UUID or by place in the claim, beats the default. Raises Refused.
    """
    limits: dict[str, str] = {}
    if mps.default_pinned_device_memory_limit is not None:
        limits = dict.fromkeys(uuids, _mebibytes(mps.default_pinned_device_memory_limit))
    for selector, amount in mps.default_per_device_pinned_memory_limit.items():
        limits[_selected(selector, uuids)] = _mebibytes(amount)
    return limits


def _problems(config: DeviceConfig) -> list[str]:
    if isinstance(config, VfioDeviceConfig) or config.sharing is None:
        return []
    sharing = config.sharing
    found = []
    if sharing.mps_config is not None:
        if sharing.strategy is not Strategy.MPS:
            found.append(f"sharing.mpsConfig does not go with strategy {sharing.strategy}")
        found += _mps_problems(sharing.mps_config)
    slices = sharing.time_slicing_config if isinstance(sharing, Sharing) else None
    if slices is not None and sharing.strategy is not Strategy.TIME_SLICING:
        found.append(f"sharing.timeSlicingConfig does not go with strategy {sharing.strategy}")
    return found


def _mps_problems(mps: Mps) -> list[str]:
    found = []
    share = mps.default_active_thread_percentage
    if share is not None and not 0 <= share <= 100:
        found.append(f"sharing.mpsConfig.defaultActiveThreadPercentage is {share}, not 0 to 100")
    amounts = [*mps.default_per_device_pinned_memory_limit.values()]
    if mps.default_pinned_device_memory_limit is not None:
        amounts.append(mps.default_pinned_device_memory_limit)
    for amount in amounts:
        try:
            _mebibytes(amount)
        except Refused as refused:
            found.append(refused.reason)
    return found


def _mebibytes(amount: str) -> str:
    """A quantity in the daemon's whole mebibytes, rounded down; what rounds to none is refused."""
    try:
        size = Quantity.parse(amount)
    except ValueError as error:
        raise Refused(f"pinned memory limit {amount!r}: {error}") from error
    if not _MEBIBYTE_QUANTITY <= size <= _MOST:
        raise Refused(f"pinned memory limit {amount!r} is not between 1Mi and {_MOST.unscaled} bytes")
    whole = size.unscaled * 10**size.scale if size.scale >= 0 else size.unscaled // 10**-size.scale
    return f"{whole // _MEBIBYTE}M"


def _selected(selector: str, uuids: Sequence[str]) -> str:
    if selector in uuids:
        return selector
    if selector.isascii() and selector.isdigit() and int(selector) < len(uuids):
        return uuids[int(selector)]
    raise Refused(
        f"pinned memory limit for {selector!r}: the claim has no such GPU",
        nearest_fix=f"use a UUID of the claim, or an index below {len(uuids)}",
    )
