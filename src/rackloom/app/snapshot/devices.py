"""Devices out of ResourceSlices, with the parts of the join key that their plugins publish.

Only the newest generation of each pool counts. Devices of the GPU and the IMEX driver state their kind; a
device of any other driver is a NIC if it has `rdma` or `ifName`. GPU drivers other than ours publish no
slot, so the attributes of the tray's IMEX devices add slot and fabric GUID to the GPU of the same node
with that UUID. Where both contradict each other, the GPU's own device counts.

`DeviceCache` keeps the result by node: a node whose slices did not change is not read again.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from rackloom.claim.node import slices
from rackloom.claim.node.gpu.inventory import STANDARD_DOMAIN
from rackloom.core.diagnosis.snapshot import DeviceRecord, PoolRecord
from rackloom.core.domains import names
from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source, merge_keys

Json = dict[str, Any]
Attributes = Mapping[str, Any]
_PCIE_ROOT, _NUMA_NODE, _PCI_ADDRESS = (
    f"{STANDARD_DOMAIN}/pcieRoot",
    f"{STANDARD_DOMAIN}/numaNode",
    f"{STANDARD_DOMAIN}/pciBusID",
)
_MODULE_UUID = re.compile(r"module(0|[1-9][0-9]?)UUID")
_DEVICE_KINDS = {"gpu": "gpu", "mig": "mig", "channel": "channel", "daemon": "daemon"}


class PublishedDevices(msgspec.Struct, frozen=True, kw_only=True):
    """What the ResourceSlices of a cluster show."""

    devices: tuple[DeviceRecord, ...] = ()
    pools: tuple[PoolRecord, ...] = ()


class _NodeDevices(NamedTuple):
    """The slices of one node, and what they show."""

    slices: list[Json]
    published: PublishedDevices


class DeviceCache:
    """Devices that were read before: a node whose slices are as they were is not read again."""

    def __init__(self) -> None:
        self._newest: tuple[list[Json], dict[str, _NodeDevices], PublishedDevices] = (
            [],
            {},
            PublishedDevices(),
        )

    def of(self, slices: Iterable[Json]) -> PublishedDevices:
        """The pools of all nodes, and the devices of complete ones, both by node, driver and name.

        Old generations of a pool do not count.
        """
        # Of itself it reads and writes its memory once: a reading that was given up may go on in a thread.
        same, before, published = self._newest
        told = list(slices)
        # Who is asked often hands out the very objects that it has, and they are compared by address.
        if told == same:
            return published
        nodes = {node: _read_node(some, before.get(node)) for node, some in _by_node(told).items()}
        if len(nodes) != len(before) or any(one is not before.get(node) for node, one in nodes.items()):
            published = _all_nodes(nodes)
        self._newest = told, nodes, published
        return published


def _by_node(slices: Iterable[Json]) -> Mapping[str, list[Json]]:
    found: defaultdict[str, list[Json]] = defaultdict(list)
    for slice_ in slices:
        found[slice_["spec"].get("nodeName") or ""].append(slice_)
    return found


def _read_node(slices: list[Json], before: _NodeDevices | None) -> _NodeDevices:
    if before is not None and before.slices == slices:
        return before
    newest = list(_newest(slices))
    trays = dict(_tray_keys(newest))
    found = (device for one in newest for device in _devices(one, trays))
    devices = tuple(sorted(found, key=lambda one: (one.driver, one.pool, one.name)))
    return _NodeDevices(slices, PublishedDevices(devices=devices, pools=_pools(slices)))


def _all_nodes(nodes: Mapping[str, _NodeDevices]) -> PublishedDevices:
    told = [nodes[name].published for name in sorted(nodes)]
    return PublishedDevices(
        devices=tuple(chain.from_iterable([one.devices for one in told])),
        pools=tuple(chain.from_iterable([one.pools for one in told])),
    )


def _pools(slices: Iterable[Json]) -> tuple[PoolRecord, ...]:
    """Those of one node."""
    found = {(*_pool(slice_), slice_["spec"].get("nodeName") or "") for slice_ in slices}
    return tuple(PoolRecord(driver=driver, name=pool, node=node) for driver, pool, node in sorted(found))


def _newest(slices: Iterable[Json]) -> Iterator[Json]:
    kept = list(slices)
    generations: dict[tuple[str, str], int] = {}
    for one in kept:
        pool, generation = _pool(one), one["spec"]["pool"]["generation"]
        generations[pool] = max(generation, generations.get(pool, generation))
    return (one for one in kept if one["spec"]["pool"]["generation"] == generations[_pool(one)])


def _pool(json: Json) -> tuple[str, str]:
    return json["spec"]["driver"], json["spec"]["pool"]["name"]


def _devices(json: Json, trays: Mapping[tuple[str, str], GpuKey]) -> Iterator[DeviceRecord]:
    spec = json["spec"]
    node = spec.get("nodeName") or ""
    for device in spec.get("devices") or ():
        attributes = _attributes(device)
        key = _key(attributes)
        tray = trays.get((node, key.gpu_uuid.value)) if key.gpu_uuid is not None else None
        yield DeviceRecord(
            driver=spec["driver"],
            pool=spec["pool"]["name"],
            name=device["name"],
            node=node,
            kind=_kind(spec["driver"], attributes),
            key=key if tray is None else _merged_key(key, tray),
            clique=attributes.get(slices.CLIQUE),
            pcie_root=attributes.get(_PCIE_ROOT),
            numa=attributes.get(_NUMA_NODE, attributes.get("numaNode")),
            partner=attributes.get("nicPartner") or attributes.get("gpuPartnerPCIBusID"),
            partner_address=attributes.get("nicPartnerPCIBusID"),
            partner_class=attributes.get("nicPartnerClass") or attributes.get("gpuPartnerClass"),
            link=attributes.get("rdmaState") or attributes.get("state"),
            gbps=attributes.get("linkSpeedGbps"),
            taints=tuple(map(taint_text, device.get("taints") or ())),
        )


def _attributes(device: Json) -> Attributes:
    """Attribute values by name. The API server keeps each under its type."""
    found = device.get("attributes") or {}
    return {name: next(iter(value.values()), None) for name, value in found.items()}


def _kind(driver: str, attributes: Attributes) -> str:
    said = str(attributes.get("type", ""))
    if driver in (names.GPU_DRIVER, names.IMEX_DRIVER):
        return _DEVICE_KINDS.get(said, "channel" if said == names.ISOLATED_CHANNEL_TYPE else said)
    return "nic" if "rdma" in attributes or "ifName" in attributes else "other"


def _key(attributes: Attributes) -> GpuKey:
    address = attributes.get(_PCI_ADDRESS) or attributes.get("pciAddress")
    uuid = attributes.get(slices.GPU_UUID)
    return GpuKey(
        place=_slot_key(attributes, attributes.get(slices.MODULE_ID)),
        fabric_guid=_guid(attributes.get(slices.FABRIC_GUID)),
        gpu_uuid=Fact(uuid, Source.NVML) if isinstance(uuid, str) else None,
        pci_address=None if address is None else Fact(str(address).lower(), Source.SYSFS),
    )


def _guid(said: object) -> Fact[int] | None:
    """A fabric GUID, in hexadecimal digits; None for anything else, which any driver may publish."""
    try:
        guid = int(said, 16) if isinstance(said, str) else -1
    except ValueError:
        return None
    return Fact(guid, Source.NVML) if 0 <= guid < 1 << 64 else None


def _slot_key(attributes: Attributes, module: object) -> Fact[SlotKey] | None:
    serial, slot = attributes.get(slices.CHASSIS_SERIAL), attributes.get(slices.SLOT)
    if isinstance(serial, str) and isinstance(slot, int) and isinstance(module, int):
        return Fact(SlotKey(serial, slot, module), Source.NVML)
    return None


def _tray_keys(slices: Iterable[Json]) -> Iterator[tuple[tuple[str, str], GpuKey]]:
    """What IMEX devices tell of GPUs, by node and GPU UUID: other GPU drivers publish no place."""
    for slice_ in slices:
        node = slice_["spec"].get("nodeName") or ""
        for device in slice_["spec"].get("devices") or ():
            attributes = _attributes(device)
            for module in _module_numbers(attributes):
                uuid = attributes[f"module{module}UUID"]
                yield (
                    (node, uuid),
                    GpuKey(
                        place=_slot_key(attributes, module),
                        fabric_guid=_guid(attributes.get(f"module{module}FabricGUID")),
                        gpu_uuid=Fact(uuid, Source.NVML),
                    ),
                )


def _module_numbers(attributes: Attributes) -> Iterator[int]:
    """Modules of whose GPU a tray's attributes name the UUID."""
    for name, value in attributes.items():
        found = _MODULE_UUID.fullmatch(name)
        if found is not None and isinstance(value, str):
            yield int(found[1])


def _merged_key(key: GpuKey, tray: GpuKey) -> GpuKey:
    """The GPU's own device is nearer to it than the tray's; where they differ, it counts."""
    try:
        return merge_keys(key, tray)
    except Refused:
        return key


def taint_text(taint: Json) -> str:
    """`key=value:effect` of a device's taint, or a node's."""
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"
