"""Attributes that the operator states: what DRANET reads from a cloud's metadata, and the plugin does not.

A file maps devices (by name, or `*` for all) to attributes by their full names:

    "*": {oke.dra.net/rackId: r7, oke.dra.net/hpcIslandId: i1}
    pci-0000-8a-00-0: {example.com/fabric: a, example.com/port: 3}
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rackloom.claim.allocate.objects import Device, DeviceAttribute
from rackloom.claim.node.nic.stated import read_stated
from rackloom.errors import Refused

EVERY = "*"
LONGEST = 64
"""Bytes of a value; with a longer one the API server refuses the whole slice."""
_FULL_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?/[A-Za-z_][A-Za-z0-9_]{0,31}")
_RESERVED = ("dra.net/", "resource.kubernetes.io/")

Extras = Mapping[str, Mapping[str, DeviceAttribute]]
"""Attributes by the device's name."""


def read_extras(file: Path) -> Extras:
    """Read a file of attributes. Raises `Refused` with what is wrong."""
    return {
        device: {str(name): _attribute(file, str(name), value) for name, value in said.items()}
        for device, said in read_stated(file, "from devices to attributes").items()
    }


def with_extras(one: Device, extras: Extras) -> Device:
    """The device with what the operator says of it; what is said of it alone wins."""
    said = {**extras.get(EVERY, {}), **extras.get(one.name, {})}
    return msgspec.structs.replace(one, attributes={**one.attributes, **said}) if said else one


def _attribute(file: Path, name: str, value: Any) -> DeviceAttribute:
    if not _FULL_NAME.fullmatch(name) or name.startswith(_RESERVED):
        raise Refused(
            f"{file}: {name!r} is not the full name of an attribute that may be stated",
            nearest_fix="write DOMAIN/NAME, with another domain than dra.net and resource.kubernetes.io",
        )
    if isinstance(value, bool):
        return DeviceAttribute(bool_=value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return DeviceAttribute(int_=value)
    if isinstance(value, str) and len(value.encode()) <= LONGEST:
        return DeviceAttribute(string=value)
    raise Refused(
        f"{file}: {name} is {value!r}",
        nearest_fix=f"give a text of up to {LONGEST} bytes, a number or a truth value",
    )
