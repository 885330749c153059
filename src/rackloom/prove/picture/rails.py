"""Which NICs serve which GPU, as the plugins of both say: one rule for all who ask."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rackloom.prove.picture.values import DeviceSeen


class Rails:
    """The NICs among some devices. Addresses are those of one node."""

    def __init__(self, devices: Iterable[DeviceSeen]) -> None:
        devices = tuple(devices)
        self._naming: defaultdict[tuple[str, str], list[DeviceSeen]] = defaultdict(list)
        self._at: dict[tuple[str, str], DeviceSeen] = {}
        nics = [one for one in devices if one.kind == "nic"]
        for nic in nics:
            if nic.partner is not None:
                self._naming[nic.node, nic.partner].append(nic)
            if nic.key.pci_address is not None:
                self._at[nic.node, nic.key.pci_address.value] = nic
        self._gpus = {_name(nic): served for served, nic in self._pairs(devices)}
        self.nics = tuple(nic for nic in nics if _name(nic) in self._gpus)
        """Those that serve a GPU, in the order given."""

    def of(self, gpu: DeviceSeen) -> tuple[DeviceSeen, ...]:
        """The NICs that serve a GPU: first the one that it names, then all that name it."""
        address = gpu.key.pci_address
        declared = self._at.get((gpu.node, gpu.partner_address or ""))
        naming = () if address is None else self._naming.get((gpu.node, address.value), ())
        return tuple({_name(nic): nic for nic in (declared, *naming) if nic is not None}.values())

    def served_by(self, nic: DeviceSeen) -> str:
        """PCI address (or, where that is not published, name) of the GPU that a NIC of `nics` serves."""
        return self._gpus[_name(nic)]

    def _pairs(self, devices: Iterable[DeviceSeen]) -> Iterator[tuple[str, DeviceSeen]]:
        """What a NIC itself says comes last, and counts."""
        for gpu in devices:
            if gpu.kind == "gpu":
                address = gpu.key.pci_address
                yield from ((address.value if address else gpu.name, nic) for nic in self.of(gpu))
        for (_, served), nics in self._naming.items():
            yield from ((served, nic) for nic in nics)


def _name(nic: DeviceSeen) -> tuple[str, str, str]:
    return nic.driver, nic.pool, nic.name
