"""RDMA devices: their character devices, and moving them between network namespaces.

In mode `shared` every namespace sees every RDMA device, and the character devices that a container gets
decide what it can use. In mode `exclusive` a device is seen in one namespace only and has to be moved
into the pod's. A request to move a device must come from the namespace that the device is in.

Requests are RDMA netlink (NLDEV, rdma/rdma_netlink.h), encoded here. A kernel that does not tell its mode
has only the shared one.
"""

import os
import socket
import struct
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from rackloom.claim.node.nic.netlink import HOST_NAMESPACE, in_namespace
from rackloom.claim.node.plugin import DeviceNode
from rackloom.topology.discovery.sysfs import Sysroot

_NETLINK_RDMA, _NLDEV = 20, 5
_GET, _SET, _SYS_GET = 1, 2, 6
_DEV_INDEX, _DEV_NAME, _NETNS_MODE, _NETNS_FD = 1, 2, 66, 68
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=LHHLL")
_RECEIVE = 1 << 16
_CLASSES = {
    "/sys/class/infiniband_verbs": ("uverbs",),
    "/sys/class/infiniband_mad": ("umad", "issm"),
    "/sys/class/infiniband_cm": ("ucm",),
}
_MODE = 0o666
"""Whoever is in the container may use its HCA."""
_CONNECTION_MANAGER = "/sys/class/misc/rdma_cm"


class NetnsMode(StrEnum):
    """Whether an RDMA device belongs to one network namespace."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


def rdma_device_nodes(sysroot: Sysroot, device: str) -> tuple[DeviceNode, ...]:
    """What a container needs to use an RDMA device, and nothing of the others."""
    found = [_node(sysroot, _CONNECTION_MANAGER, "rdma_cm")]
    for directory, prefixes in _CLASSES.items():
        names = [name for name in sysroot.names(directory) if name.startswith(prefixes)]
        own = [name for name in names if sysroot.text(f"{directory}/{name}/ibdev") == device]
        found.extend(_node(sysroot, f"{directory}/{name}", name) for name in own)
    return tuple(one for one in found if one is not None)


def _node(sysroot: Sysroot, at: str, name: str) -> DeviceNode | None:
    major, _, minor = (sysroot.text(f"{at}/dev") or "").partition(":")
    if not (major.isdigit() and minor.isdigit()):
        return None
    return DeviceNode(
        path=f"/dev/infiniband/{name}",
        major=int(major),
        minor=int(minor),
        file_mode=_MODE,
        permissions="rw",
    )


def ask_mode() -> bytes:
    """The request for the system's mode."""
    return _message(_SYS_GET, _REQUEST)


def ask_devices() -> bytes:
    """The request for all devices of the namespace."""
    return _message(_GET, _REQUEST | _DUMP)


def move_device(index: int, netns_fd: int) -> bytes:
    """The request that moves device `index` into the namespace of an open handle."""
    attributes = _attribute(_DEV_INDEX, struct.pack("=I", index))
    return _message(_SET, _REQUEST | _ACK, attributes + _attribute(_NETNS_FD, struct.pack("=I", netns_fd)))


def mode_in(answer: bytes) -> NetnsMode:
    """The mode that an answer tells; a kernel that does not tell has only the shared one."""
    for _, payload in _messages(answer):
        for kind, value in _attributes(payload):
            if kind == _NETNS_MODE and value:
                return NetnsMode.SHARED if value[0] else NetnsMode.EXCLUSIVE
    return NetnsMode.SHARED


def devices_in(answer: bytes) -> dict[str, int]:
    """Indices by name."""
    found = {}
    for _, payload in _messages(answer):
        told = dict(_attributes(payload))
        if _DEV_INDEX in told and _DEV_NAME in told:
            name = told[_DEV_NAME].rstrip(b"\0").decode(errors="replace")
            found[name] = int(struct.unpack("=I", told[_DEV_INDEX][:4])[0])
    return found


def netns_mode() -> NetnsMode:
    """The mode of this kernel; one without RDMA has nothing to move."""
    try:
        return mode_in(_ask(ask_mode()))
    except OSError:
        return NetnsMode.SHARED


def push_rdma_device(device: str, netns: Path) -> None:
    """Move a device from the host into `netns`, unless it is there already. Raises `OSError`."""
    if device not in in_namespace(netns, _devices):
        in_namespace(HOST_NAMESPACE, lambda: _move(device, netns))


def pull_rdma_device(device: str, netns: Path) -> None:
    """Move a device from `netns` to the host, if it is there. The request must come from within."""
    own = os.open(HOST_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        in_namespace(netns, lambda: _move_to(device, own, only_if_here=True))
    finally:
        os.close(own)


def _devices() -> dict[str, int]:
    return devices_in(_ask(ask_devices()))


def _move(device: str, netns: Path) -> None:
    handle = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _move_to(device, handle, only_if_here=False)
    finally:
        os.close(handle)


def _move_to(device: str, handle: int, *, only_if_here: bool) -> None:
    index = _devices().get(device)
    if index is not None:
        _check(_ask(move_device(index, handle)), f"moving RDMA device {device}")
    elif not only_if_here:
        raise FileNotFoundError(f"RDMA device {device} is neither on the host nor in the pod")


def _check(answer: bytes, doing: str) -> None:
    for kind, payload in _messages(answer):
        if kind == _ERROR and (code := -struct.unpack_from("=i", payload)[0]):
            raise OSError(code, f"{doing}: {os.strerror(code)}")


def _ask(request: bytes) -> bytes:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_RDMA) as handle:
        handle.settimeout(10.0)
        handle.bind((0, 0))
        handle.send(request)
        answer = handle.recv(_RECEIVE)
        is_dump = struct.unpack_from("=H", request, 6)[0] & _DUMP == _DUMP
        while is_dump and all(kind not in (_DONE, _ERROR) for kind, _ in _messages(answer)):
            answer += handle.recv(_RECEIVE)
    return answer


def _message(command: int, flags: int, attributes: bytes = b"") -> bytes:
    kind = _NLDEV << 10 | command
    return _HEADER.pack(_HEADER.size + len(attributes), kind, flags, 1, 0) + attributes


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def _attributes(payload: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(payload):
        length, kind = struct.unpack_from("=HH", payload, at)
        if length < 4:
            return
        yield kind & 0x3FFF, payload[at + 4 : at + length]
        at += (length + 3) & ~3
