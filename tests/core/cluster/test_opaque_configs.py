"""Opaque configs: strict for new ones from users, lenient for those that were accepted before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster.device_configs import (
    ChannelConfig,
    DaemonConfig,
    decode_imex_config,
    decode_imex_config_leniently,
    imex_config_json,
)
from rackloom.core.cluster.names import AllocationMode
from rackloom.errors import Refused

CHANNEL = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "ComputeDomainChannelConfig",
    "domainID": "b1f9",
    "allocationMode": "All",
}
DAEMON = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "ComputeDomainDaemonConfig",
    "domainID": "b1f9",
}
CONFIGS = st.one_of(
    st.builds(ChannelConfig, domain_id=st.text(min_size=1), allocation_mode=st.sampled_from(AllocationMode)),
    st.builds(DaemonConfig, domain_id=st.text(min_size=1)),
)


def without(config: dict, field: str) -> dict:
    return {name: value for name, value in config.items() if name != field}


@given(CONFIGS)
def test_what_is_written_is_read(config):
    assert (
        decode_imex_config(imex_config_json(config))
        == decode_imex_config_leniently(imex_config_json(config))
        == config
    )


@pytest.mark.parametrize("mode", [{}, {"allocationMode": ""}, {"allocationMode": "Single"}])
def test_one_channel_is_the_default(mode):
    config = decode_imex_config(without(CHANNEL, "allocationMode") | mode)
    assert config == ChannelConfig(domain_id="b1f9", allocation_mode=AllocationMode.SINGLE)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        (CHANNEL | {"domainId": "x"}, '"domainId"'),
        (DAEMON | {"allocationMode": "All"}, '"allocationMode"'),
        (without(CHANNEL, "domainID"), "domainID is missing"),
        (CHANNEL | {"domainID": ""}, "domainID is ''"),
        (CHANNEL | {"domainID": 7}, "domainID is 7"),
        (CHANNEL | {"allocationMode": "all"}, "allocationMode is 'all'"),
        (CHANNEL | {"allocationMode": ["All"]}, "allocationMode is"),
        (CHANNEL | {"kind": "GpuConfig"}, "kind is 'GpuConfig'"),
        (CHANNEL | {"kind": ["x"]}, "kind is"),
        (without(CHANNEL, "kind"), "kind is None"),
        ([CHANNEL], "no object"),
        (CHANNEL | {"apiVersion": "resource.nvidia.com/v1"}, "apiVersion is"),
    ],
)
def test_a_refusal_names_the_field_and_a_fix(parameters, named):
    with pytest.raises(Refused) as refused:
        decode_imex_config(parameters)
    assert named in refused.value.reason
    assert refused.value.nearest_fix


def test_what_an_older_release_wrote_is_still_read():
    assert decode_imex_config_leniently(CHANNEL | {"later": 1, "allocationMode": "Some"}) == ChannelConfig(
        domain_id="b1f9"
    )
    assert decode_imex_config_leniently(DAEMON | {"later": 1}) == DaemonConfig(domain_id="b1f9")
    with pytest.raises(Refused):
        decode_imex_config_leniently(without(CHANNEL, "domainID"))
