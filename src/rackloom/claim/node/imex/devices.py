"""IMEX channel and daemon devices: those that a node publishes, and those that a claim may have.

A node publishes channel-0 and daemon-0, with the clique and the tray's join key as attributes. In
isolation mode `channel` the controller publishes the channels of a whole clique instead, and the node
only daemon-0. If the host runs nvidia-imex itself, no daemon is published. All devices are as healthy
as the fabric of the node's GPUs.

`imex_request` decides from a claim and the settings alone which device to prepare, and refuses requests that
this node can never serve:

- A claim has one device and a configuration that fits it. The last configuration wins, but all of them
  are checked.
- Daemon claims are prepared in the namespaces of IMEX daemons only: the management device lets its holder
  manage the fabric of the whole node.
- An isolated channel must not come from a claim template (each pod would get another channel), and must
  not request all channels (it would get those of other jobs).
"""

import re
from enum import StrEnum
from pathlib import Path

import msgspec

from rackloom.claim.node.cdi import ImexKernel
from rackloom.claim.node.fabric import FabricMonitor, NodeFabric
from rackloom.claim.node.plugin import DeviceHealth, DevicePool, Health
from rackloom.core.allocate.attributes import TRAY, clique_attributes, device_attributes, tray_attributes
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster import names
from rackloom.core.cluster.claims import AllocatedClaim, AllocatedDevice
from rackloom.core.cluster.device_configs import ChannelConfig, DaemonConfig, ImexConfig, decode_imex_config
from rackloom.core.cluster.names import AllocationMode, ImexIsolation, ImexMode
from rackloom.errors import Refused

# Settings.


class ImexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one node."""

    node: str
    namespaces: tuple[str, ...]
    """Of IMEX daemons, their claims and clique objects. New ones come to the first. The others are those of
    earlier installations, whose daemons run until their ComputeDomain is deleted."""
    domains: Path
    """A directory for each ComputeDomain, which its daemon sees as /imexd."""
    mode: ImexMode = ImexMode.DRIVER_MANAGED
    isolation: ImexIsolation = ImexIsolation.DOMAIN
    """Of a node without the label."""
    kernel: ImexKernel = ImexKernel()
    boot_id: str = ""
    """Of the node. If it is empty, daemons of an earlier boot look like those of this one."""


# The requests of a claim. Pure.


_ISOLATED_CHANNEL = re.compile(r"channel-([0-9]{1,3})")


class ImexDeviceKind(StrEnum):
    """Of a device, as in its attribute `type`."""

    CHANNEL = "channel"
    DAEMON = "daemon"
    ISOLATED_CHANNEL = names.ISOLATED_CHANNEL_TYPE


class ImexRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One device of one ComputeDomain."""

    kind: ImexDeviceKind
    domain: str
    """UID of the ComputeDomain."""
    result: AllocatedDevice
    channel: int = 0
    every_channel: bool = False


def imex_request(claim: AllocatedClaim, settings: ImexSettings) -> ImexRequest:
    """The device to prepare. Raises `Refused` if this node can never serve the claim as it is."""
    if len(claim.results) != 1:
        raise Refused(
            f"claim {claim.ref.name} has {len(claim.results)} devices of {names.IMEX_DRIVER}, not one",
            nearest_fix="ask for one device in one request",
        )
    (result,) = claim.results
    kind, channel = _device_of(result)
    config = _config_of(claim, result, kind)
    every = isinstance(config, ChannelConfig) and config.allocation_mode is AllocationMode.ALL
    match kind:
        case ImexDeviceKind.DAEMON:
            _check_daemon(claim, settings)
        case ImexDeviceKind.CHANNEL if settings.isolation is ImexIsolation.CHANNEL:
            raise Refused(
                f"node {settings.node} gives each job a channel of its own, and not {names.CHANNEL_DEVICE}",
                nearest_fix="delete the pod: it is then admitted with the claim"
                " that its ComputeDomain shares",
            )
        case ImexDeviceKind.ISOLATED_CHANNEL:
            _check_isolated(claim, every, settings)
    return ImexRequest(
        kind=kind,
        domain=config.domain_id,
        result=result,
        channel=channel,
        every_channel=every and settings.mode is ImexMode.DRIVER_MANAGED,
    )


