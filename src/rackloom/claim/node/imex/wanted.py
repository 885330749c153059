"""What a claim asks of this node: the rules that need no look at the cluster."""

import re
from enum import StrEnum

import msgspec

from rackloom.claim.domain import names
from rackloom.claim.domain.configs import ChannelConfig, Config, DaemonConfig, decode_strict
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.domain.objects import AllocationMode
from rackloom.claim.node.imex.settings import ImexSettings
from rackloom.claim.node.values import Claim, Result
from rackloom.errors import Refused

_ISOLATED = re.compile(r"channel-([0-9]{1,3})")


class Kind(StrEnum):
    """Of a device, as its attribute `type` says."""

    CHANNEL = "channel"
    DAEMON = "daemon"
    ISOLATED_CHANNEL = names.ISOLATED_CHANNEL_TYPE


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One device of one ComputeDomain."""

    kind: Kind
    domain: str
    """UID of the ComputeDomain."""
    result: Result
    channel: int = 0
    every_channel: bool = False


def wanted_by(claim: Claim, settings: ImexSettings) -> Wanted:
    """What to prepare. Raises `Refused` for a claim that this node can never serve as it is."""
    if len(claim.results) != 1:
        raise Refused(
            f"claim {claim.ref.name} has {len(claim.results)} devices of {names.IMEX_DRIVER}, not one",
            nearest_fix="ask for one device in one request",
        )
    (result,) = claim.results
    kind, channel = _device_of(result)
    config = _config_of(claim, result, kind)
    match kind:
        case Kind.DAEMON:
            _check_daemon(claim, settings)
        case Kind.CHANNEL:
            _check_channel(settings)
        case Kind.ISOLATED_CHANNEL:
            _check_isolated(claim, config, settings)
    every = isinstance(config, ChannelConfig) and config.allocation_mode is AllocationMode.ALL
    return Wanted(
        kind=kind,
        domain=config.domain_id,
        result=result,
        channel=channel,
        every_channel=every and settings.mode is ImexMode.DRIVER_MANAGED,
    )


def _device_of(result: Result) -> tuple[Kind, int]:
    """Its kind and number."""
    isolated = _ISOLATED.fullmatch(result.device)
    if isolated is not None and result.pool.startswith(names.channel_pool_name("")):
        return Kind.ISOLATED_CHANNEL, int(isolated[1])
    kinds = {names.CHANNEL_DEVICE: Kind.CHANNEL, names.DAEMON_DEVICE: Kind.DAEMON}
    if result.device not in kinds:
        raise Refused(f"device {result.device} of pool {result.pool} is none of this node")
    return kinds[result.device], 0


def _config_of(claim: Claim, result: Result, kind: Kind) -> Config:
    """The last one for the request wins; all are checked, since each was written by somebody."""
    configs = [decode_strict(config.parameters) for config in claim.configs_for(result)]
    if not configs:
        raise Refused(
            f"claim {claim.ref.name} has no configuration for request {result.request}",
            nearest_fix="use the claim template that a ComputeDomain names in spec.channel",
        )
    fitting = DaemonConfig if kind is Kind.DAEMON else ChannelConfig
    for config in configs:
        if not isinstance(config, fitting):
            raise Refused(
                f"cannot apply ComputeDomain{type(config).__name__} to request {result.request},"
                f" which got {result.device}",
                nearest_fix=f"use ComputeDomain{fitting.__name__}, or the other device class",
            )
    return configs[-1]


def _check_daemon(claim: Claim, settings: ImexSettings) -> None:
    if settings.mode is ImexMode.HOST_MANAGED:
        raise Refused(
            "the host runs nvidia-imex on this node: no daemon claim is prepared here",
            nearest_fix="remove the DaemonSet that asks for it, or set the plugin to driverManaged",
        )
    # The device lets its holder manage the fabric of the whole node.
    if claim.ref.namespace not in settings.namespaces:
        places = " and ".join(settings.namespaces)
        raise Refused(
            f"daemon claims are prepared in namespace {places} only, not {claim.ref.namespace}",
            nearest_fix=f"use device class {names.CHANNEL_CLASS} for a workload",
        )


def _check_channel(settings: ImexSettings) -> None:
    if settings.isolation is Isolation.CHANNEL:
        raise Refused(
            f"node {settings.node} gives each job a channel of its own, and not {names.CHANNEL_DEVICE}",
            nearest_fix="delete the pod: it is then admitted with the claim that its ComputeDomain shares",
        )


def _check_isolated(claim: Claim, config: Config, settings: ImexSettings) -> None:
    if settings.isolation is not Isolation.CHANNEL:
        raise Refused(
            f"node {settings.node} gives a whole IMEX domain to one job, and no single channels",
            nearest_fix="set the plugin's isolation to channel on every node of the clique",
        )
    if claim.of_pod is not None:
        raise Refused(
            f"claim {claim.ref.name} was made from a template for pod {claim.of_pod}: its pods would share no"
            " memory with those of the same job, each having a channel of its own",
            nearest_fix="name the claim that the ComputeDomain shares among its pods as resourceClaimName",
        )
    if isinstance(config, ChannelConfig) and config.allocation_mode is AllocationMode.ALL:
        raise Refused(
            "allocationMode All would give this job the channels of all others",
            nearest_fix="use Single, or a clique in domain mode",
        )
