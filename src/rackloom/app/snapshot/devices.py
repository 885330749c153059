"""Devices out of ResourceSlices, with the parts of the join key that their plugins publish.

Devices of the GPU and the IMEX driver state their kind. A device of any other driver is a NIC if it has
`rdma` or `ifName`. GPU drivers other than ours publish no slot, so the attributes of the tray's IMEX devices
add slot and fabric GUID to the GPU of the same node with that UUID. If both contradict each other, the GPU's
own device counts.

DeviceTaintRules add their taints to those that drivers publish.

`DeviceCache` keeps the result by node: a node with unchanged slices and rules is not read again.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from rackloom.core.allocate.attributes import (
    CHASSIS_SERIAL,
    CLIQUE,
    FABRIC_GUID,
    GPU_UUID,
    MODULE_ID,
    SLOT,
    STANDARD_DOMAIN,
)
from rackloom.core.allocate.taint_rules import DeviceTaintRule
from rackloom.core.cluster import names
from rackloom.core.cluster.devices import SliceDevice, devices_of
from rackloom.core.cluster.nodes import Taint, newest_slices, node_of_slice, slice_pool
from rackloom.core.cluster.objects import JsonMapping, Object, epoch_seconds
from rackloom.core.diagnosis.index import BLOCKING_EFFECTS
from rackloom.core.diagnosis.snapshot import DeviceRecord, PoolRecord, grouped
from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source, merge_keys

Attributes = Mapping[str, Any]
_PCIE_ROOT, _NUMA_NODE = f"{STANDARD_DOMAIN}/pcieRoot", f"{STANDARD_DOMAIN}/numaNode"
_PCI_ADDRESS = f"{STANDARD_DOMAIN}/pciBusID"
_MODULE_UUID = re.compile(r"module(0|[1-9][0-9]?)UUID")


class PublishedDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a cluster's ResourceSlices."""

    devices: tuple[DeviceRecord, ...] = ()
    pools: tuple[PoolRecord, ...] = ()


Rules = tuple[DeviceTaintRule, ...]


class _NodeDevices(NamedTuple):
    """The slices of one node with the rules that may concern them, and the devices in them."""

    slices: list[JsonMapping]
    rules: Rules
    published: PublishedDevices


class DeviceCache:
    """Devices of the previous reading: a node with unchanged slices is not read again."""

    def __init__(self) -> None:
        self._newest: tuple[list[Object], Rules, dict[str, _NodeDevices], PublishedDevices] = (
            [],
            (),
            {},
            PublishedDevices(),
        )

    def of(self, slices: Iterable[Object], rules: Rules = ()) -> PublishedDevices:
        """The pools of all nodes, and the devices of their newest generation, by node, driver and name."""
        # The state is read once and written once: an abandoned reading may still run in its thread.
        same, same_rules, before, published = self._newest
        current = list(slices)
        # A follower of the cluster returns the very same objects, which are compared by address.
        if current == same and rules == same_rules:
            return published
        by_node = grouped((node_of_slice(slice_), slice_) for slice_ in newest_slices(current))
        nodes = {node: _read_node(node, some, rules, before.get(node)) for node, some in by_node.items()}
        if len(nodes) != len(before) or any(found is not before.get(node) for node, found in nodes.items()):
            shown = [nodes[name].published for name in sorted(nodes)]
            published = PublishedDevices(
                devices=tuple(chain.from_iterable([found.devices for found in shown])),
                pools=tuple(chain.from_iterable([found.pools for found in shown])),
            )
        self._newest = current, rules, nodes, published
        return published


def _read_node(
    node: str, slices: list[JsonMapping], rules: Rules, before: _NodeDevices | None
) -> _NodeDevices:
    pools = sorted({(pool.driver, pool.name) for pool in map(slice_pool, slices)})
    rules = tuple(rule for rule in rules if any(rule.concerns(*pool) for pool in pools))
    if before is not None and before.slices == slices and before.rules == rules:
        return before
    devices = [device for slice_ in slices for device in devices_of(slice_)]
    trays = dict(_tray_keys(devices))
    records = sorted((_record(device, trays, rules) for device in devices), key=lambda found: found.device_id)
    here = tuple(PoolRecord(driver=driver, name=pool, node=node) for driver, pool in pools)
    return _NodeDevices(slices, rules, PublishedDevices(devices=tuple(records), pools=here))


