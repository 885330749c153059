"""MIG devices of one GPU through NVML: those that exist, those that could be made, making and destroying.

A MIG device is a compute instance in a GPU instance. A GPU instance that is made here gets one compute
instance, which has all of it. `make_mig_device` switches MIG mode on if it is off, and makes the instances
that are missing. It takes nothing that it finds at the place before the claim's first attempt.
`destroy_mig_device` goes the other way, and ends MIG mode after the last GPU instance. Both can be repeated
after a crash at any step: they query the driver for existing instances, and remember none.

Hopper and later switch MIG mode without a reset if no program uses the GPU. Ampere needs a reset, which is
left to the operator: such a GPU has partitions only while it is in MIG mode, and stays in it. A vGPU cannot
be partitioned.

Source: NVML's interface for multi-instance GPUs, and NVIDIA's MIG user guide.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_uint
from typing import Any

import structlog

from rackloom.claim.node.gpu.inventory import MigDevice, MigPartition, PlaceTaken
from rackloom.errors import Refused, Retry

log = structlog.get_logger(__name__)

MIG_RETRY_SECONDS = 1.0
_MEBIBYTE = 1 << 20
_VARIANTS = frozenset({7, 8})
"""Compute instance profiles with the slices of another: 1_SLICE_REV1 and 7_SLICE_NVL."""

# Existing MIG devices.


def mig_mode(nvml: Any, handle: Any) -> bool:
    """Whether the GPU is in MIG mode now (a pending mode waits for a reset)."""
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return False
    return bool(current)


def mig_devices(nvml: Any, handle: Any) -> tuple[MigDevice, ...]:
    """Every MIG device that exists on the GPU."""
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # Destroyed devices leave holes in the indexes.
        with suppress(nvml.NVMLError_NotFound):
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            found.append(_mig_device(nvml, handle, mig))
    return tuple(found)


def _mig_device(nvml: Any, parent: Any, handle: Any) -> MigDevice:
    gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
    info = nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(parent, gpu_instance))
    has = nvml.nvmlDeviceGetAttributes_v2(handle)
    return MigDevice(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        # NVML calls a MIG device `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
        profile=nvml.nvmlDeviceGetName(handle).rpartition(" MIG ")[2].strip(),
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


# MIG devices that could be made.


def mig_switchable(nvml: Any, handle: Any) -> bool:
    """Whether MIG mode is switched without a reset of the GPU."""
    return bool(nvml.nvmlDeviceGetArchitecture(handle) >= nvml.NVML_DEVICE_ARCH_HOPPER)


def mig_partitions(nvml: Any, handle: Any) -> tuple[MigPartition, ...]:
    """Every profile of the GPU at each of its places. Empty if no MIG device can be made now."""
    if _is_virtual(nvml, handle) or not (mig_switchable(nvml, handle) or mig_mode(nvml, handle)):
        return ()
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return tuple(
        MigPartition(
            gpu=uuid,
            profile=_text(profile.name).removeprefix("MIG ").strip(),
            profile_id=profile.id,
            placement_start=start,
            placement_size=size,
            compute_slices=profile.sliceCount,
            memory_bytes=profile.memorySizeMB * _MEBIBYTE,
            multiprocessors=profile.multiprocessorCount,
            copy_engines=profile.copyEngineCount,
            decoders=profile.decoderCount,
            encoders=profile.encoderCount,
            jpeg_engines=profile.jpegCount,
            ofa_engines=profile.ofaCount,
        )
        for profile in _gpu_profiles(nvml, handle)
        for start, size in _places(nvml, handle, profile)
    )


def _is_virtual(nvml: Any, handle: Any) -> bool:
    with suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        mode = nvml.nvmlDeviceGetVirtualizationMode(handle)
        return bool(mode & 0xFFFFFFFF == nvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU)
    return False


def _gpu_profiles(nvml: Any, handle: Any) -> Iterator[Any]:
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        with suppress(
            nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_FunctionNotFound
        ):
            yield nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)


def _places(nvml: Any, handle: Any, profile: Any) -> tuple[tuple[int, int], ...]:
    """First memory slice and number of slices of each place."""
    count = c_uint(0)
    try:
        nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile.id, None, byref(count))
        places = (nvml.c_nvmlGpuInstancePlacement_t * max(count.value, 1))()
        nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile.id, places, byref(count))
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
        return ()
    return tuple((place.start, place.size) for place in places[: count.value])


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


# Making and destroying.


def make_mig_device(nvml: Any, handle: Any, partition: MigPartition, *, began: bool) -> MigDevice:
    """Make the MIG device, or complete it if an earlier attempt `began`.

    Raises `Retry` while something is in the way, `PlaceTaken` if that is another program's device, and
    `Refused` if the GPU needs a reset.
    """
    with _in_use_named(nvml, f"a MIG device {partition.profile} cannot be made on GPU {partition.gpu}"):
        if not mig_mode(nvml, handle):
            _enter_mig_mode(nvml, handle, partition.gpu)
        found = _instances_at(nvml, handle, partition)
        if found and not began:
            raise PlaceTaken(
                f"a MIG device {partition.profile} that somebody else made is on GPU {partition.gpu}",
                after=MIG_RETRY_SECONDS,
            )
        instance = found[0] if found else _make_instance(nvml, handle, partition)
        computes = list(_compute_instances(nvml, instance))
        profile = _compute_profile(nvml, instance, partition)
        compute = computes[0] if computes else nvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)
        return _mig_device(nvml, handle, nvml.nvmlComputeInstanceGetInfo_v2(compute).device)


def _make_instance(nvml: Any, handle: Any, partition: MigPartition) -> Any:
    place = nvml.c_nvmlGpuInstancePlacement_t()
    place.start, place.size = partition.placement_start, partition.placement_size
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, partition.profile_id, byref(place))


def destroy_mig_device(nvml: Any, handle: Any, partition: MigPartition) -> None:
    """Destroy the MIG device if it exists. MIG mode ends with the last. Raises `Retry` while it is in use."""
    if not mig_mode(nvml, handle):
        return
    with _in_use_named(nvml, f"MIG device {partition.profile} of GPU {partition.gpu} cannot be destroyed"):
        # Destroy the GPU instance at the place, if there is one, and its compute instances.
        for instance in _instances_at(nvml, handle, partition):
            for compute in _compute_instances(nvml, instance):
                nvml.nvmlComputeInstanceDestroy(compute)
            nvml.nvmlGpuInstanceDestroy(instance)
    if _has_instances(nvml, handle) or not mig_switchable(nvml, handle):
        return
    try:
        leave_mig_mode(nvml, handle, partition.gpu)
    except Retry as retry:
        # No claim has a part of the GPU any more. A claim for the whole GPU tries again.
        log.warning("gpu.mig-mode-stays", gpu=partition.gpu, reason=retry.reason)


def leave_mig_mode(nvml: Any, handle: Any, uuid: str) -> None:
    """Take the GPU out of MIG mode. Raises `Retry` while it has GPU instances or is in use."""
    if not mig_mode(nvml, handle):
        return
    if _has_instances(nvml, handle):
        raise Retry(f"GPU {uuid} still has MIG devices", after=MIG_RETRY_SECONDS)
    with _in_use_named(nvml, f"GPU {uuid} cannot leave MIG mode"):
        status = nvml.nvmlDeviceSetMigMode(handle, nvml.NVML_DEVICE_MIG_DISABLE)
    if status != nvml.NVML_SUCCESS or mig_mode(nvml, handle):
        raise Retry(f"GPU {uuid} cannot leave MIG mode now: a program uses it", after=MIG_RETRY_SECONDS)


def _enter_mig_mode(nvml: Any, handle: Any, uuid: str) -> None:
    if not mig_switchable(nvml, handle):
        raise Refused(
            f"GPU {uuid} is not in MIG mode, and would need a reset",
            nearest_fix="switch MIG mode on and reset the GPU: nvidia-smi -mig 1",
        )
    status = nvml.nvmlDeviceSetMigMode(handle, nvml.NVML_DEVICE_MIG_ENABLE)
    if status != nvml.NVML_SUCCESS or not mig_mode(nvml, handle):
        raise Retry(f"GPU {uuid} cannot enter MIG mode now: a program uses it", after=MIG_RETRY_SECONDS)


def _instances_at(nvml: Any, handle: Any, partition: MigPartition) -> list[Any]:
    return [
        instance
        for instance in _gpu_instances(nvml, handle, partition.profile_id)
        if nvml.nvmlGpuInstanceGetInfo(instance).placement.start == partition.placement_start
    ]


def _has_instances(nvml: Any, handle: Any) -> bool:
    profiles = _gpu_profiles(nvml, handle)
    return any(_gpu_instances(nvml, handle, profile.id) for profile in profiles)


def _gpu_instances(nvml: Any, handle: Any, profile_id: int) -> list[Any]:
    most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    found, count = (nvml.c_nvmlGpuInstance_t * max(most, 1))(), c_uint(0)
    nvml.nvmlDeviceGetGpuInstances(handle, profile_id, found, byref(count))
    return list(found[: count.value])


def _compute_profiles(nvml: Any, instance: Any) -> Iterator[Any]:
    for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        if number in _VARIANTS:
            continue
        with suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            yield nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                instance, number, nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            )


def _compute_profile(nvml: Any, instance: Any, partition: MigPartition) -> int:
    """The profile of a compute instance that has all of the GPU instance."""
    for profile in _compute_profiles(nvml, instance):
        if profile.sliceCount == partition.compute_slices:
            return int(profile.id)
    raise Refused(f"the driver has no compute instance of all of {partition.profile} on GPU {partition.gpu}")


def _compute_instances(nvml: Any, instance: Any) -> Iterator[Any]:
    """Those of each profile: another program may have divided the remains of an attempt."""
    for profile in list(_compute_profiles(nvml, instance)):
        count = c_uint(0)
        found = (nvml.c_nvmlComputeInstance_t * max(profile.instanceCount, 1))()
        nvml.nvmlGpuInstanceGetComputeInstances(instance, profile.id, found, byref(count))
        yield from found[: count.value]


@contextmanager
def _in_use_named(nvml: Any, what: str) -> Iterator[None]:
    """Raises `Retry` for errors that pass once a program or another claim has let go of the GPU."""
    try:
        yield
    except nvml.NVMLError_InUse as error:
        raise Retry(f"{what}: a program uses the GPU", after=MIG_RETRY_SECONDS) from error
    except nvml.NVMLError_InsufficientResources as error:
        raise Retry(f"{what}: other MIG devices have its place", after=MIG_RETRY_SECONDS) from error
