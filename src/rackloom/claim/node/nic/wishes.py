"""What a claim asks of its NICs, as far as it tells itself. Pure; `Refused` for what can never be."""

from rackloom.claim.node.values import Claim, Result
from rackloom.claim.opaque.network import NetworkConfig
from rackloom.claim.opaque.network_rules import decode_network_config
from rackloom.errors import Refused


def pod_of(claim: Claim) -> str:
    """UID of the one pod that may use the claim: an interface is in one namespace at a time."""
    if len(claim.consumers) != 1:
        raise Refused(
            f"claim {claim.ref.namespace}/{claim.ref.name} is reserved for {len(claim.consumers)} consumers;"
            " a NIC serves one pod",
            nearest_fix="give each pod a claim of its own, with a ResourceClaimTemplate",
        )
    (one,) = claim.consumers
    if one.resource != "pods":
        raise Refused(f"claim {claim.ref.namespace}/{claim.ref.name} is for {one.resource}, not a pod")
    return one.uid


def config_of(claim: Claim, result: Result) -> NetworkConfig:
    """The configuration of one NIC: the last that applies, so that the claim wins over its class."""
    configs = [decode_network_config(one.parameters) for one in claim.configs_for(result)]
    config = configs[-1] if configs else NetworkConfig()
    if config.profile is not None:
        raise Refused(
            f"NetworkConfig: profile {config.profile!r} is not known: this node has no source of profiles",
            nearest_fix="write the settings of the profile into the config",
        )
    if config.interface.dhcp:
        raise Refused(
            "NetworkConfig: interface.dhcp is not supported",
            nearest_fix="give interface.addresses, or none to keep those that the interface has on the host",
        )
    return config


def check(claim: Claim) -> None:
    """Refuse a claim that can never be prepared."""
    pod_of(claim)
    for result in claim.results:
        config_of(claim, result)