def _device_of(result: AllocatedDevice) -> tuple[ImexDeviceKind, int]:
    """Its kind and number."""
    isolated = _ISOLATED_CHANNEL.fullmatch(result.device)
    if isolated is not None and result.pool.startswith(names.channel_pool_name("")):
        return ImexDeviceKind.ISOLATED_CHANNEL, int(isolated[1])
    kinds = {names.CHANNEL_DEVICE: ImexDeviceKind.CHANNEL, names.DAEMON_DEVICE: ImexDeviceKind.DAEMON}
    if result.device not in kinds:
        raise Refused(f"device {result.device} of pool {result.pool} is none of this node")
    return kinds[result.device], 0


def _config_of(claim: AllocatedClaim, result: AllocatedDevice, kind: ImexDeviceKind) -> ImexConfig:
    """The last one for the request wins. All are checked: a mistake in another one must not go unnoticed."""
    configs = [decode_imex_config(config.parameters) for config in claim.configs_for(result)]
    if not configs:
        raise Refused(
            f"claim {claim.ref.name} has no configuration for request {result.request}",
            nearest_fix="use the claim template that a ComputeDomain names in spec.channel",
        )
    fitting = DaemonConfig if kind is ImexDeviceKind.DAEMON else ChannelConfig
    for config in configs:
        if not isinstance(config, fitting):
            raise Refused(
                f"cannot apply ComputeDomain{type(config).__name__} to request {result.request},"
                f" which got {result.device}",
                nearest_fix=f"use ComputeDomain{fitting.__name__}, or the other device class",
            )
    return configs[-1]


def _check_daemon(claim: AllocatedClaim, settings: ImexSettings) -> None:
    if settings.mode is ImexMode.HOST_MANAGED:
        raise Refused(
            "the host runs nvidia-imex on this node: no daemon claim is prepared here",
            nearest_fix="remove the DaemonSet that asks for it, or set the plugin to driverManaged",
        )
    # The device lets its holder manage the fabric of the whole node.
    if claim.ref.namespace not in settings.namespaces:
        namespaces = " and ".join(settings.namespaces)
        raise Refused(
            f"daemon claims are prepared in namespace {namespaces} only, not {claim.ref.namespace}",
            nearest_fix=f"use device class {names.CHANNEL_CLASS} for a workload",
        )


def _check_isolated(claim: AllocatedClaim, every_channel: bool, settings: ImexSettings) -> None:
    if settings.isolation is not ImexIsolation.CHANNEL:
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
    if every_channel:
        raise Refused(
            "allocationMode All would give this job the channels of all others",
            nearest_fix="use Single, or a clique in domain mode",
        )


# The node's published devices.


def imex_pool(settings: ImexSettings, clique: str, fabric: NodeFabric) -> DevicePool:
    """channel-0 and daemon-0, as far as this node publishes them.

    In channel mode the controller publishes the channels of a whole clique. A host that runs nvidia-imex
    itself needs no daemon.
    """
    trays = {gpu.tray for gpu in fabric.gpus if gpu.tray is not None}
    shared = {
        **clique_attributes(clique),
        **tray_attributes(gpu.key for gpu in fabric.gpus),
        TRAY: trays.pop() if len(trays) == 1 else None,
    }
    kinds = {}
    if settings.isolation is not ImexIsolation.CHANNEL:
        kinds[names.CHANNEL_DEVICE] = ImexDeviceKind.CHANNEL
    if settings.mode is not ImexMode.HOST_MANAGED:
        kinds[names.DAEMON_DEVICE] = ImexDeviceKind.DAEMON
    devices = (
        Device(name=name, attributes=device_attributes({"type": kind.value, "id": 0, **shared}))
        for name, kind in kinds.items()
    )
    return DevicePool(name=settings.node, devices=tuple(devices))


def imex_device_health(pool: DevicePool, monitor: FabricMonitor) -> tuple[DeviceHealth, ...]:
    """Every device of the node is as healthy as the fabric of the node."""
    health, message = _fabric_health(monitor)
    at = monitor.observed_at
    return tuple(
        DeviceHealth(pool=pool.name, device=device.name, health=health, observed_at=at, message=message)
        for device in pool.devices
    )


def _fabric_health(monitor: FabricMonitor) -> tuple[Health, str]:
    if monitor.trouble is not None:
        return Health.UNKNOWN, monitor.trouble
    for health in (Health.UNHEALTHY, Health.UNKNOWN):
        for gpu in monitor.fabric.gpus:
            if gpu.health is health:
                return health, f"{gpu.name}: {gpu.health_message}"
    return Health.HEALTHY, ""
