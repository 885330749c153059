"""The opaque device configs of the IMEX driver, as they stand in claims and templates.

User input is decoded strictly: what is not understood is refused. What a checkpoint or an older release wrote
is decoded leniently, so that an upgrade or a downgrade strands no claim.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.claim.domain import names
from rackloom.claim.domain.objects import AllocationMode
from rackloom.errors import Refused


class ChannelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """ComputeDomainChannelConfig: a claim for IMEX channels of one ComputeDomain."""

    domain_id: str
    """UID of the ComputeDomain."""
    allocation_mode: AllocationMode = AllocationMode.SINGLE


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """ComputeDomainDaemonConfig: the claim of one ComputeDomain's IMEX daemon."""

    domain_id: str
    """UID of the ComputeDomain."""


Config = ChannelConfig | DaemonConfig

CHANNEL_KIND = "ComputeDomainChannelConfig"
DAEMON_KIND = "ComputeDomainDaemonConfig"
_COMMON = frozenset({"apiVersion", "kind", "domainID"})
_FIELDS = {CHANNEL_KIND: _COMMON | {"allocationMode"}, DAEMON_KIND: _COMMON}
_MODES = frozenset({"", *AllocationMode})


def decode_strict(parameters: Mapping[str, Any]) -> Config:
    """Decode user input. Raises Refused, whose reason names the field and whose fix says what to change."""
    kind = _known_kind(parameters)
    _refuse_unknown_fields(kind, parameters)
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


def decode_lenient(parameters: Mapping[str, Any]) -> Config:
    """Decode what was accepted before: unknown fields are ignored, any mode but All is Single.

    Raises Refused only when the kind or the domain cannot be told.
    """
    kind = _known_kind(parameters)
    domain_id = _domain_id(kind, parameters)
    if kind == DAEMON_KIND:
        return DaemonConfig(domain_id=domain_id)
    wants_all = parameters.get("allocationMode") == AllocationMode.ALL
    mode = AllocationMode.ALL if wants_all else AllocationMode.SINGLE
    return ChannelConfig(domain_id=domain_id, allocation_mode=mode)


def config_json(config: Config) -> dict[str, Any]:
    """A config as it stands under `opaque.parameters`."""
    kind = CHANNEL_KIND if isinstance(config, ChannelConfig) else DAEMON_KIND
    plain = {"apiVersion": names.API_VERSION, "kind": kind, "domainID": config.domain_id}
    if isinstance(config, ChannelConfig):
        plain["allocationMode"] = config.allocation_mode.value
    return plain


def _known_kind(parameters: Mapping[str, Any]) -> str:
    if not isinstance(parameters, Mapping):
        # The API server takes any JSON for opaque parameters.
        raise Refused("config: parameters is no object", nearest_fix=f"use {' or '.join(_FIELDS)}")
    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if version != names.API_VERSION:
        raise Refused(f"config: apiVersion is {version!r}", nearest_fix=f"use {names.API_VERSION}")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise Refused(f"config: kind is {kind!r}", nearest_fix=f"use {' or '.join(_FIELDS)}")
    return kind


def _refuse_unknown_fields(kind: str, parameters: Mapping[str, Any]) -> None:
    unknown = sorted(set(parameters) - _FIELDS[kind])
    if unknown:
        named = ", ".join(f'"{field}"' for field in unknown)
        raise Refused(
            f"{kind}: unknown field {named}",
            nearest_fix=f"remove it; the fields are {', '.join(sorted(_FIELDS[kind]))}",
        )


def _domain_id(kind: str, parameters: Mapping[str, Any]) -> str:
    domain_id = parameters.get("domainID")
    if not isinstance(domain_id, str) or not domain_id:
        what = "missing" if domain_id is None else f"{domain_id!r}"
        raise Refused(f"{kind}: domainID is {what}", nearest_fix="set it to the ComputeDomain's metadata.uid")
    return domain_id
