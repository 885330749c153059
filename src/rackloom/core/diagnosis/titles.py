"""The head of a finding: the problem, its place, and the affected jobs and tenants.

A place has the name of its part: `rack-02/slot-4/gpu-2`. Names of nodes, UUIDs and GUIDs stand in the
evidence. If the records do not know the place, the subject of the finding names it. Affected are, as far as
the snapshot shows it, the pods (or the job that they belong to) that hold the devices and nodes of the
finding, and the organisations with instances on its machines.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

import msgspec

from rackloom.core.diagnosis.catalogue import Check, runbook_name
from rackloom.core.diagnosis.findings import CheckState, Finding, first_few, unique
from rackloom.core.diagnosis.index import (
    SnapshotIndex,
    at_device,
    at_domain,
    at_gpu,
    at_machine,
    at_node,
    at_pod,
    tray_part,
)
from rackloom.core.diagnosis.repair_steps import repair_steps
from rackloom.core.diagnosis.snapshot import grouped
from rackloom.topology.part_names import PartName, read_part_name

_LOST, _RESET, _REBOOT = "gpu.nvidia.com/gpu-lost", "recovery=gpu-reset", "recovery=node-reboot"
TITLES: Mapping[Check, str] = {
    Check.LAYER: "{subject} cannot be read",
    Check.CONTROLLER: "The switch controller of {place} cannot be believed or read",
    Check.CONTROLLER_AWAY: "A switch controller of {place} stays away",
    Check.DOMAIN_PAUSED: "The NVLink domain of {place} is paused",
    Check.TRAY_PLACE: "{place} was moved",
    Check.MACHINE_PRESENT: "{place} is missing from its switch controller",
    Check.GPU_HEALTH: "{place} is sick: {message}",
    Check.PARTITION_HEALTH: "{subject} is sick",
    Check.ISOLATION: "Two tenants share a partition: {subject}",
    Check.ONE_PARTITION: "{place} is in several partitions",
    Check.PARTITION_THERE: "{subject} is gone from the fabric",
    Check.PARTITION_OWNED: "Somebody else made {subject}",
    Check.DEFAULT_GONE: "The factory's partition is still in {place}",
    Check.MULTICAST: "Multicast groups of {place} run out",
    Check.INTERFACE: "{place} is not in the partition that was asked for",
    Check.LOGICAL_SPREAD: "{subject} spans racks that share no memory",
    Check.MAPPING: "GPUs of {place} cannot be told apart",
    Check.IDENTITY: "{place} was swapped: layers name different GPUs",
    Check.SPLIT: "{place} is split over several partitions",
    Check.CLIQUE_LABEL: "The clique label of {place} is wrong",
    Check.CLIQUE_WRITER: "Two programs write the clique label of {place}",
    Check.NODE_READY: "The node of {place} is not ready",
    Check.NODE_PUBLISHES: "The node of {place} publishes no devices of a driver",
    Check.SLICE_OF_NODE: "Devices are left of {subject}, which is gone",
    Check.DEVICE_TAINT: "{place} takes no new work",
    Check.DEVICE_THERE: "{subject} holds a device that is gone",
    Check.TEMPLATES: "{subject} names a claim template that is not there",
    Check.CLAIMS: "{subject} waits for its devices",
    Check.GANG: "{subject} is not on its trays",
    Check.PREPARED: "A device of {subject} is not ready",
    Check.ACTIVE: "{subject} is not ready",
    Check.ONE_CLIQUE: "Pods of {subject} are on racks that share no memory",
    Check.MESH: "IMEX daemons of {subject} do not all reach each other",
    Check.NIC_LINK: "A network link of {place} is down or slow",
    Check.NIC_ALIGNED: "{place} has no NIC near it",
    Check.TRANSFER: "The newest {subject} did not show what it should",
    Check.DRIVER: "{subject} has a driver that does not fit",
    Check.CDI: "{subject} cannot give devices to containers",
    Check.PORTS: "IMEX ports of {subject} are taken",
    Check.HOST_IMEX: "{subject} runs an IMEX session of its own",
    Check.CHANNELS: "{subject} offers no IMEX channels",
}
"""The title of each check. `{place}` is the place on the map, `{subject}` the subject of the finding."""
_TITLES_BY_NAME: Mapping[str, str] = {str(check): title for check, title in TITLES.items()}
_ALWAYS_UNKNOWN = (Check.LAYER, Check.CONTROLLER)
"""Checks with titles that already mention the unknown state."""
_ARTICLES = ("A ", "The ")


def explained(findings: Iterable[Finding], index: SnapshotIndex) -> tuple[Finding, ...]:
    """The findings, each with its title, affected jobs and tenants, the steps of its fix, and its runbook."""
    found = tuple(findings)
    places = _Places(index, {place for finding in found for place in finding.where})
    return tuple(
        msgspec.structs.replace(
            finding,
            title=_title(finding, place),
            place=place,
            affects=tuple(places.affected(finding.where)),
            steps=repair_steps(finding.fix),
            runbook=runbook_name(finding.check),
        )
        for finding in found
        for place in [places.name(finding.where)]
    )


def _title(finding: Finding, place: str) -> str:
    pattern = _TITLES_BY_NAME.get(finding.check, "{subject}")
    if finding.check == Check.DEVICE_TAINT:
        pattern = taint_title(finding.message)
    if not place and "{place}" in pattern:
        pattern = "{subject}: {message}"
    elif place[:1].isdigit() and pattern.startswith("{place}"):
        pattern = "{place}: {message}"  # several trays: the verb of the pattern is singular
    title = pattern.format(place=place, subject=finding.subject, message=finding.message)
    if finding.state is CheckState.UNKNOWN and finding.check not in _ALWAYS_UNKNOWN:
        clause = f"{title[:1].lower()}{title[1:]}" if title.startswith(_ARTICLES) else title
        title = f"unknown whether {clause}"
    # A name is written in one form, even at the start of a sentence.
    return title if place and title.startswith(place) else title[:1].upper() + title[1:]


def taint_title(message: str) -> str:
    """The title of a tainted GPU, with its place as `{place}`. It has nothing else of the message."""
    if _LOST in message:
        return "{place} is lost"
    if _REBOOT in message:
        return "{place} needs a restart of its machine"
    return "{place} needs a reset" if _RESET in message else TITLES[Check.DEVICE_TAINT]


class _Places:
    """The names of some places, and who is there. Each index is built when the first finding needs it."""

    def __init__(self, index: SnapshotIndex, places: Collection[str]) -> None:
        self._index = index
        self._wanted = places
        split = (place.partition(" ") for place in places)
        names = grouped((kind, name) for kind, _, name in split)
        # A device is named by its node, and a GPU by its domain.
        self._nodes = {*names["node"], *(name.partition("/")[0] for name in names["device"])}
        self._domains = {name.partition("/")[0] for name in names["gpu"]}
        self._pod_keys = frozenset(names["pod"])

    def name(self, where: tuple[str, ...]) -> str:
        """The finest place that holds all of it: a GPU, a tray, trays, or racks. Empty if none is known."""
        parts = dict.fromkeys(self._parts[place] for place in where if place in self._parts)
        finest = [part for part in parts if part.gpu is not None] or list(parts)
        if len(finest) == 1:
            return str(finest[0])
        named = (self._trays[place] for place in where if place in self._trays)
        trays = list(dict.fromkeys([*(part.tray for part in parts), *named]))
        racks = unique(
            *(tray.rack for tray in trays), *(rack for place in where for rack in self._racks.get(place, ()))
        )
        if not trays:
            return first_few(racks)
        return str(trays[0]) if len(trays) == 1 else f"{len(trays)} trays of {first_few(racks)}"

    def affected(self, where: tuple[str, ...]) -> Iterator[str]:
        """Jobs and pods that hold devices or nodes there, then organisations with an instance there."""
        kinds = {place.partition(" ")[0] for place in where}
        finest = next((f"{kind} " for kind in ("device", "pod", "node") if kind in kinds), " ")
        pods = (pod for place in where if place.startswith(finest) for pod in self._pods.get(place, ()))
        yield from unique(*(self._owners.get(pod) or f"pod {pod}" for pod in pods))
        tenants = (self._tenants[place] for place in where if place in self._tenants)
        yield from unique(*(f"tenant {tenant}" for tenant in tenants))

    @cached_property
    def _parts(self) -> Mapping[str, PartName]:
        found: dict[str, PartName] = {}
        for chain in self._index.chains_near(self._nodes, self._domains):
            name = self._index.gpu_part(chain)
            if chain.device is not None:
                found[at_device(chain.device)] = name
            if chain.fabric is not None:
                found[at_gpu(chain.fabric.domain, chain.fabric.guid)] = name
            for nic in chain.nics:
                if (place := at_device(nic)) in self._wanted:
                    found[place] = read_part_name(self._index.device_part(nic))
        return found

    @cached_property
    def _trays(self) -> Mapping[str, PartName]:
        machines = {machine.id: machine for machine in self._index.snapshot.machines}
        named = ((at_machine(id_), machine) for id_, machine in machines.items())
        found = {place: tray_part(machine) for place, machine in named if place in self._wanted}
        nodes = self._index.node_of_machine.items() if self._nodes else ()
        for id_, node in nodes:
            if node in self._nodes and id_ in machines:
                found[at_node(node)] = tray_part(machines[id_])
        return found

    @cached_property
    def _racks(self) -> Mapping[str, tuple[str, ...]]:
        machines = self._index.snapshot.machines
        racks = grouped((at_domain(machine.domain), machine.rack) for machine in machines)
        return {domain: unique(*names) for domain, names in racks.items()}

    @cached_property
    def _owners(self) -> Mapping[str, str]:
        return {pod.key: pod.owner for pod in self._index.snapshot.pods}

    @cached_property
    def _pods(self) -> Mapping[str, list[str]]:
        """Pods by the place that they are, hold or run on."""
        return grouped(
            (place, pod)
            for use in self._index.snapshot.uses
            if use.pool in self._nodes or not self._pod_keys.isdisjoint(use.pods)
            for pod in use.pods
            for place in (f"device {use.pool}/{use.driver}/{use.device}", at_node(use.pool), at_pod(pod))
        )

    @cached_property
    def _tenants(self) -> Mapping[str, str]:
        names = self._index.snapshot.tenants
        held = ((machine.id, machine.tenant) for machine in self._index.snapshot.machines)
        return {at_machine(id_): names.get(tenant, tenant) for id_, tenant in held if tenant is not None}
