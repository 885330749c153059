"""What an API server keeps of a slice: one that does not know a field, or has it switched off, drops it.

A slice that lacks a field for that reason is as published as it can be. Without knowing so, a publisher would
write it for ever, under a new generation each time, and schedulers would never find the pool at rest.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rackloom.claim.allocate.quantity import Quantity
from rackloom.claim.kube.api import Object

Plain = list[dict[str, Any]]
"""The devices of one slice, comparable."""


class Kept:
    """What became of the slices that were written. Forgotten with the process: a server may learn a field."""

    def __init__(self) -> None:
        self._of: dict[str, Plain] = {}

    def learn(self, sent: Object, stored: Object) -> tuple[str, ...]:
        """Compare an answer with what was sent; returns the paths that the server dropped."""
        wanted, found = plain(sent["spec"].get("devices", ())), plain(stored["spec"].get("devices", ()))
        dropped = tuple(dict.fromkeys(_missing(wanted, found, "devices")))
        self._of.pop(repr(wanted), None)
        if dropped:
            self._of[repr(wanted)] = found
        return dropped

    def of(self, devices: Iterable[Mapping[str, Any]]) -> Plain:
        """The devices of a slice as the server has them once they are written."""
        wanted = plain(devices)
        return self._of.get(repr(wanted), wanted)


def plain(devices: Iterable[Mapping[str, Any]]) -> Plain:
    """Devices without what the API server adds or words differently."""
    return [_plain(device) for device in devices]


def timeless(taint: Mapping[str, Any]) -> dict[str, Any]:
    """A taint without the time that the server put on it."""
    return {key: value for key, value in taint.items() if key != "timeAdded" and value != ""}


def _plain(device: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in device.items() if value not in ({}, [], None)}
    if "taints" in found:
        found["taints"] = [timeless(taint) for taint in found["taints"]]
    if "capacity" in found:
        found["capacity"] = {name: _quantities(entry) for name, entry in found["capacity"].items()}
    return found


def _quantities(value: Any) -> Any:
    """A capacity with every quantity parsed: `1024Mi` comes back as `1Gi`, in policies too."""
    if isinstance(value, Mapping):
        return {key: _quantities(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_quantities(one) for one in value]
    return Quantity.parse(value)


def _missing(sent: Any, stored: Any, path: str) -> Iterator[str]:
    """Where `stored` has less than `sent`. Nothing where it is something else: then somebody changed it."""
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        for key, value in sent.items():
            if key not in stored:
                yield f"{path}.{key}"
            else:
                yield from _missing(value, stored[key], f"{path}.{key}")
    elif isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        for one, other in zip(sent, stored, strict=True):
            yield from _missing(one, other, path)
