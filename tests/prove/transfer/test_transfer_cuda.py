"""GPU memory: the calls on a stand-in for the driver, and real GPUs where there are some."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpu.checks import no_gpu_reason
from tests.prove.transfer.fake_cuda import ADDRESSES, FakeCuda

from rackloom.core.transfer.values import EndConfig, TransferReport, TransferSpec, UcxPins
from rackloom.errors import Refused
from rackloom.prove.transfer.buffers import (
    CudaDriver,
    DeviceBuffer,
    HostBuffer,
    allocate_buffer,
)
from rackloom.prove.transfer.installation import nixl_missing_reason
from rackloom.prove.transfer.run import EndLocation, Lane, run_lanes


def missing_fabric() -> str | None:
    """Why no memory can be shared over multi-node NVLink here, or None."""
    try:
        DeviceBuffer("fabric:0", 1).close()
    except Refused as refused:
        return refused.reason
    return None


NO_GPU, NO_FABRIC = no_gpu_reason(), missing_fabric()


@given(st.integers(1, 5000), st.integers(0, 1 << 32))
def test_a_gpu_buffer_holds_the_same_bytes_as_host_memory(size: int, seed: int) -> None:
    """Both ends hash their own buffer, so the two kinds must fill, wipe and hash alike."""
    driver = FakeCuda()
    there, here = DeviceBuffer("cuda:1", size, driver.load), HostBuffer(size)
    for buffer in (there, here):
        buffer.fill(seed)
    assert there.digest() == here.digest()
    for buffer in (there, here):
        buffer.wipe()
    assert there.digest() == here.digest()
    assert there.blocks(size) == ((there.address, size, 1),)
    there.close()
    assert driver.memory == {}


def test_the_context_is_current_before_there_is_memory() -> None:
    driver = FakeCuda()
    DeviceBuffer("cuda:0", 8, driver.load)
    assert driver.calls.index("cuCtxSetCurrent") < driver.calls.index("cuMemAlloc_v2")


def test_gpus_are_found_by_ordinal_and_by_pci_address() -> None:
    driver = FakeCuda()
    assert CudaDriver(driver.load).addresses() == tuple(address.lower() for address in ADDRESSES)
    assert DeviceBuffer("cuda:0000:90:00.0", 8, driver.load).ordinal == 1
    with pytest.raises(Refused, match="no GPU 2: the CUDA driver finds 2"):
        DeviceBuffer("cuda:2", 8, driver.load)
    with pytest.raises(Refused, match="CUDA_ERROR_INVALID_DEVICE"):
        DeviceBuffer("cuda:0000:ff:00.0", 8, driver.load)


def test_fabric_memory_is_mapped_in_whole_grains_and_given_back() -> None:
    driver = FakeCuda(fabric=True)
    shared = DeviceBuffer("fabric:0", 3 << 20, driver.load)
    assert driver.handles == {1: 4 << 20}
    order = ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")
    assert [name for name in driver.calls if name in order] == list(order)
    other = DeviceBuffer("cuda:0", 3 << 20, driver.load)
    ctypes.memset(other.address, 7, 3 << 20)
    shared.copy_from(other)
    assert ctypes.string_at(shared.address, 2) == b"\x07\x07"
    shared.close()
    other.close()
    assert (driver.handles, driver.memory) == ({}, {})


def test_why_there_is_no_gpu_or_no_fabric_is_said() -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    assert "no CUDA driver here" in str(no_gpu_reason(absent))
    assert no_gpu_reason(FakeCuda(gpus=0).load) == "the CUDA driver finds no GPU"
    assert no_gpu_reason(FakeCuda().load) is None
    with pytest.raises(Refused, match="no multi-node NVLink domain"):
        DeviceBuffer("fabric:0", 1, FakeCuda().load)


def test_a_full_gpu_is_refused_with_the_drivers_own_word() -> None:
    with pytest.raises(Refused, match=r"cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        DeviceBuffer("cuda:0", 8, FakeCuda(failing="cuMemAlloc_v2").load)


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:", "rocm:0", ""])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(Refused, match="is no device"):
        allocate_buffer(device, 8)


def two_processes(device: str, transports: tuple[str, ...]) -> TransferReport:
    place = EndLocation(config=EndConfig(device=device, ucx=UcxPins(transports)))
    spec = TransferSpec(block_size=256 << 20, iters=20, warmup_iters=5, timeout_seconds=120)
    return run_lanes(spec, [Lane(place, place)])[0]


@pytest.mark.gpu
@pytest.mark.nixl
@pytest.mark.skipif(NO_GPU is not None, reason=f"needs a GPU: {NO_GPU}")
@pytest.mark.skipif(nixl_missing_reason() is not None, reason=str(nixl_missing_reason()))
def test_gpu_memory_of_two_processes_is_copied_by_cuda_ipc() -> None:
    report = two_processes("cuda:0", ("cuda_ipc", "cuda_copy", "tcp"))
    assert report.verified
    assert any(lane.startswith("cuda_ipc/") for lane in report.path.protocols), report.path
    assert report.copy_GBps is not None
    assert 0 < report.avg_GBps < 1.05 * report.copy_GBps
    assert "of what the GPU copies within itself" in report.expectation.sentence


@pytest.mark.gpu
@pytest.mark.nixl
@pytest.mark.skipif(NO_FABRIC is not None, reason=f"needs multi-node NVLink: {NO_FABRIC}")
@pytest.mark.skipif(nixl_missing_reason() is not None, reason=str(nixl_missing_reason()))
def test_fabric_memory_is_moved_by_cuda_ipc() -> None:
    report = two_processes("fabric:0", ("cuda_ipc", "cuda_copy", "tcp"))
    assert report.verified
    assert any(lane.startswith("cuda_ipc/") for lane in report.path.protocols), report.path
