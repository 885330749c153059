"""The machine of our site that a machine of NICo is, by its place, its id, and the GUIDs of its GPUs.

All evidence must name the same machine. If it names none or several, the instance is not imported.
"""

from collections.abc import Iterable

from rackloom.core.takeover.records import NicoInstance, NicoReading, SiteMachine, SiteReading

RELEASED_STATUSES = frozenset({"Terminating", "Terminated"})
"""Instances that are giving their machine back. All others keep it, regardless of their power or health."""


class MachineFinder:
    """Finds the machines of NICo here, by place, id and GUIDs."""

    def __init__(self, nico: NicoReading, site: SiteReading) -> None:
        self._known = {machine.id: machine for machine in nico.machines}
        self._by_id = {machine.id: machine for machine in site.machines}
        self._by_place = {(machine.chassis_serial, machine.slot): machine for machine in site.machines}
        self._by_guid = {
            guid: machine for machine in site.machines for guid in machine.gpus.values() if guid is not None
        }

    def candidates_of_instance(self, known: NicoInstance) -> list[SiteMachine]:
        """Every machine that may be that of an instance."""
        guids = [entry.guid for entry in known.interfaces if entry.guid is not None]
        return [] if known.machine is None else self.candidates(known.machine, guids)

    def find_of_instance(self, known: NicoInstance) -> tuple[SiteMachine | None, str | None]:
        """The machine of an instance that keeps it, or why it is not imported."""
        if known.status in RELEASED_STATUSES:
            return None, f"it is {known.status} in NICo"
        if known.machine is None:
            return None, "it has no machine in NICo"
        found = self.candidates_of_instance(known)
        if not found:
            return None, f"its machine {known.machine} is not known here"
        if len(found) > 1:
            names = " or ".join(machine.id for machine in found)
            return None, f"its machine {known.machine} could be {names} here"
        return found[0], None

    def candidates(self, machine_id: str, guids: Iterable[str] = ()) -> list[SiteMachine]:
        """The machines that evidence names: the place, the id, or the GPUs."""
        place = self._known.get(machine_id)
        evidence = [self._by_id.get(machine_id), *(self._by_guid.get(guid) for guid in guids)]
        if place is not None and place.chassis_serial is not None and place.slot is not None:
            evidence.append(self._by_place.get((place.chassis_serial, place.slot)))
        found = {machine.id: machine for machine in evidence if machine is not None}
        return [found[name] for name in sorted(found)]
