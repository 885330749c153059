"""The fault catalogue: each fault of racks and of their network once, and how it is repaired.

Steps of scenarios and the injector of random runs (tests/simulation) break things through these
functions alone. Each kind has been seen on real racks:

- Controllers that cannot be reached, restart or forget, and a second one that contradicts the rack's own.
- Changes that are refused, lost, late or repeated, and lists that omit something.
- Unhealthy GPUs and links, and trays that are pulled, returned, swapped or exchanged.
- Partitions that another writer makes, changes or deletes on the switch.

Faults of the API server are in `lab.kube.faults`, those of a node's devices in `lab.nodes`.

A switch is a `SimRack` in virtual time or an `NmxcServer` on a socket. Faults change a fabric only inside
`another_writer`, so that the invariants do not blame the service. A fault that lasts is a context manager:
entering it breaks something, leaving it repairs exactly that.
"""

import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import msgspec

from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID, GpuHealth, PartitionHealth
from rackloom.lab.invariants.fabric import foreign_change
from rackloom.lab.switches.fabric import FabricGpu, FabricPartition, SimulatedFabric
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.lab.switches.servers import NmxcServer
from rackloom.lab.virtual.network import CallFate, SimNetwork
from rackloom.lab.virtual.racks import SimRack

SwitchControl = SimRack | NmxcServer
"""The controller of one NVLink domain, and the fabric behind it as it truly is."""


@contextmanager
def another_writer(switch: SwitchControl) -> Iterator[SimulatedFabric]:
    """Somebody else than the service changes the fabric: what the service has read no longer holds."""
    if isinstance(switch, SimRack):
        switch.disturb()
    with foreign_change():
        yield switch.fabric


# The network, and the controllers behind it.


NetworkFault = Literal["applied-late", "applied-twice", "accepted-only", "dark", "slow", "notices-lost"]
"""The effect of the network on the next change that is requested of a rack, or on all calls from now on."""
CALL_FATES: Mapping[str, CallFate] = {
    "reply-lost": CallFate(back=None),
    # The driver gives up after 10 s.
    "applied-late": CallFate(there=12.0),
    "applied-twice": CallFate(copies=2),
    "accepted-only": CallFate(copies=0),
}
"""Faults that affect a single change."""
_NETWORK_STATES: Mapping[str, Mapping[str, Any]] = {
    "dark": {"dark": True},
    "slow": {"slow": 2.0},
    "notices-lost": {"notice_loss": 0.9},
}


def spoil_network(network: SimNetwork, how: NetworkFault) -> None:
    """Decide the fate of the next change, or of every call until the network is healed."""
    if how in CALL_FATES:
        network.next_mutations.append(CALL_FATES[how])
    for name, value in _NETWORK_STATES.get(how, {}).items():
        setattr(network, name, value)


@asynccontextmanager
async def unreachable(switch: SwitchControl) -> AsyncIterator[None]:
    """The controller refuses connections, and subscriptions end. The fabric keeps working."""
    await switch.go_away()
    yield
    await switch.come_back()


def set_domain(switch: SwitchControl, domain: str) -> None:
    """The controller names another domain UUID from its next answer on."""
    switch.fabric.domain = domain


def _forget_names(fabric: SimulatedFabric) -> None:
    for partition in list(fabric.partitions.values()):
        if partition.id != DEFAULT_PARTITION_ID:
            fabric.put(msgspec.structs.replace(partition, name=""))


def _forget_domain(fabric: SimulatedFabric) -> None:
    fabric.rename(str(uuid.uuid5(uuid.UUID(fabric.domain), "reborn")))


Forgotten = Literal["nothing", "names", "partitions", "domain"]
_FORGET: Mapping[Forgotten, Callable[[SimulatedFabric], None]] = {
    "nothing": lambda fabric: None,
    "names": _forget_names,
    "partitions": SimulatedFabric.factory_reset,
    "domain": _forget_domain,
}


def forget(switch: SwitchControl, what: Forgotten) -> None:
    """The controller loses a part of its memory, as in a restart."""
    with another_writer(switch) as fabric:
        _FORGET[what](fabric)


Mistreatment = Literal["refuses", "loses-reply", "omits-header", "omits-id"]


