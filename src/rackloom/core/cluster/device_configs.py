"""Opaque device configs of the IMEX driver and the GPU driver: decoding and rules.

A config is the `opaque.parameters` of a ResourceClaim. User input is decoded strictly: an unknown kind or
field raises Refused with the field and the change that helps, and all problems of a config are reported at
once. Configs from a checkpoint or an older release are decoded leniently (`decode_imex_config_leniently`), so
that an upgrade or a downgrade strands no claim.

- `compute-domain.nvidia.com`: ComputeDomainChannelConfig (IMEX channels of a ComputeDomain, one or all)
  and ComputeDomainDaemonConfig (its IMEX daemon).
- `gpu.nvidia.com`: GpuConfig and MigDeviceConfig (time slicing or MPS), and VfioDeviceConfig. Settings of
  a sharing strategy are refused with another strategy.

`pinned_memory_limits` computes the limits that the MPS daemon takes, in whole mebibytes rounded down. An
entry for one device, by UUID or by index in the claim, overrides the default. Source:
`resource.nvidia.com/v1beta1` of NVIDIA's DRA driver for GPUs, version 0.5.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from rackloom.core.allocate.quantity import Quantity
from rackloom.core.cluster import names
from rackloom.core.cluster.names import AllocationMode
from rackloom.errors import Refused

# Strict decoding, shared with the network config.


T = TypeVar("T", bound=msgspec.Struct)


class ConfigValue(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """Base of all config values."""


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`")


def decode_strictly(parameters: Mapping[str, Any], shape: type[T], kind: str) -> T:
    """Read `parameters`, less `apiVersion` and `kind`, as a `shape`. Raises Refused."""
    fields = {name: value for name, value in parameters.items() if name not in ("apiVersion", "kind")}
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError as error:
        known = ", ".join(shape.__struct_encode_fields__)
        text = _UNKNOWN_FIELD.sub(lambda found: unknown_fields_text([found[1]]), str(error))
        raise Refused(f"{kind}: {text}", nearest_fix=f"its fields are {known}") from error


def unknown_fields_text(names: Sequence[str]) -> str:
    """As Kubernetes' strict decoder words it, and so NVIDIA's driver: tools look for the words in events."""
    return "strict decoding error: " + ", ".join(f'unknown field "{name}"' for name in names)


def refuse_problems(kind: str, problems: tuple[str, ...], fix: str | None = None) -> None:
    """Raise Refused with all problems at once, so that one round of changes is enough."""
    if problems:
        raise Refused(f"{kind}: {'; '.join(problems)}", nearest_fix=fix)


# Driver compute-domain.nvidia.com: IMEX channels and daemons.


class ChannelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """ComputeDomainChannelConfig: a claim for IMEX channels of one ComputeDomain."""

    domain_id: str
    """UID of the ComputeDomain."""
    allocation_mode: AllocationMode = AllocationMode.SINGLE


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """ComputeDomainDaemonConfig: the claim of one ComputeDomain's IMEX daemon."""

    domain_id: str
    """UID of the ComputeDomain."""


ImexConfig = ChannelConfig | DaemonConfig

CHANNEL_KIND = "ComputeDomainChannelConfig"
DAEMON_KIND = "ComputeDomainDaemonConfig"
_COMMON_FIELDS = frozenset({"apiVersion", "kind", "domainID"})
_FIELDS_BY_KIND = {CHANNEL_KIND: _COMMON_FIELDS | {"allocationMode"}, DAEMON_KIND: _COMMON_FIELDS}
_MODES = frozenset({"", *AllocationMode})


def decode_imex_config(parameters: Mapping[str, Any]) -> ImexConfig:
    """Decode user input. Raises Refused, with the field in its reason and the change in its fix."""
    kind = _known_kind(parameters)
    if unknown := sorted(set(parameters) - _FIELDS_BY_KIND[kind]):
        raise Refused(
            f"{kind}: {unknown_fields_text(unknown)}",
            nearest_fix=f"remove it; the fields are {', '.join(sorted(_FIELDS_BY_KIND[kind]))}",
        )
    domain_id = _domain_id(kind, parameters)
    if kind == DAEMON_KIND:
        return DaemonConfig(domain_id=domain_id)
    mode = parameters.get("allocationMode", "")
    if not isinstance(mode, str) or mode not in _MODES:
        raise Refused(
            f"{kind}: allocationMode is {mode!r}",
            nearest_fix=f"use {' or '.join(AllocationMode)}, or leave it out",
        )
    return ChannelConfig(domain_id=domain_id, allocation_mode=AllocationMode(mode or AllocationMode.SINGLE))


