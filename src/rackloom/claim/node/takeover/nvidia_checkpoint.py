"""The checkpoint of NVIDIA's DRA driver: read as it is, and written so that the driver reads it again.

Both of its plugins write `checkpoint.json` in one format, the parts in this order:

    {"checksum": N, "v1": {"preparedClaims": {UID: ...}},
     "v2": {"checksum": N, "preparedClaims": {UID: ...}, "nodeBootID": "..."}}

`v1` holds the claims that are prepared. `v2` also holds those whose prepare has started or was aborted. It
has their states and some of their names. If both are there, v2 counts. Releases up to 25.3 write v1
alone, those before 0.4 no nodeBootID.

The first checksum covers the file without v2, the second one v2. Each covers the JSON text that has 0 in
place of this checksum. It is FNV-1a with 32 bits over the text in which Go's spew prints those bytes,
`([]uint8)[123 34 ...]`.

To check a file, the driver decodes it, encodes it again and takes the checksum of the result. So it accepts
exactly the output of Go's encoder: members in the order of the fields, UIDs sorted, no space, and `<`, `>`
and `&` escaped. So the driver's text of a claim is kept and written back as bytes.

Source: NVIDIA's DRA driver for GPUs, releases 25.3 to 0.5 (cmd/*-kubelet-plugin/checkpoint*.go), and
Kubernetes (pkg/kubelet/checkpointmanager/checksum).
"""

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from rackloom.claim.node.plugin import NodeValue, PrepareState
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json

# Checksums, and JSON as Go writes it.


_FNV_OFFSET, _FNV_PRIME, _FNV_MASK = 0x811C9DC5, 0x01000193, 0xFFFFFFFF
_CHECKSUM = re.compile(rb'\A\{"checksum":\d+')
_NO_CHECKSUM = b'{"checksum":0'
_BEGIN = re.compile(rb'\s*\{\s*"checksum"\s*:\s*\d')
"""Our own file has a text there, and begins with its format."""
_ESCAPES = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def go_checksum(text: bytes) -> int:
    """The checksum that kubelet's checkpoint manager takes of `text`."""
    value = _FNV_OFFSET
    for byte in f"([]uint8)[{' '.join(map(str, text))}]".encode():
        value = (value ^ byte) * _FNV_PRIME & _FNV_MASK
    return value


def go_json(value: object) -> bytes:
    """`value` as Go's encoder writes it. Members of dicts stay in their order."""
    text = msgspec.json.encode(value).decode()
    return "".join(_ESCAPES.get(character, character) for character in text).encode()


# The content of the file.


class NvidiaDevice(NodeValue, frozen=True, kw_only=True):
    """One prepared device, as the driver reports it to kubelet."""

    kind: str
    """`channel`, `daemon`, `gpu`, `mig` or `vfio`. The file may have others."""
    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None
    uuid: str = ""
    """Of the GPU or MIG device."""
    pci_address: str = ""
    """Of a GPU for a virtual machine. Releases up to 25.12 did not record it."""


class NvidiaDeviceGroup(NodeValue, frozen=True, kw_only=True):
    """Devices of a claim that have one configuration, and the objects that were made for it."""

    devices: tuple[NvidiaDevice, ...]
    config: Mapping[str, Any]


class NvidiaClaim(NodeValue, frozen=True, kw_only=True):
    """One claim of the file."""

    uid: str
    state: PrepareState
    status: bytes
    """The ResourceClaim's status, JSON as it is in the file."""
    groups: tuple[NvidiaDeviceGroup, ...]
    name: str = ""
    namespace: str = ""
    """Name and namespace are empty if the driver did not record them."""
    aborted_at: float | None = None
    """Seconds since the epoch."""
    v1: bytes = b""
    v2: bytes = b""
    """The claim as it is in either part of the file. Empty if it is not there."""

    @property
    def devices(self) -> tuple[NvidiaDevice, ...]:
        """Of all groups."""
        return tuple(device for group in self.groups for device in group.devices)


class NvidiaCheckpoint(NodeValue, frozen=True, kw_only=True):
    """The file: its parts, the boot that it belongs to, and the claims by UID."""

    has_v1: bool = True
    has_v2: bool = True
    boot_id: str = ""
    """Empty if the release writes none."""
    claims: Mapping[str, NvidiaClaim] = {}


def is_nvidia_checkpoint(data: bytes) -> bool:
    """Whether `data` begins as a checkpoint of NVIDIA's driver does, even if it is damaged further on."""
    return _BEGIN.match(data) is not None


def decode_nvidia_checkpoint(data: bytes, path: Path) -> NvidiaCheckpoint:
    """Read the file's bytes. Raises `Refused` with the fault of `path` and the remedy."""
    try:
        file = decode_json(data, path.name, _File)
        v1_text, v2_text = bytes(file.v1), bytes(file.v2)
        outer = _NO_CHECKSUM + (b',"v1":' + v1_text if v1_text else b"") + b"}"
        _check(path, "v1", file.checksum, outer)
        v1 = decode_json(v1_text or b"{}", path.name, _Part)
        v2 = decode_json(v2_text or b'{"checksum":0}', path.name, _Part)
        if v2_text:
            _check(path, "v2", v2.checksum, _CHECKSUM.sub(_NO_CHECKSUM, v2_text))
        newest = v2 if v2_text else v1
        claims = {
            uid: _claim(path, uid, bytes(v1.prepared_claims.get(uid, b"")), text if v2_text else b"")
            for uid, text in ((uid, bytes(raw)) for uid, raw in newest.prepared_claims.items())
        }
    except Undecodable as error:
        raise _unreadable(path, error.reason) from error
    return NvidiaCheckpoint(
        has_v1=bool(v1_text), has_v2=bool(v2_text), boot_id=newest.node_boot_id, claims=claims
    )


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """An unknown part belongs to a newer format: acting on the rest alone would be wrong."""

    checksum: int
    v1: msgspec.Raw = msgspec.Raw()
    v2: msgspec.Raw = msgspec.Raw()