def _record(device: SliceDevice, trays: Mapping[tuple[str, str], GpuKey], rules: Rules) -> DeviceRecord:
    attributes, key = device.attributes, _key(device.attributes)
    selecting = [rule for rule in rules if rule.selects(device.driver, device.pool, device.name)]
    of_rules = (msgspec.convert(rule.spec.taint, Taint, from_attributes=True) for rule in selecting)
    taints = (*device.taints, *of_rules)
    # The API server dates each taint.
    times = [epoch_seconds(taint.time_added or "") for taint in taints if taint.effect in BLOCKING_EFFECTS]
    if key.gpu_uuid is not None and (device.node, key.gpu_uuid.value) in trays:
        # If the two contradict each other, the key of the GPU's own device counts.
        with suppress(Refused):
            key = merge_keys(key, trays[device.node, key.gpu_uuid.value])
    return DeviceRecord(
        driver=device.driver,
        pool=device.pool,
        name=device.name,
        node=device.node,
        kind=_kind(device),
        key=key,
        clique=attributes.get(CLIQUE),
        pcie_root=attributes.get(_PCIE_ROOT),
        numa=attributes.get(_NUMA_NODE, attributes.get("numaNode")),
        partner=attributes.get("nicPartner") or attributes.get("gpuPartnerPCIBusID"),
        partner_address=attributes.get("nicPartnerPCIBusID"),
        partner_class=attributes.get("nicPartnerClass") or attributes.get("gpuPartnerClass"),
        link=attributes.get("rdmaState") or attributes.get("state"),
        gbps=attributes.get("linkSpeedGbps"),
        taints=tuple(taint.text for taint in taints),
        rules=tuple(
            sorted(rule.metadata.name for rule in selecting if rule.spec.taint.effect in BLOCKING_EFFECTS)
        ),
        tainted_since=min((time for time in times if time is not None), default=None),
    )


def _kind(device: SliceDevice) -> str:
    # As in `is_whole_gpu`: a GPU driver may publish no type.
    kind = str(device.attributes.get("type", "gpu" if device.driver == names.GPU_DRIVER else ""))
    if device.driver in (names.GPU_DRIVER, names.IMEX_DRIVER):
        return "channel" if kind == names.ISOLATED_CHANNEL_TYPE else kind
    return "nic" if "rdma" in device.attributes or "ifName" in device.attributes else "other"


def _key(attributes: Attributes) -> GpuKey:
    address = attributes.get(_PCI_ADDRESS) or attributes.get("pciAddress")
    uuid = attributes.get(GPU_UUID)
    return GpuKey(
        place=_slot_key(attributes, attributes.get(MODULE_ID)),
        fabric_guid=_guid(attributes.get(FABRIC_GUID)),
        gpu_uuid=Fact(uuid, Source.NVML) if isinstance(uuid, str) else None,
        pci_address=None if address is None else Fact(str(address).lower(), Source.SYSFS),
    )


def _guid(value: object) -> Fact[int] | None:
    """A fabric GUID in hexadecimal digits, or None for anything else, because any driver may publish it."""
    try:
        guid = int(value, 16) if isinstance(value, str) else -1
    except ValueError:
        return None
    return Fact(guid, Source.NVML) if 0 <= guid < 1 << 64 else None


def _slot_key(attributes: Attributes, module: object) -> Fact[SlotKey] | None:
    serial, slot = attributes.get(CHASSIS_SERIAL), attributes.get(SLOT)
    if isinstance(serial, str) and isinstance(slot, int) and isinstance(module, int):
        return Fact(SlotKey(serial, slot, module), Source.NVML)
    return None


def _tray_keys(devices: Iterable[SliceDevice]) -> Iterator[tuple[tuple[str, str], GpuKey]]:
    """GPUs as IMEX devices publish them, by node and UUID: other GPU drivers publish no slot."""
    for device in devices:
        for name, uuid in device.attributes.items():
            found = _MODULE_UUID.fullmatch(name)
            if found is not None and isinstance(uuid, str):
                key = GpuKey(
                    place=_slot_key(device.attributes, int(found[1])),
                    fabric_guid=_guid(device.attributes.get(f"module{found[1]}FabricGUID")),
                    gpu_uuid=Fact(uuid, Source.NVML),
                )
                yield (device.node, uuid), key
