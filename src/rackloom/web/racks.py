"""Racks as they are drawn: plain values that are equal exactly when their drawings are."""

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256

import msgspec

from rackloom.prove.picture.values import GpuChain, Layer
from rackloom.web.colouring import Colours, Group, Mode, Shade, State, hue, letter, shade
from rackloom.web.frames import Fabric, Frame
from rackloom.web.scene import Scene, Seat
from rackloom.web.wiring import Wiring, fastest, link_down, link_trouble, link_untold, nearest


class Cell(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU."""

    state: State
    hue: int = 0
    letter: str = ""
    name: str = ""
    """Of its group, or what it is without one."""
    sick: bool = False
    busy: bool = False
    """Whether a pod uses it."""
    nic: str = "unknown"
    """aligned, astray (at another NUMA node), down, slow, none, unknown; empty: not shown."""

    @property
    def look(self) -> str:
        """The style classes of the drawing."""
        base = f"h{self.hue}" if self.state is State.GROUP else _LOOKS[self.state]
        return base + (" s" if self.sick else "") + (" b" if self.busy else "")

    @property
    def words(self) -> str:
        """The drawing in words, for those who cannot see it."""
        said = self.name if self.state in (State.GROUP, State.FREE) else _WORDS[self.state]
        if self.state is State.UNKNOWN and self.name:
            said += f", last known {self.name}"
        notes = ["unhealthy"] * self.sick + ["used by a pod"] * self.busy
        return ", ".join([said, *notes, *([f"NIC {self.nic}"] if self.nic else [])])


_LOOKS = {State.FREE: "f", State.OTHERS: "o", State.UNKNOWN: "q"}
_WORDS = {State.OTHERS: "in use by somebody else", State.UNKNOWN: "unknown"}


class Tray(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One compute tray."""

    slot: int
    title: str
    cells: tuple[Cell, ...]
    free: bool | None
    """Whether a whole tray could be had here."""
    notes: tuple[str, ...] = ()
    """What people should know of it: cordoned, not ready..."""
    lost: bool = False
    """Whether its node is not known to be ready."""
    laid_over: str = ""
    """The ComputeDomain that it is a member of."""
    badge: int | None = None
    """Number of that ComputeDomain on the map."""


class Rack(msgspec.Struct, frozen=True, kw_only=True):
    """One rack: compute trays, the switches between them, and what is left of it."""

    id: str
    name: str
    domains: tuple[str, ...]
    """UUIDs of its NVLink domains, for operators."""
    above: tuple[Tray, ...]
    """Above the switches, top first."""
    below: tuple[Tray, ...]
    switches: Fabric
    problems: tuple[str, ...]
    """Why they are not known."""
    free: int | None
    """Whole trays that are free; None: unknown."""

    @property
    def trays(self) -> tuple[Tray, ...]:
        """All trays, top first."""
        return self.above + self.below


Spot = tuple[str, int, int]
"""Rack id, tray from the top, GPU from the left: how the page names a seat."""


def rack_id(name: str) -> str:
    """A name for a rack that any page element may have."""
    return "r" + sha256(name.encode()).hexdigest()[:12]


def find(whole: Scene, spot: Spot) -> Seat | None:
    """The seat that the page names so."""
    wanted, tray, gpu = spot
    rack = next((one for one in whole.racks if rack_id(one.name) == wanted), None)
    if rack is None or tray >= len(rack.trays) or gpu >= len(rack.trays[tray]):
        return None
    return rack.trays[tray][gpu]


def drawn_rack(frame: Frame, mode: Mode, colours: Colours) -> Rack:
    """One rack. New groups in it are given colours."""
    drawn = tuple(_drawn_tray(frame, mode, colours, tray) for tray in frame.rack.trays)
    # As racks are built: of 18 compute trays 10 stand above the switches and 8 below.
    lower = len(drawn) * 4 // 9
    frees = [tray.free for tray in drawn]
    return Rack(
        id=rack_id(frame.rack.name),
        name=frame.rack.name,
        domains=frame.named,
        above=drawn[: len(drawn) - lower],
        below=drawn[len(drawn) - lower :],
        switches=frame.fabric,
        problems=frame.problems,
        free=None if None in frees else sum(free is True for free in frees),
    )


def _drawn_tray(frame: Frame, mode: Mode, colours: Colours, seats: tuple[Seat, ...]) -> Tray:
    chain = next((seat.chain for seat in seats if seat.chain is not None), None)
    siblings = fastest(seat.chain for seat in seats if seat.chain is not None)
    laid = frame.over.get(chain.node.name) if chain is not None and chain.node is not None else None
    return Tray(
        slot=seats[0].place.slot,
        title=_title(seats[0], chain),
        cells=tuple(_cell(frame, mode, colours, seat, siblings) for seat in seats),
        free=tray_free(seats),
        notes=_notes(frame, chain),
        lost=chain is not None and _is_lost(frame, chain),
        laid_over=laid[1] if laid else "",
        badge=None if laid is None else colours.badges.number(Group(*laid)),
    )


def tray_free(seats: tuple[Seat, ...]) -> bool | None:
    """Whether all GPUs of a tray could be given away now; a cordoned or sick tray could not."""
    if any(seat.taken or seat.held_back for seat in seats):
        return False
    return None if any(seat.taken is None for seat in seats) else True


def _title(seat: Seat, chain: GpuChain | None) -> str:
    names = [f"slot {seat.place.slot}"] if seat.place.chassis or chain is None else []
    if chain is not None and chain.machine is not None:
        names.append(f"machine {chain.machine.id}")
    if chain is not None and chain.node is not None:
        names.append(f"node {chain.node.name}")
    return ", ".join(names)


def _notes(frame: Frame, chain: GpuChain | None) -> tuple[str, ...]:
    found = []
    machine, node = (chain.machine, chain.node) if chain is not None else (None, None)
    if machine is not None and machine.cordoned:
        found.append("cordoned")
    if machine is not None and machine.health:
        found.append("machine unhealthy")
    if chain is not None and node is not None and _is_lost(frame, chain):
        found.append("node not ready" if node.ready is False else "node unknown")
    if node is not None and node.unschedulable:
        found.append("unschedulable")
    return tuple(found)


def _is_lost(frame: Frame, chain: GpuChain) -> bool:
    return chain.node is not None and Layer.CLUSTER in frame.known and chain.node.ready is not True


def _cell(frame: Frame, mode: Mode, colours: Colours, seat: Seat, siblings: int) -> Cell:
    """One GPU, in a tray whose fastest rail has so many Gb/s."""
    chain = seat.chain
    found: Shade = shade(frame, mode, seat)
    if chain is None:
        return Cell(state=found.state, name="free" if found.state is State.FREE else "", nic="")
    number = None if found.group is None else colours.groups.number(found.group)
    return Cell(
        state=found.state,
        hue=0 if number is None else hue(number),
        letter="" if number is None else letter(number),
        name=_name(found, mode),
        sick=_is_sick(chain),
        busy=chain.use is not None,
        nic=_nic(frame, chain, siblings),
    )


def _name(found: Shade, mode: Mode) -> str:
    """A GPU that is in no group may be somebody's all the same."""
    if found.group is not None:
        return found.group.name
    return f"no {mode}" if found.state is State.FREE else ""


def _is_sick(chain: GpuChain) -> bool:
    """Whether its switch controller says so, or its plugin keeps workloads off it."""
    by_fabric = chain.fabric is not None and chain.fabric.healthy is False
    kept_off = chain.device is not None and any(not one.endswith(":None") for one in chain.device.taints)
    return by_fabric or kept_off


def _nic(frame: Frame, chain: GpuChain, siblings: int) -> str:
    """How the NICs of a GPU are wired, as their plugins published it: of several links the worst is drawn."""
    if chain.device is None or Layer.CLUSTER not in frame.known:
        return "unknown"
    if not chain.nics:
        return "none"
    if any(map(link_down, chain.nics)):
        return "down"
    if any(link_trouble(nic, siblings) for nic in chain.nics):
        return "slow"
    return "unknown" if any(map(link_untold, chain.nics)) else _WIRED[nearest(chain.device, chain.nics)]


_WIRED = {
    Wiring.ROOT: "aligned",
    Wiring.NUMA: "aligned",
    Wiring.APART: "astray",
    Wiring.UNKNOWN: "unknown",
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the legend."""

    hue: int
    letter: str
    name: str
    count: int


def badges(whole: Scene, colours: Colours) -> tuple[Entry, ...]:
    """The ComputeDomains that are laid over the racks, and how many nodes each has."""
    found = [(domain, Group(domain.uid, domain.key)) for domain in whole.compute_domains]
    numbered = sorted((colours.badges.number(group), group, len(one.status.nodes)) for one, group in found)
    return tuple(Entry(hue=hue(n), letter=str(n + 1), name=g.name, count=nodes) for n, g, nodes in numbered)


def groups(frame: Frame, mode: Mode) -> Counter[Group]:
    """The groups in one rack, and how many GPUs each has there."""
    shades = (shade(frame, mode, seat) for tray in frame.rack.trays for seat in tray)
    return Counter(one.group for one in shades if one.group is not None)


def legend(found: Iterable[Counter[Group]], colours: Colours) -> tuple[Entry, ...]:
    """The groups that are drawn in any rack, and how many GPUs each has."""
    counts: Counter[Group] = Counter()
    for one in found:
        counts.update(one)
    numbered = sorted((colours.groups.number(group), group, gpus) for group, gpus in counts.items())
    return tuple(Entry(hue=hue(n), letter=letter(n), name=g.name, count=gpus) for n, g, gpus in numbered)
