"""Devices as their drivers publish them in ResourceSlices, and objects as the allocator takes them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from rackloom.core.allocate.objects import convert_object, readable
from rackloom.core.cluster.nodes import Taint, node_of_slice, slice_pool
from rackloom.core.cluster.objects import JsonMapping, labels_of, name_of

V = TypeVar("V")


class SliceDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a slice."""

    driver: str
    pool: str
    name: str
    node: str
    """Empty: several nodes have it."""
    attributes: Mapping[str, Any]
    """Texts, numbers, truth values and lists of them, by name."""
    taints: tuple[Taint, ...]


def devices_of(slice_: JsonMapping) -> Iterator[SliceDevice]:
    """The devices of a slice."""
    pool, node = slice_pool(slice_), node_of_slice(slice_)
    for device in slice_["spec"].get("devices") or ():
        written = device.get("attributes") or {}
        yield SliceDevice(
            driver=pool.driver,
            pool=pool.name,
            name=device["name"],
            node=node,
            # The API server keeps each value under its type.
            attributes={name: next(iter(typed.values()), None) for name, typed in written.items()},
            taints=tuple(convert_object(taint, Taint) for taint in device.get("taints") or ()),
        )


def allocator_values(objects: Iterable[JsonMapping], kind: type[V]) -> Iterator[V]:
    """Slices, classes and claims as the allocator takes them, without those that it cannot read.

    It refuses fields that it does not know, so their metadata are names and labels alone.
    """
    return readable(
        (
            {"metadata": {"name": name_of(obj), "labels": labels_of(obj)}, "spec": obj.get("spec") or {}}
            for obj in objects
        ),
        kind,
    )