def mistreat_call(faults: NmxcFaults, rpc: str, how: Mistreatment) -> None:
    """The next call of an RPC is refused, carried out without an answer, or answered incompletely."""
    if how == "refuses":
        faults.refuse_next(rpc, "NOT_READY")
    elif how == "loses-reply":
        faults.drop_reply_of_next(rpc)
    elif how == "omits-header":
        faults.omit_header_of_next(rpc)
    else:
        faults.omit_id_of_next(rpc)


@asynccontextmanager
async def frozen(switch: SwitchControl) -> AsyncIterator[None]:
    """The controller hangs: its connections stay open, and it answers and sends nothing."""
    switch.faults.freeze()
    yield
    switch.faults.thaw()


# Partitions that another writer makes, changes or deletes on the switch.


def put_partition(switch: SwitchControl, guids: Iterable[int], name: str = "") -> FabricPartition:
    """Somebody makes a partition of any GPUs, wherever they are."""
    number = next(free for free in itertools.count(1) if free not in switch.fabric.partitions)
    made = FabricPartition(id=number, name=name or f"by-hand-{number}", guids=tuple(sorted(guids)))
    with another_writer(switch) as fabric:
        fabric.put(made)
    return made


def delete_partition(switch: SwitchControl, partition: FabricPartition) -> None:
    """Somebody deletes a partition, if it is there."""
    if partition.id in switch.fabric.partitions:
        with another_writer(switch) as fabric:
            fabric.delete(partition.id)


def replace_members(switch: SwitchControl, partition: FabricPartition) -> None:
    """Somebody writes the member list of a partition back as it once was (NMX-M: PUT)."""
    with another_writer(switch) as fabric:
        fabric.replace(partition.id, partition.guids)


# Trays, GPUs and links.


def set_health(switch: SwitchControl, guid: int, health: GpuHealth) -> None:
    """Change the health of a GPU if it is in the rack."""
    gpu = switch.fabric.gpus.get(guid)
    if gpu is not None and gpu.health is not health:
        with another_writer(switch) as fabric:
            fabric.set_health(guid, health)


def set_links(switch: SwitchControl, gpus: GpuHealth, partitions: PartitionHealth) -> None:
    """Every GPU and partition has lost or regained links: each GPU has links to every switch tray."""
    for guid in sorted(switch.fabric.gpus):
        set_health(switch, guid, gpus)
    for partition in list(switch.fabric.partitions.values()):
        if partition.health is not partitions:
            with another_writer(switch) as fabric:
                fabric.put(msgspec.structs.replace(partition, health=partitions))


def heal_fabric(switch: SwitchControl) -> None:
    """Every GPU and partition is healthy."""
    set_links(switch, GpuHealth.HEALTHY, PartitionHealth.HEALTHY)


def pull_tray(switch: SwitchControl, gpus: Collection[FabricGpu]) -> None:
    """The tray with these GPUs is taken out."""
    if gpus:
        with another_writer(switch) as fabric:
            fabric.remove_gpus([gpu.guid for gpu in gpus])


def return_tray(
    switch: SwitchControl, gpus: Iterable[FabricGpu], new_guid: Callable[[], int] | None = None
) -> None:
    """Put the tray back. With `new_guid`, another tray takes its slot."""
    if new_guid is not None:
        gpus = [msgspec.structs.replace(gpu, guid=new_guid()) for gpu in gpus]
    with another_writer(switch) as fabric:
        fabric.insert_gpus(gpus)


def exchange_trays(switch: SwitchControl, gpus: Iterable[FabricGpu], others: Iterable[FabricGpu]) -> None:
    """Two trays of a rack are put into one another's slots."""
    pairs = list(zip(gpus, others, strict=True))
    moved = [_in_slot_of(gpu, other) for gpu, other in pairs] + [
        _in_slot_of(other, gpu) for gpu, other in pairs
    ]
    with another_writer(switch) as fabric:
        fabric.insert_gpus(moved)


def _in_slot_of(gpu: FabricGpu, there: FabricGpu) -> FabricGpu:
    return msgspec.structs.replace(there, guid=gpu.guid, health=gpu.health)
