"""The CDI specs of claims: what a container runtime does to a container that gets their devices.

One transient file per claim, `<vendor>-claim_<uid>.yaml`, kind `<vendor>/claim`, one device per prepared
device. The files hold JSON, which is YAML.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rackloom.claim.node.files import PARTIAL, remove, write_whole
from rackloom.claim.node.values import Edits, Prepared, PreparedDevice


class CdiDirectory:
    """The claim specs of one driver in a directory that runtimes read (/var/run/cdi)."""

    def __init__(self, root: Path, driver: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._vendor = f"k8s.{driver}"

    def write(self, uid: str, prepared: Prepared) -> None:
        """Write the spec of a claim; a claim without edits gets no file, and loses one it had."""
        devices = {name: device.edits for name, device in self._edited(uid, prepared)}
        if not devices:
            self.remove(uid)
            return
        write_whole(self._path(uid), spec(f"{self._vendor}/claim", devices), mode=0o644)

    def write_shared(self, file: str, class_: str, device: str, edits: Edits) -> tuple[str, ...]:
        """Write a spec that outlives claims (`<vendor>-<file>.yaml`) and name its device."""
        path = self._root / f"{self._vendor}-{file}.yaml"
        kind = f"{self._vendor}/{class_}"
        write_whole(path, spec(kind, {device: edits}), mode=0o644)
        return (f"{kind}={device}",)

    def ids(self, uid: str, device: PreparedDevice) -> tuple[str, ...]:
        """What kubelet hands to the runtime for one device of a claim."""
        own = (f"{self._vendor}/claim={_name(uid, device)}",) if device.edits else ()
        return (*device.shared_cdi_ids, *own)

    def has_all(self, uid: str, ids: Iterable[str]) -> bool:
        """Whether the claim's spec is there, if `ids` name a device of it."""
        needed = any(one.startswith(f"{self._vendor}/claim=") for one in ids)
        return not needed or self._path(uid).exists()

    def remove(self, uid: str) -> None:
        """Delete the spec of a claim, if there is one."""
        if self._path(uid).exists():
            remove(self._path(uid))

    def claims(self) -> frozenset[str]:
        """UIDs of the claims that have a spec."""
        prefix = f"{self._vendor}-claim_"
        return frozenset(file.stem.removeprefix(prefix) for file in self._root.glob(f"{prefix}*.yaml"))

    def remove_partials(self) -> None:
        """Delete what a crash left of specs that were being written."""
        for file in self._root.glob(f".{self._vendor}-*{PARTIAL}"):
            remove(file)

    def _edited(self, uid: str, prepared: Prepared) -> Iterator[tuple[str, PreparedDevice]]:
        return ((_name(uid, device), device) for device in prepared.devices if device.edits)

    def _path(self, uid: str) -> Path:
        return self._root / f"{self._vendor}-claim_{uid}.yaml"


def spec(kind: str, devices: dict[str, Edits]) -> bytes:
    """A CDI spec file: `devices` of `kind` (`vendor/class`), and the edits that each one makes."""
    return msgspec.json.encode(
        {
            "cdiVersion": minimum_version(kind, devices),
            "kind": kind,
            "devices": [{"name": name, "containerEdits": edits} for name, edits in devices.items()],
        }
    )


def minimum_version(kind: str, devices: dict[str, Edits]) -> str:
    """The oldest CDI version that knows what is used, so that old runtimes accept it."""
    if "." in kind.partition("/")[2]:
        return "0.6.0"
    return "0.5.0" if any(name[0].isdigit() for name in devices) else "0.3.0"


def _name(uid: str, device: PreparedDevice) -> str:
    return f"{uid}-{device.result.device}"
