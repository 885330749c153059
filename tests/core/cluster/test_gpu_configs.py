import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster.device_configs import (
    GPU_CONFIG_API_VERSION,
    GpuConfig,
    MpsConfig,
    TimeSliceInterval,
    VfioDeviceConfig,
    decode_gpu_config,
    pinned_memory_limits,
)
from rackloom.errors import Refused

UUIDS = ("GPU-a", "GPU-b")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


def config(kind: str = "GpuConfig", **fields: object) -> dict[str, object]:
    return {"apiVersion": GPU_CONFIG_API_VERSION, "kind": kind, **fields}


def test_an_empty_config_shares_nothing():
    assert decode_gpu_config(config()) == GpuConfig()


@pytest.mark.parametrize(("interval", "number"), [("Default", 0), ("Short", 1), ("Medium", 2), ("Long", 3)])
def test_time_slices(interval, number):
    read = decode_gpu_config(
        config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}})
    )
    assert isinstance(read, GpuConfig)
    assert read.sharing is not None
    assert read.sharing.time_slicing_config is not None
    assert read.sharing.time_slicing_config.interval.number == number


def test_an_empty_time_slice_config_is_the_default_interval():
    read = decode_gpu_config(config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {}}))
    assert isinstance(read, GpuConfig)
    assert read.sharing is not None
    assert read.sharing.time_slicing_config is not None
    assert read.sharing.time_slicing_config.interval is TimeSliceInterval.DEFAULT


def test_passthrough():
    read = decode_gpu_config(config("VfioDeviceConfig", iommu={"enableAPIDevice": True}))
    assert isinstance(read, VfioDeviceConfig)
    assert read.iommu is not None
    assert read.iommu.enable_api_device


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (config(sharin={}), "sharin"),
        (config(sharing={"strategy": "Luck"}), "Luck"),
        (config(sharing={"strategy": "MPS", "timeSlicingConfig": {}}), "does not go with strategy MPS"),
        (config(sharing={"strategy": "TimeSlicing", "mpsConfig": {}}), "does not go with"),
        (
            config("MigDeviceConfig", sharing={"strategy": "MPS", "timeSlicingConfig": {}}),
            "timeSlicingConfig",
        ),
        (
            config(sharing={"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 101}}),
            "not 0 to 100",
        ),
        (config(sharing={"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "1M"}}), "1Mi"),
        (
            config(sharing={"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "1e99999"}}),
            "not between",
        ),
        (config("GpuClaim"), "GpuClaim"),
        ({"kind": "GpuConfig"}, "apiVersion is None"),
        ({"apiVersion": GPU_CONFIG_API_VERSION, "kind": ["GpuConfig"]}, "kind is"),
    ],
)
def test_what_is_wrong_is_named(wrong, message):
    with pytest.raises(Refused) as refused:
        decode_gpu_config(wrong)
    assert message in str(refused.value)


@given(JSON, JSON)
def test_no_input_is_a_surprise(sharing, other):
    for parameters in (config(sharing=sharing), config(sharing={"strategy": "MPS", "mpsConfig": other})):
        with contextlib.suppress(Refused):
            decode_gpu_config(parameters)


def test_memory_limits_are_whole_mebibytes_and_a_device_beats_the_default():
    mps = MpsConfig(
        default_pinned_device_memory_limit="1G", default_per_device_pinned_memory_limit={"1": "10M"}
    )
    assert pinned_memory_limits(mps, UUIDS) == {"GPU-a": "953M", "GPU-b": "9M"}


@pytest.mark.parametrize("selector", ["2", "-1", "GPU-c", "", "²"])
def test_a_limit_for_a_gpu_outside_the_claim_is_refused(selector):
    with pytest.raises(Refused, match="no such GPU"):
        pinned_memory_limits(MpsConfig(default_per_device_pinned_memory_limit={selector: "1Gi"}), UUIDS)
