"""What belongs to a GPU in each layer, found by the names that the layer itself uses."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rackloom.claim.domain import names
from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.picture.rails import Rails
from rackloom.prove.picture.values import (
    DeviceSeen,
    DeviceUse,
    FabricGpu,
    InstanceGpu,
    LogicalSeen,
    NodeSeen,
    PartitionSeen,
    Picture,
    TransferSeen,
)
from rackloom.topology.identity import GpuKey, joins

DeviceName = tuple[str, str, str]
"""Driver, pool and name."""


class Lookups:
    """Indexes of one picture, each made once."""

    def __init__(self, picture: Picture) -> None:
        self._partitions = {(one.domain, one.id): one for one in picture.partitions}
        self._logicals = {one.id: one for one in picture.logicals}
        self._wanted = {(one.instance, one.module_id): one for one in picture.instance_gpus}
        self._nodes = {one.name: one for one in picture.nodes}
        self._uses = {(one.driver, one.pool, one.device): one for one in reversed(picture.uses)}
        self._domains = {one.uid: one for one in picture.compute_domains}
        self._domain_of_claim = {f"{one.namespace}/{one.name}": one.domain for one in picture.claims}
        self._uses_of_pod = _by_pod(picture.uses)
        self._rails = Rails(picture.devices)
        self._transfers = dict(_transfers(picture.transfers))

    def partition_of(self, gpu: FabricGpu) -> PartitionSeen | None:
        """The physical partition that holds a GPU."""
        return None if gpu.partition is None else self._partitions.get((gpu.domain, gpu.partition))

    def logical(self, id_: str | None) -> LogicalSeen | None:
        """A logical partition by its id."""
        return None if id_ is None else self._logicals.get(id_)

    def wanted(self, instance: str | None, module_id: int) -> InstanceGpu | None:
        """The interface of an instance that stands for one GPU of its machine."""
        return None if instance is None else self._wanted.get((instance, module_id))

    def node(self, name: str) -> NodeSeen | None:
        """A node by its name."""
        return self._nodes.get(name)

    def use_of(self, device: DeviceSeen) -> DeviceUse | None:
        """Who has a device."""
        return self._uses.get((device.driver, device.pool, device.name))

    def compute_domain_of(self, use: DeviceUse) -> ComputeDomain | None:
        """The ComputeDomain whose channel the pods of a use have."""
        uids = (self._domain_of_claim.get(one.claim, "") for one in self._beside(use))
        return next((self._domains[uid] for uid in uids if uid in self._domains), None)

    def channel_of(self, use: DeviceUse) -> str | None:
        """The IMEX channel of the pods of a use."""
        devices = (one.device for one in self._beside(use) if one.driver == names.IMEX_DRIVER)
        return next((device for device in devices if device.startswith("channel-")), None)

    def nics_of(self, gpu: DeviceSeen) -> tuple[DeviceSeen, ...]:
        """The NICs that serve a GPU, first the one that it is paired with."""
        return self._rails.of(gpu)

    def transfer_of(self, key: GpuKey, node: str | None) -> TransferSeen | None:
        """The newest transfer from a GPU; PCI addresses name it only on its own node."""
        uuid, address = key.gpu_uuid, key.pci_address
        by_uuid = None if uuid is None else self._transfers.get(("", uuid.value))
        if by_uuid is not None:
            return by_uuid if joins(by_uuid.key, key) else None
        found = None if address is None or node is None else self._transfers.get((node, address.value))
        return found if found is not None and joins(found.key, key, one_machine=True) else None

    def _beside(self, use: DeviceUse) -> Iterator[DeviceUse]:
        """What the pods of a use have, in claims of theirs."""
        for pod in use.pods:
            yield from self._uses_of_pod[pod]


def _by_pod(uses: Iterable[DeviceUse]) -> dict[str, list[DeviceUse]]:
    found: defaultdict[str, list[DeviceUse]] = defaultdict(list)
    for use in uses:
        for pod in use.pods:
            found[pod].append(use)
    return found


def _transfers(transfers: Iterable[TransferSeen]) -> Iterator[tuple[tuple[str, str], TransferSeen]]:
    for one in sorted(transfers, key=lambda one: one.at):
        if one.key.gpu_uuid is not None:
            yield ("", one.key.gpu_uuid.value), one
        elif one.key.pci_address is not None:
            yield (one.node, one.key.pci_address.value), one
