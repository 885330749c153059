"""RDMA devices: their character devices, and moving them between network namespaces.

In mode `shared` every namespace sees every RDMA device, and the character devices that a container gets
decide which it can use. In mode `exclusive` a device is seen in one namespace only and has to be moved
into the pod's. A request to move a device must come from the namespace that the device is in.

Requests are RDMA netlink (NLDEV, rdma/rdma_netlink.h), encoded here. A kernel that does not report its mode
has only the shared one.
"""

import os
import socket
import struct
from enum import StrEnum
from pathlib import Path

from rackloom.claim.node.nic.netlink import (
    ACK,
    DONE,
    DUMP,
    ERROR,
    HEADER,
    HOST_NAMESPACE,
    REQUEST,
    error_code,
    in_namespace,
    open_namespace,
    split_attributes,
    split_messages,
)
from rackloom.claim.node.plugin import DeviceNode
from rackloom.topology.discovery.sysfs import Sysroot

_NETLINK_RDMA, _NLDEV = 20, 5
"""The netlink protocol, and its client RDMA_NL_NLDEV, which is in the high bits of a message's type."""
_GET, _SET, _SYS_GET = 1, 2, 6
"""RDMA_NLDEV_CMD_*."""
_DEV_INDEX, _DEV_NAME, _NETNS_MODE, _NETNS_FD = 1, 2, 66, 68
"""RDMA_NLDEV_ATTR_DEV_INDEX, DEV_NAME, SYS_ATTR_NETNS_MODE, NET_NS_FD."""
_RECEIVE = 1 << 16
_CLASSES = {
    "/sys/class/infiniband_verbs": ("uverbs",),
    "/sys/class/infiniband_mad": ("umad", "issm"),
    "/sys/class/infiniband_cm": ("ucm",),
}
_MODE = 0o666
"""Any user in the container may use its HCA."""
_CONNECTION_MANAGER = "/sys/class/misc/rdma_cm"


class NetnsMode(StrEnum):
    """Whether an RDMA device belongs to one network namespace."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


def rdma_device_nodes(sysroot: Sysroot, device: str) -> tuple[DeviceNode, ...]:
    """The files that a container needs to use an RDMA device, and none of other devices."""
    found = [_node(sysroot, _CONNECTION_MANAGER, "rdma_cm")]
    for directory, prefixes in _CLASSES.items():
        names = [name for name in sysroot.names(directory) if name.startswith(prefixes)]
        own = [name for name in names if sysroot.text(f"{directory}/{name}/ibdev") == device]
        found.extend(_node(sysroot, f"{directory}/{name}", name) for name in own)
    return tuple(device_name for device_name in found if device_name is not None)


def _node(sysroot: Sysroot, at: str, name: str) -> DeviceNode | None:
    major, _, minor = (sysroot.text(f"{at}/dev") or "").partition(":")
    if not (major.isdigit() and minor.isdigit()):
        return None
    path = f"/dev/infiniband/{name}"
    return DeviceNode(path=path, major=int(major), minor=int(minor), file_mode=_MODE, permissions="rw")


def ask_mode() -> bytes:
    """The request for the system's mode."""
    return _message(_SYS_GET, REQUEST)


def ask_devices() -> bytes:
    """The request for all devices of the namespace."""
    return _message(_GET, REQUEST | DUMP)


def move_device(index: int, netns_fd: int) -> bytes:
    """The request that moves device `index` into the namespace of an open handle."""
    attributes = _attribute(_DEV_INDEX, struct.pack("=I", index))
    return _message(_SET, REQUEST | ACK, attributes + _attribute(_NETNS_FD, struct.pack("=I", netns_fd)))


def mode_in(answer: bytes) -> NetnsMode:
    """The mode in an answer. A kernel that does not report it has only the shared one."""
    for message in split_messages(answer):
        for kind, value in split_attributes(message[HEADER.size :]):
            if kind == _NETNS_MODE and value:
                return NetnsMode.SHARED if value[0] else NetnsMode.EXCLUSIVE
    return NetnsMode.SHARED


def devices_in(answer: bytes) -> dict[str, int]:
    """Indices by name."""
    found = {}
    for message in split_messages(answer):
        attributes = dict(split_attributes(message[HEADER.size :]))
        if _DEV_INDEX in attributes and _DEV_NAME in attributes:
            name = attributes[_DEV_NAME].rstrip(b"\0").decode(errors="replace")
            found[name] = int(struct.unpack("=I", attributes[_DEV_INDEX][:4])[0])
    return found


def netns_mode() -> NetnsMode:
    """The mode of this kernel. A kernel without RDMA has nothing to move."""
    try:
        return mode_in(_ask(ask_mode()))
    except OSError:
        return NetnsMode.SHARED


def push_rdma_device(device: str, netns: Path) -> None:
    """Move a device from the host into `netns`, unless it is there already. Raises `OSError`."""
    if device not in in_namespace(netns, _devices):
        with open_namespace(netns) as handle:
            if not in_namespace(HOST_NAMESPACE, lambda: _move_if_here(device, handle)):
                raise FileNotFoundError(f"RDMA device {device} is neither on the host nor in the pod")


def pull_rdma_device(device: str, netns: Path) -> None:
    """Move a device from `netns` to the host, if it is there. The request must come from within."""
    with open_namespace(HOST_NAMESPACE) as handle:
        in_namespace(netns, lambda: _move_if_here(device, handle))


def _devices() -> dict[str, int]:
    return devices_in(_ask(ask_devices()))


def _move_if_here(device: str, handle: int) -> bool:
    """Move a device of the thread's namespace to that of `handle`. Returns whether it was here."""
    index = _devices().get(device)
    if index is None:
        return False
    for message in split_messages(_ask(move_device(index, handle))):
        if _type_of(message) == ERROR and (code := error_code(message)):
            raise OSError(code, f"moving RDMA device {device}: {os.strerror(code)}")
    return True


def _ask(request: bytes) -> bytes:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_RDMA) as handle:
        handle.settimeout(10.0)
        handle.bind((0, 0))
        handle.send(request)
        answer = handle.recv(_RECEIVE)
        is_dump = struct.unpack_from("=H", request, 6)[0] & DUMP == DUMP
        while is_dump and all(_type_of(message) not in (DONE, ERROR) for message in split_messages(answer)):
            answer += handle.recv(_RECEIVE)
    return answer


def _type_of(message: bytes) -> int:
    return int(HEADER.unpack_from(message)[1])


def _message(command: int, flags: int, attributes: bytes = b"") -> bytes:
    kind = _NLDEV << 10 | command
    return HEADER.pack(HEADER.size + len(attributes), kind, flags, 1, 0) + attributes


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)
