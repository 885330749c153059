"""The claims that kubelet holds on this node, from its file `dra_manager_state` (Kubernetes 1.34 and later).

kubelet keeps a claim there from its first prepare until all pods that use it have ended and every driver has
undone it. The file has data that drivers do not record: the claim's name, and the devices that each driver
gave it.

    {"Data": TEXT, "Checksum": CRC-32 of TEXT}

where the text is JSON again:

    {"ClaimInfoStateList": [{"ClaimUID": ..., "ClaimName": ..., "Namespace": ...,
      "DriverState": {DRIVER: {"Devices": [{"PoolName": ..., "DeviceName": ...}]}}}]}
"""

import binascii
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rackloom.claim.node.plugin import NodeValue
from rackloom.core.cluster.claims import ClaimRef
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json


class HeldClaim(NodeValue, frozen=True, kw_only=True):
    """A claim that kubelet holds, and the names of its devices by driver."""

    ref: ClaimRef
    devices: Mapping[str, tuple[str, ...]] = {}


class _File(msgspec.Struct, rename="pascal"):
    data: str
    checksum: int


class _Device(msgspec.Struct, rename="pascal"):
    device_name: str


class _Driver(msgspec.Struct, rename="pascal"):
    devices: list[_Device] | None = None


class _Claim(msgspec.Struct):
    uid: str = msgspec.field(name="ClaimUID")
    name: str = msgspec.field(name="ClaimName")
    namespace: str = msgspec.field(name="Namespace")
    drivers: dict[str, _Driver] | None = msgspec.field(default=None, name="DriverState")


class _Data(msgspec.Struct):
    claims: list[_Claim] | None = msgspec.field(name="ClaimInfoStateList")


def held_claims(path: Path) -> tuple[HeldClaim, ...] | None:
    """The claims that kubelet holds, or None if its state cannot be read."""
    try:
        file = decode_json(path.read_bytes(), path.name, _File)
        if binascii.crc32(file.data.encode()) != file.checksum:
            return None
        claims = decode_json(file.data, path.name, _Data).claims or ()
    except (OSError, Undecodable):
        return None
    return tuple(_held(claim) for claim in claims)


def _held(claim: _Claim) -> HeldClaim:
    devices = {
        driver: tuple(device.device_name for device in state.devices or ())
        for driver, state in (claim.drivers or {}).items()
    }
    ref = ClaimRef(namespace=claim.namespace, name=claim.name, uid=claim.uid)
    return HeldClaim(ref=ref, devices=devices)