class _Part(msgspec.Struct, rename="camel"):
    checksum: int = 0
    prepared_claims: dict[str, msgspec.Raw] = {}
    node_boot_id: str = msgspec.field(default="", name="nodeBootID")


class _Listed(msgspec.Struct, rename="pascal"):
    requests: tuple[str, ...] | None
    pool_name: str
    device_name: str
    cdi_ids: tuple[str, ...] | None = msgspec.field(name="CDIDeviceIDs")
    share_id: str | None = msgspec.field(default=None, name="ShareID")


class _Prepared(msgspec.Struct):
    device: _Listed
    info: dict[str, Any] | None = None
    concrete: dict[str, Any] | None = None

    @property
    def uuid(self) -> str:
        """A GPU has its own in `info`, a MIG device in `concrete`."""
        return str(
            {**(self.info or {}), **(self.concrete or {})}.get("migUUID") or (self.info or {}).get("uuid", "")
        )


class _Group(msgspec.Struct, rename="camel"):
    devices: list[dict[str, _Prepared | None]] | None
    config_state: dict[str, Any]


class _Claim(msgspec.Struct, rename="camel"):
    """Of either part. v1 has no state, since all its claims are prepared."""

    checkpoint_state: PrepareState = PrepareState.COMPLETED
    status: msgspec.Raw = msgspec.Raw(b"{}")
    prepared_devices: list[_Group] | None = None
    name: str = ""
    namespace: str = ""
    aborted_at: datetime | None = None


def _claim(path: Path, uid: str, v1: bytes, v2: bytes) -> NvidiaClaim:
    try:
        claim = decode_json(v2 or v1, uid, _Claim)
    except Undecodable as error:
        raise _unreadable(path, f"claim {uid}: {error.reason}") from error
    groups = tuple(
        NvidiaDeviceGroup(
            devices=tuple(
                _device(kind, found) for part in group.devices or () for kind, found in part.items() if found
            ),
            config=group.config_state,
        )
        for group in claim.prepared_devices or ()
    )
    return NvidiaClaim(
        uid=uid,
        state=claim.checkpoint_state,
        status=bytes(claim.status),
        groups=groups,
        name=claim.name,
        namespace=claim.namespace,
        aborted_at=None if claim.aborted_at is None else claim.aborted_at.timestamp(),
        v1=v1,
        v2=v2,
    )


def _device(kind: str, prepared: _Prepared) -> NvidiaDevice:
    listed = prepared.device
    return NvidiaDevice(
        kind=kind,
        requests=listed.requests or (),
        pool=listed.pool_name,
        device=listed.device_name,
        cdi_ids=listed.cdi_ids or (),
        share_id=listed.share_id,
        uuid=prepared.uuid,
        pci_address=str((prepared.info or {}).get("pciBusID", "")).lower(),
    )


def _check(path: Path, part: str, written: int, text: bytes) -> None:
    found = go_checksum(text)
    if found != written:
        raise _unreadable(path, f"its part {part} has checksum {found}, but {written} was written")


def _unreadable(path: Path, what: str) -> Refused:
    return Refused(
        f"checkpoint {path} of NVIDIA's driver cannot be read: {what}",
        nearest_fix=f"start NVIDIA's driver on this node again, whose log says more; or drain the node and"
        f" move {path} away",
    )


# Writing the file.


def encode_nvidia_checkpoint(checkpoint: NvidiaCheckpoint) -> bytes:
    """The file's bytes, with its checksums, from the bytes that each claim has for either part."""
    claims = dict(sorted(checkpoint.claims.items()))
    outer = _NO_CHECKSUM
    if checkpoint.has_v1:
        outer += b',"v1":{' + _members({uid: claim.v1 for uid, claim in claims.items()}) + b"}"
    text = b'{"checksum":%d' % go_checksum(outer + b"}") + outer.removeprefix(_NO_CHECKSUM)
    if checkpoint.has_v2:
        v2 = [_members({uid: claim.v2 for uid, claim in claims.items()})]
        if checkpoint.boot_id:
            v2.append(b'"nodeBootID":' + go_json(checkpoint.boot_id))
        rest = b"".join(b"," + member for member in v2 if member) + b"}"
        text += b',"v2":{"checksum":%d' % go_checksum(_NO_CHECKSUM + rest) + rest
    return text + b"}"


def _members(claims: Mapping[str, bytes]) -> bytes:
    """`preparedClaims`, which Go leaves out if it is empty."""
    written = [go_json(uid) + b":" + text for uid, text in claims.items() if text]
    return b'"preparedClaims":{' + b",".join(written) + b"}" if written else b""


def with_texts(claim: NvidiaClaim, devices: bytes) -> NvidiaClaim:
    """`claim` with the bytes that Go would write for it. `devices` is its preparedDevices, empty for none."""
    common = b'"status":' + claim.status + (b',"preparedDevices":' + devices if devices else b"")
    names = {"name": claim.name, "namespace": claim.namespace}
    named = b"".join(b"," + go_json(key) + b":" + go_json(name) for key, name in names.items() if name)
    return msgspec.structs.replace(
        claim,
        v1=b"{" + common + b"}" if claim.state is PrepareState.COMPLETED else b"",
        v2=b'{"checkpointState":' + go_json(claim.state.value) + b"," + common + named + b"}",
    )
