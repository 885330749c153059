"""eBPF programs that tests put on an interface, by other requests than those of the code under test."""

import ctypes
import struct

from pyroute2 import IPRoute  # type: ignore[import-untyped]

from rackloom.claim.node.nic import datapath

_SCHED_CLS, _LOAD, _ATTACH, _TCX_INGRESS = 3, 5, 8, 46


def loaded(name: bytes) -> int:
    """A handle of a program that passes every packet (r0 = 0, exit). OSError if this kernel has none."""
    code = ctypes.create_string_buffer(
        struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    )
    licence = ctypes.create_string_buffer(b"GPL")
    places = (ctypes.addressof(code), ctypes.addressof(licence))
    return datapath._bpf(_LOAD, struct.pack("=IIQQIIQII16s", _SCHED_CLS, 2, *places, 0, 0, 0, 0, 0, name))[0]


def put_tc(ipr: IPRoute, link: str, handle: int, name: str) -> None:
    """Put a program on the traffic control hook of incoming packets."""
    (index,) = ipr.link_lookup(ifname=link)
    ipr.tc("add", "clsact", index)
    ipr.tc("add-filter", "bpf", index, fd=handle, name=name, parent="ffff:fff2", direct_action=True)


def put_tcx(ipr: IPRoute, link: str, handle: int) -> None:
    """Put a program on the TCX hook of incoming packets. OSError if this kernel has no TCX."""
    (index,) = ipr.link_lookup(ifname=link)
    datapath._bpf(_ATTACH, struct.pack("=IIIIIIQ", index, handle, _TCX_INGRESS, 0, 0, 0, 0))
