"""What a claim asks of its NICs, as far as it tells itself. Pure; `Refused` for what can never be."""

from rackloom.claim.node.nic.profiles import NO_PROFILES, Profiles
from rackloom.claim.node.values import Claim, Result
from rackloom.claim.opaque.network import Interface, NetworkConfig, Presented
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


def config_of(claim: Claim, result: Result, profiles: Profiles = NO_PROFILES) -> NetworkConfig:
    """The configuration of one NIC: the last that applies, so that the claim wins over its class."""
    configs = [decode_network_config(one.parameters) for one in claim.configs_for(result)]
    config = profiles.applied_to(configs[-1]) if configs else NetworkConfig()
    _refuse_child(config.interface)
    return config


def _refuse_child(one: Interface) -> None:
    if one.type is not Presented.PASSTHROUGH:
        raise Refused(
            f"NetworkConfig: interface.type {one.type} is not served: the NIC itself moves into the pod",
            nearest_fix="leave interface.type out, so that the pod gets the whole NIC",
        )


def check(claim: Claim, profiles: Profiles = NO_PROFILES) -> None:
    """Refuse a claim that can never be prepared."""
    pod_of(claim)
    for result in claim.results:
        config_of(claim, result, profiles)
