"""Devices out of ResourceSlices, with the parts of the join key that their plugins publish."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rackloom.claim.domain import names
from rackloom.claim.node import joinkey
from rackloom.claim.node.gpu.attributes import STANDARD
from rackloom.errors import Refused
from rackloom.prove.picture.values import DeviceSeen, PoolSeen
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey, SlotKey, merge

Json = dict[str, Any]
Attributes = Mapping[str, Any]
Versions = tuple[tuple[str | None, str | None], ...]
"""UID and resourceVersion of each slice."""
_ROOT, _NUMA, _ADDRESS = f"{STANDARD}/pcieRoot", f"{STANDARD}/numaNode", f"{STANDARD}/pciBusID"
_KINDS = {"gpu": "gpu", "mig": "mig", "channel": "channel", "daemon": "daemon"}


def devices_of(slices: Iterable[Json]) -> tuple[DeviceSeen, ...]:
    """All devices of complete pools, by node, driver and name; old generations of a pool do not count."""
    return KnownDevices().of(slices)


class KnownDevices:
    """Devices that were read before: a node whose slices are as they were is not read again."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[Versions, tuple[DeviceSeen, ...]]] = {}

    def of(self, slices: Iterable[Json]) -> tuple[DeviceSeen, ...]:
        """As `devices_of`."""
        by_node: dict[str, list[Json]] = defaultdict(list)
        for one in slices:
            by_node[one["spec"].get("nodeName") or ""].append(one)
        self._nodes = {node: self._read(node, by_node[node]) for node in sorted(by_node)}
        return tuple(device for _, devices in self._nodes.values() for device in devices)

    def _read(self, node: str, slices: list[Json]) -> "tuple[Versions, tuple[DeviceSeen, ...]]":
        versions = tuple(
            (one["metadata"].get("uid"), one["metadata"].get("resourceVersion")) for one in slices
        )
        known = self._nodes.get(node)
        if known is not None and known[0] == versions and all(version for _, version in versions):
            return known
        newest = list(_newest(slices))
        trays = dict(_tray_keys(newest))
        found = [device for one in newest for device in _devices(one, trays)]
        return versions, tuple(sorted(found, key=lambda one: (one.driver, one.pool, one.name)))


def pools_of(slices: Iterable[Json]) -> tuple[PoolSeen, ...]:
    """The pools of nodes, by driver and node."""
    found = {(one["spec"]["driver"], one["spec"].get("nodeName") or "", _pool(one)[1]) for one in slices}
    return tuple(PoolSeen(driver=driver, name=pool, node=node) for driver, node, pool in sorted(found))


def _newest(slices: Iterable[Json]) -> Iterator[Json]:
    kept = list(slices)
    generations: dict[tuple[str, str], int] = {}
    for one in kept:
        pool, generation = _pool(one), one["spec"]["pool"]["generation"]
        generations[pool] = max(generation, generations.get(pool, generation))
    return (one for one in kept if one["spec"]["pool"]["generation"] == generations[_pool(one)])


def _pool(one: Json) -> tuple[str, str]:
    return one["spec"]["driver"], one["spec"]["pool"]["name"]


def _devices(one: Json, trays: Mapping[tuple[str, str], GpuKey]) -> Iterator[DeviceSeen]:
    spec = one["spec"]
    node = spec.get("nodeName") or ""
    for device in spec.get("devices") or ():
        attributes = _attributes(device)
        key = _key(attributes)
        tray = trays.get((node, key.gpu_uuid.value)) if key.gpu_uuid is not None else None
        yield DeviceSeen(
            driver=spec["driver"],
            pool=spec["pool"]["name"],
            name=device["name"],
            node=node,
            kind=_kind(spec["driver"], attributes),
            key=key if tray is None else _both(key, tray),
            clique=attributes.get(joinkey.CLIQUE),
            pcie_root=attributes.get(_ROOT),
            numa=attributes.get(_NUMA, attributes.get("numaNode")),
            partner=attributes.get("nicPartner") or attributes.get("gpuPartnerPCIBusID"),
            partner_address=attributes.get("nicPartnerPCIBusID"),
            partner_class=attributes.get("nicPartnerClass") or attributes.get("gpuPartnerClass"),
            link=attributes.get("rdmaState") or attributes.get("state"),
            gbps=attributes.get("linkSpeedGbps"),
            taints=tuple(map(_taint, device.get("taints") or ())),
        )


def _attributes(device: Json) -> Attributes:
    """Attribute values by name. The API server keeps each under its type."""
    found = device.get("attributes") or {}
    return {name: next(iter(value.values()), None) for name, value in found.items()}


def _kind(driver: str, attributes: Attributes) -> str:
    said = str(attributes.get("type", ""))
    if driver in (names.GPU_DRIVER, names.IMEX_DRIVER):
        return _KINDS.get(said, "channel" if said == names.ISOLATED_CHANNEL_TYPE else said)
    return "nic" if "rdma" in attributes or "ifName" in attributes else "other"


def _key(attributes: Attributes) -> GpuKey:
    address = attributes.get(_ADDRESS) or attributes.get("pciAddress")
    uuid, guid = attributes.get(joinkey.GPU_UUID), attributes.get(joinkey.FABRIC_GUID)
    return GpuKey(
        place=_place(attributes, attributes.get(joinkey.MODULE_ID)),
        fabric_guid=None if guid is None else Fact(int(guid, 16), Source.NVML),
        gpu_uuid=None if uuid is None else Fact(uuid, Source.NVML),
        pci_address=None if address is None else Fact(str(address).lower(), Source.SYSFS),
    )


def _place(attributes: Attributes, module: int | None) -> Fact[SlotKey] | None:
    serial, slot = attributes.get(joinkey.CHASSIS_SERIAL), attributes.get(joinkey.SLOT)
    if serial is None or slot is None or module is None:
        return None
    return Fact(SlotKey(serial, slot, module), Source.NVML)


def _tray_keys(slices: Iterable[Json]) -> Iterator[tuple[tuple[str, str], GpuKey]]:
    """What IMEX devices tell of GPUs, by node and GPU UUID: other GPU drivers publish no place."""
    for one in slices:
        node = one["spec"].get("nodeName") or ""
        for device in one["spec"].get("devices") or ():
            attributes = _attributes(device)
            for module in _modules(attributes):
                uuid = attributes[f"module{module}UUID"]
                guid = attributes.get(f"module{module}FabricGUID")
                yield (
                    (node, uuid),
                    GpuKey(
                        place=_place(attributes, module),
                        fabric_guid=None if guid is None else Fact(int(guid, 16), Source.NVML),
                        gpu_uuid=Fact(uuid, Source.NVML),
                    ),
                )


def _modules(attributes: Attributes) -> Iterator[int]:
    for name in attributes:
        number = name.removeprefix("module").removesuffix("UUID")
        if name.startswith("module") and name.endswith("UUID") and number.isdigit():
            yield int(number)


def _both(key: GpuKey, tray: GpuKey) -> GpuKey:
    """The GPU's own device is nearer to it than the tray's; where they differ, it counts."""
    try:
        return merge(key, tray)
    except Refused:
        return key


def _taint(taint: Json) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"
