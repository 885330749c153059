# ruff: noqa: N802, N815 (the driver names its functions)
"""A CUDA driver of plain host memory, for the order and arguments of the calls. It copies without a GPU."""

import ctypes
from collections.abc import Callable
from typing import Any

ADDRESSES = ("0000:8F:00.0", "0000:90:00.0")
NOT_FOUND, OUT_OF_MEMORY = 101, 2


class FakeCuda:
    """Stands in for `ctypes.CDLL("libcuda.so.1")`. `calls` has the names in order."""

    def __init__(self, *, gpus: int = 2, fabric: bool = False, failing: str = "") -> None:
        self.gpus, self.fabric, self.failing = gpus, fabric, failing
        self.calls: list[str] = []
        self.memory: dict[int, Any] = {}
        self.handles: dict[int, int] = {}

    def load(self, _: str) -> "FakeCuda":
        return self

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.failing:
                return OUT_OF_MEMORY
            values = [
                argument if isinstance(argument, ctypes.Array) else getattr(argument, "value", argument)
                for argument in arguments
            ]
            return getattr(self, f"_{name}", lambda *_: 0)(*values) or 0

        return call

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = {
            NOT_FOUND: b"CUDA_ERROR_INVALID_DEVICE",
            OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
        }[code]

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.gpus

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        device._obj.value = ordinal

    def _cuDeviceGetByPCIBusId(self, device: Any, address: bytes) -> int:
        names = [address.lower().encode() for address in ADDRESSES[: self.gpus]]
        if address not in names:
            return NOT_FOUND
        device._obj.value = names.index(address)
        return 0

    def _cuDeviceGetPCIBusId(self, text: Any, _: int, device: int) -> None:
        text.value = ADDRESSES[device].encode()

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, _: int) -> None:
        value._obj.value = {128: int(self.fabric), 110: 1}[attribute]

    def _cuMemGetAllocationGranularity(self, grain: Any, properties: Any, _: int) -> None:
        assert (properties._obj.type, properties._obj.handle_types, properties._obj.location.type) == (
            1,
            8,
            1,
        )
        grain._obj.value = 2 << 20

    def _cuMemCreate(self, handle: Any, size: int, _: Any, __: int) -> None:
        handle._obj.value = len(self.handles) + 1
        self.handles[handle._obj.value] = size

    def _cuMemRelease(self, handle: int) -> None:
        del self.handles[handle]

    def _cuMemAddressReserve(self, pointer: Any, size: int, *_: int) -> None:
        self._cuMemAlloc_v2(pointer, size)

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        assert ctypes.sizeof(self.memory.pop(address)) == size

    def _cuMemAlloc_v2(self, pointer: Any, size: int) -> None:
        block = ctypes.create_string_buffer(size)
        pointer._obj.value = ctypes.addressof(block)
        self.memory[pointer._obj.value] = block

    def _cuMemFree_v2(self, address: int) -> None:
        del self.memory[address]

    def _cuMemcpyHtoD_v2(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    _cuMemcpyDtoH_v2 = _cuMemcpyDtoD_v2 = _cuMemcpyHtoD_v2

    def _cuMemsetD8_v2(self, to: int, value: int, size: int) -> None:
        ctypes.memset(to, value, size)