def decode_imex_config_leniently(parameters: Mapping[str, Any]) -> ImexConfig:
    """Decode a config that was accepted before: unknown fields are ignored, any mode but All is Single.

    Raises Refused only if the kind or the domain cannot be determined.
    """
    kind = _known_kind(parameters)
    known = {name: value for name, value in parameters.items() if name in _FIELDS_BY_KIND[kind]}
    if known.get("allocationMode") != AllocationMode.ALL:
        known.pop("allocationMode", None)
    return decode_imex_config(known)


def imex_config_json(config: ImexConfig) -> dict[str, Any]:
    """A config as it is written under `opaque.parameters`."""
    kind = CHANNEL_KIND if isinstance(config, ChannelConfig) else DAEMON_KIND
    plain = {"apiVersion": names.API_VERSION, "kind": kind, "domainID": config.domain_id}
    if isinstance(config, ChannelConfig):
        plain["allocationMode"] = config.allocation_mode.value
    return plain


def _known_kind(parameters: Mapping[str, Any]) -> str:
    if not isinstance(parameters, Mapping):
        # The API server takes any JSON for opaque parameters.
        raise Refused("config: parameters is no object", nearest_fix=f"use {' or '.join(_FIELDS_BY_KIND)}")
    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if version != names.API_VERSION:
        raise Refused(f"config: apiVersion is {version!r}", nearest_fix=f"use {names.API_VERSION}")
    if not isinstance(kind, str) or kind not in _FIELDS_BY_KIND:
        raise Refused(f"config: kind is {kind!r}", nearest_fix=f"use {' or '.join(_FIELDS_BY_KIND)}")
    return kind


def _domain_id(kind: str, parameters: Mapping[str, Any]) -> str:
    domain_id = parameters.get("domainID")
    if not isinstance(domain_id, str) or not domain_id:
        what = "missing" if domain_id is None else f"{domain_id!r}"
        raise Refused(f"{kind}: domainID is {what}", nearest_fix="set it to the ComputeDomain's metadata.uid")
    return domain_id


# Driver gpu.nvidia.com: sharing and passthrough of GPUs.


GPU_CONFIG_API_VERSION = "resource.nvidia.com/v1beta1"
_MEBIBYTE = 1 << 20
_MIN_BYTES, _MAX_BYTES = Quantity(_MEBIBYTE), Quantity(2**63 - 1)


class SharingStrategy(StrEnum):
    """How several containers share one GPU."""

    TIME_SLICING = "TimeSlicing"
    MPS = "MPS"


class TimeSliceInterval(StrEnum):
    """A time slice, as `nvidia-smi compute-policy --set-timeslice` knows them: 0 to 3 in this order."""

    DEFAULT = "Default"
    SHORT = "Short"
    MEDIUM = "Medium"
    LONG = "Long"

    @property
    def number(self) -> int:
        """The tool's own number for it."""
        return list(TimeSliceInterval).index(self)


class VfioBackendPolicy(StrEnum):
    """The VFIO interface that a passed-through GPU is given by."""

    LEGACY_ONLY = "LegacyOnly"
    PREFER_IOMMUFD = "PreferIommuFD"


class TimeSlicingConfig(ConfigValue, frozen=True, kw_only=True):
    """Time slices for all that share the GPU."""

    interval: TimeSliceInterval = TimeSliceInterval.DEFAULT


class MpsConfig(ConfigValue, frozen=True, kw_only=True):
    """The default limits of each client of a Multi-Process Service daemon."""

    default_active_thread_percentage: int | None = None
    default_pinned_device_memory_limit: str | None = None
    default_per_device_pinned_memory_limit: Mapping[str, str] = {}
    multi_user: bool | None = None


class GpuSharing(ConfigValue, frozen=True, kw_only=True):
    """A strategy, with the settings of that strategy only."""

    strategy: SharingStrategy
    time_slicing_config: TimeSlicingConfig | None = None
    mps_config: MpsConfig | None = None


class MigSharing(ConfigValue, frozen=True, kw_only=True):
    """As for a GPU. A MIG device has no separate time slices, so TimeSlicing changes nothing there."""

    strategy: SharingStrategy
    mps_config: MpsConfig | None = None


class IommuConfig(ConfigValue, frozen=True, kw_only=True):
    """How the IOMMU is reached from inside."""

    backend_policy: VfioBackendPolicy = VfioBackendPolicy.LEGACY_ONLY
    enable_api_device: bool = msgspec.field(default=False, name="enableAPIDevice")


