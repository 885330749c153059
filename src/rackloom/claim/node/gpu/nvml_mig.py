"""The MIG devices of one GPU, as NVML tells of them."""

from collections.abc import Iterator
from typing import Any

from rackloom.claim.node.gpu.inventory import Mig

_MEBIBYTE = 1 << 20


def mig_mode(nvml: Any, handle: Any) -> bool:
    """Whether the GPU is in MIG mode now (a pending mode waits for a reset)."""
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return False
    return bool(current)


def mig_devices(nvml: Any, handle: Any) -> tuple[Mig, ...]:
    """Every MIG device that somebody has made on the GPU."""
    return tuple(_mig(nvml, handle, one) for one in _handles(nvml, handle))


def _handles(nvml: Any, handle: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue


def _mig(nvml: Any, parent: Any, handle: Any) -> Mig:
    gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
    info = nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(parent, gpu_instance))
    has = nvml.nvmlDeviceGetAttributes_v2(handle)
    return Mig(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        profile=_profile(nvml.nvmlDeviceGetName(handle)),
        gpu_instance=gpu_instance,
        compute_instance=nvml.nvmlDeviceGetComputeInstanceId(handle),
        profile_id=info.profileId,
        placement_start=info.placement.start,
        placement_size=info.placement.size,
        memory_bytes=has.memorySizeMB * _MEBIBYTE,
        multiprocessors=has.multiprocessorCount,
        copy_engines=has.sharedCopyEngineCount,
        decoders=has.sharedDecoderCount,
        encoders=has.sharedEncoderCount,
        jpeg_engines=has.sharedJpegCount,
        ofa_engines=has.sharedOfaCount,
    )


def _profile(name: str) -> str:
    """NVML calls a MIG device `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""
    return name.rpartition(" MIG ")[2].strip()
