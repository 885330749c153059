"""The requests of a claim: every rule that needs no cluster, and no input that breaks them."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rackloom.claim.node.imex.devices import ImexDeviceKind, ImexRequest, ImexSettings, imex_request
from rackloom.core.cluster import names
from rackloom.core.cluster.claims import AllocatedClaim, AllocatedDevice, ClaimRef, OpaqueConfig
from rackloom.core.cluster.names import ImexIsolation, ImexMode
from rackloom.errors import Refused

DOMAIN = "0f1c9f0e-3a1e-4a0f-9b62-000000000001"
SETTINGS = ImexSettings(node="n1", namespaces=("rackloom-imex",), domains=Path("/nowhere"))
CHANNEL = {"apiVersion": names.API_VERSION, "kind": "ComputeDomainChannelConfig", "domainID": DOMAIN}
DAEMON = {"apiVersion": names.API_VERSION, "kind": "ComputeDomainDaemonConfig", "domainID": DOMAIN}


def claim(*parameters, device="channel-0", pool="n1", namespace="team", count=1, of_pod=None):
    result = AllocatedDevice(driver="d", request="r/first", pool=pool, device=device)
    return AllocatedClaim(
        ref=ClaimRef(namespace=namespace, name="c", uid="u"),
        results=(result,) * count,
        configs=tuple(
            OpaqueConfig(source="FromClaim", requests=(), parameters=parameter) for parameter in parameters
        ),
        fingerprint="f",
        of_pod=of_pod,
    )


def test_a_channel():
    wanted = imex_request(claim(CHANNEL), SETTINGS)
    assert (wanted.kind, wanted.domain, wanted.channel, wanted.every_channel) == (
        ImexDeviceKind.CHANNEL,
        DOMAIN,
        0,
        False,
    )


def test_the_last_config_wins_but_none_may_be_wrong():
    everything = {**CHANNEL, "allocationMode": "All"}
    assert imex_request(claim(CHANNEL, everything), SETTINGS).every_channel
    with pytest.raises(Refused, match='strict decoding error: unknown field "mode"'):
        imex_request(claim({**CHANNEL, "mode": "All"}, everything), SETTINGS)


def test_a_config_for_another_request_does_not_count():
    other = OpaqueConfig(source="FromClaim", requests=("s",), parameters={"kind": "Nonsense"})
    ours = OpaqueConfig(source="FromClaim", requests=("r",), parameters=CHANNEL)
    wanted = imex_request(msgspec.structs.replace(claim(), configs=(ours, other)), SETTINGS)
    assert wanted.kind is ImexDeviceKind.CHANNEL


def test_a_daemon():
    wanted = imex_request(claim(DAEMON, device="daemon-0", namespace="rackloom-imex"), SETTINGS)
    assert (wanted.kind, wanted.domain) == (ImexDeviceKind.DAEMON, DOMAIN)


def test_an_isolated_channel():
    settings = msgspec.structs.replace(SETTINGS, isolation=ImexIsolation.CHANNEL)
    shared = claim(CHANNEL, device="channel-17", pool=names.channel_pool_name("cluster.1"))
    wanted = imex_request(shared, settings)
    assert (wanted.kind, wanted.channel) == (ImexDeviceKind.ISOLATED_CHANNEL, 17)
    with pytest.raises(Refused, match="would give this job the channels of all others"):
        imex_request(
            claim({**CHANNEL, "allocationMode": "All"}, device="channel-17", pool=shared.results[0].pool),
            settings,
        )
    with pytest.raises(Refused, match="gives a whole IMEX domain to one job"):
        imex_request(shared, SETTINGS)


def test_all_is_one_where_the_host_runs_imex():
    settings = msgspec.structs.replace(SETTINGS, mode=ImexMode.HOST_MANAGED)
    assert not imex_request(claim({**CHANNEL, "allocationMode": "All"}), settings).every_channel


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (claim(CHANNEL, count=2), "has 2 devices"),
        (claim(CHANNEL, count=0), "has 0 devices"),
        (claim(), "has no configuration for request r/first"),
        (claim(CHANNEL, device="gpu-0"), "device gpu-0 of pool n1 is none of this node"),
        (claim(DAEMON), "cannot apply ComputeDomainDaemonConfig to request r/first, which got channel-0"),
        (claim(CHANNEL, device="daemon-0"), "cannot apply ComputeDomainChannelConfig"),
        (claim(DAEMON, device="daemon-0"), "in namespace rackloom-imex only, not team"),
    ],
)
def test_what_can_never_be_prepared(wrong, why):
    with pytest.raises(Refused, match=why):
        imex_request(wrong, SETTINGS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
nearly = st.fixed_dictionaries(
    {},
    optional={
        "apiVersion": st.just(names.API_VERSION) | json_values,
        "kind": st.sampled_from(["ComputeDomainChannelConfig", "ComputeDomainDaemonConfig"]) | json_values,
        "domainID": st.just(DOMAIN) | json_values,
        "allocationMode": st.sampled_from(["All", "Single", ""]) | json_values,
    },
)


@given(
    st.lists(nearly | st.dictionaries(st.text(max_size=8), json_values, max_size=3), max_size=3),
    st.sampled_from(["channel-0", "daemon-0", "channel-5", "channel-", "channel-x", "gpu-0", "", "-1"]),
    st.sampled_from(["n1", names.channel_pool_name("cluster.1"), names.channel_pool_name(""), ""]),
    st.sampled_from(ImexIsolation),
    st.sampled_from(ImexMode),
)
@example(
    [CHANNEL],
    "channel-x",
    names.channel_pool_name("cluster.1"),
    ImexIsolation.CHANNEL,
    ImexMode.DRIVER_MANAGED,
)
def test_hostile_claims_are_refused_or_understood(parameters, device, pool, isolation, mode):
    settings = msgspec.structs.replace(SETTINGS, isolation=isolation, mode=mode)
    hostile = claim(*parameters, device=device, pool=pool, namespace="rackloom-imex")
    try:
        wanted = imex_request(hostile, settings)
    except Refused:
        return
    assert isinstance(wanted, ImexRequest)
    assert wanted.domain
    assert 0 <= wanted.channel < names.CHANNELS_PER_NODE