class GpuConfig(ConfigValue, frozen=True, kw_only=True):
    """For a whole GPU."""

    sharing: GpuSharing | None = None


class MigDeviceConfig(ConfigValue, frozen=True, kw_only=True):
    """For a MIG device."""

    sharing: MigSharing | None = None


class VfioDeviceConfig(ConfigValue, frozen=True, kw_only=True):
    """For a GPU that is passed through to a virtual machine."""

    iommu: IommuConfig | None = None


GpuDeviceConfig = GpuConfig | MigDeviceConfig | VfioDeviceConfig
_TYPE_BY_KIND: dict[str, type[GpuDeviceConfig]] = {
    "GpuConfig": GpuConfig,
    "MigDeviceConfig": MigDeviceConfig,
    "VfioDeviceConfig": VfioDeviceConfig,
}


def decode_gpu_config(parameters: Mapping[str, Any]) -> GpuDeviceConfig:
    """Read and check a claim's config for driver `gpu.nvidia.com`. Raises Refused."""
    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if version != GPU_CONFIG_API_VERSION:
        raise Refused(f"config: apiVersion is {version!r}", nearest_fix=f"use {GPU_CONFIG_API_VERSION}")
    shape = _TYPE_BY_KIND.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise Refused(f"config: kind is {kind!r}", nearest_fix=f"use one of {', '.join(_TYPE_BY_KIND)}")
    config = decode_strictly(parameters, shape, shape.__name__)
    refuse_problems(shape.__name__, tuple(_gpu_config_problems(config)))
    return config


def pinned_memory_limits(mps: MpsConfig, uuids: Sequence[str]) -> dict[str, str]:
    """Each GPU's limit as the MPS daemon takes it, `"953M"`. `uuids` are the claim's GPUs in order.

    An entry for one device, by UUID or by index in the claim, overrides the default. Raises Refused.
    """
    limits: dict[str, str] = {}
    if mps.default_pinned_device_memory_limit is not None:
        limits = dict.fromkeys(uuids, _mebibytes(mps.default_pinned_device_memory_limit))
    for selector, amount in mps.default_per_device_pinned_memory_limit.items():
        limits[_selected_uuid(selector, uuids)] = _mebibytes(amount)
    return limits


def _gpu_config_problems(config: GpuDeviceConfig) -> list[str]:
    if isinstance(config, VfioDeviceConfig) or config.sharing is None:
        return []
    sharing = config.sharing
    found = []
    if sharing.mps_config is not None:
        if sharing.strategy is not SharingStrategy.MPS:
            found.append(f"sharing.mpsConfig does not go with strategy {sharing.strategy}")
        found += _mps_problems(sharing.mps_config)
    slices = sharing.time_slicing_config if isinstance(sharing, GpuSharing) else None
    if slices is not None and sharing.strategy is not SharingStrategy.TIME_SLICING:
        found.append(f"sharing.timeSlicingConfig does not go with strategy {sharing.strategy}")
    return found


def _mps_problems(mps: MpsConfig) -> Iterator[str]:
    share = mps.default_active_thread_percentage
    if share is not None and not 0 <= share <= 100:
        yield f"sharing.mpsConfig.defaultActiveThreadPercentage is {share}, not 0 to 100"
    limits = [*mps.default_per_device_pinned_memory_limit.values(), mps.default_pinned_device_memory_limit]
    for limit in limits:
        try:
            if limit is not None:
                _mebibytes(limit)
        except Refused as refused:
            yield refused.reason


def _mebibytes(amount: str) -> str:
    """A quantity in the daemon's whole mebibytes, rounded down. Raises Refused if it rounds to zero."""
    try:
        size = Quantity.parse(amount)
    except ValueError as error:
        raise Refused(f"pinned memory limit {amount!r}: {error}") from error
    if not _MIN_BYTES <= size <= _MAX_BYTES:
        raise Refused(f"pinned memory limit {amount!r} is not between 1Mi and {_MAX_BYTES.unscaled} bytes")
    whole = size.unscaled * 10**size.scale if size.scale >= 0 else size.unscaled // 10**-size.scale
    return f"{whole // _MEBIBYTE}M"


def _selected_uuid(selector: str, uuids: Sequence[str]) -> str:
    if selector in uuids:
        return selector
    if selector.isascii() and selector.isdigit() and int(selector) < len(uuids):
        return uuids[int(selector)]
    raise Refused(
        f"pinned memory limit for {selector!r}: the claim has no such GPU",
        nearest_fix=f"use a UUID of the claim, or an index below {len(uuids)}",
    )
