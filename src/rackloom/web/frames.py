"""The input of the drawing of one rack, and the colours of its GPUs.

A `RackFrame` holds one rack with everything that its drawing depends on and nothing else, so that equal
frames have equal drawings. It has no times of readings and no records of other racks, but it does record
that a layer or a domain is no longer known. The marks of a rack come from the findings alone: no layer is
read for a problem a second time.

A GPU is coloured by its group, as one layer reports it: partition, tenant, clique or workload. Its state is
unknown if that layer was not read recently, or is hidden from the viewer. It then keeps the last known
group. The name of a group chooses its hue, the same in every process. If another group has that hue, the
next free one is given. A group keeps its colour while the process lives, so that a new partition never
repaints racks that it is not in. None of the 8 hues is red, because red means a problem. A letter in the cell
distinguishes groups of one hue. In three modes a colour is a state and not a group: use, health, and
fragmentation, which shows free GPUs that are part of no free tray.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

import msgspec

from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.diagnosis.findings import Level
from rackloom.core.diagnosis.incremental import Memo, recompute_changed
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, NvlinkDomainRecord
from rackloom.web.chain import clique_of, partition_hidden, use_hidden
from rackloom.web.model import MapGpu, MapRack, SiteMap, tray_partly_taken
from rackloom.web.places import GpuSpot, PlacesByName, RackMarks, RackPlaces, marks_by_rack, places_named
from rackloom.web.tenancy import TenantRacks, labelled_namespaces, tenant_map
from rackloom.web.tenant_findings import tenant_findings

# Frames.


DomainLabel = tuple[str, str]
"""UID and name of a ComputeDomain."""


class RackFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One rack."""

    rack: MapRack
    operator: bool
    """Whether the viewer sees everything."""
    known: frozenset[Layer]
    """Layers whose reading is current."""
    answering: frozenset[str]
    """Domains of the rack whose reading shows the present state."""
    marks: RackMarks | None
    """None if the site was not examined."""
    named: tuple[str, ...]
    """UUIDs of its domains, hidden from tenants."""
    tenants: Mapping[str, str]
    """Organisations of the tenants that hold something in it, by their ids."""
    over: Mapping[str, DomainLabel]
    """The ComputeDomain of each of its nodes that is a member of one."""

    def level(self, spot: GpuSpot) -> Level | None:
        """The level of a GPU that findings name, or None if none does."""
        mark = None if self.marks is None else self.marks.gpus.get(spot)
        return None if mark is None else mark.level


class _FactsInput(NamedTuple):
    known: frozenset[Layer]
    operator: bool
    tenants: Mapping[str, str]
    compute_domains: tuple[ComputeDomain, ...]


class _SiteFacts:
    """The site's facts on which frames depend. Compared by address: equal facts are the same object."""

    def __init__(self, found: _FactsInput) -> None:
        self.known, self.operator, self.tenants, domains = found
        self.over: Mapping[str, DomainLabel] = {
            node.name: (domain.uid, domain.key) for domain in domains for node in domain.status.nodes
        }


class _FrameInput(NamedTuple):
    """Everything on which one frame depends."""

    rack: MapRack
    facts: _SiteFacts
    domains: tuple[NvlinkDomainRecord, ...]
    """The domains of the rack, by UUID."""
    marks: RackMarks | None


class RackFrames(msgspec.Struct, frozen=True):
    """The frames of one viewer, and the values with which the next map is compared."""

    whole: SiteMap = SiteMap(at=0.0)
    """The viewer's part of the map, with the findings that concern the viewer."""
    places: PlacesByName = {}
    """The locations of all objects that findings and operations name."""
    tenancy: TenantRacks = TenantRacks()
    named: Memo[str, MapRack, RackPlaces] = {}
    facts: Memo[str, _FactsInput, _SiteFacts] = {}
    memo: Memo[str, _FrameInput, RackFrame] = {}
    """Frames that were made for this viewer."""
    frames: Mapping[str, RackFrame] = {}
    """Every rack of the map, by name and in order."""


def rack_frames(whole: SiteMap) -> Mapping[str, RackFrame]:
    """Every rack of a map, by name and in order."""
    return update_rack_frames(whole, None, RackFrames()).frames


def update_rack_frames(
    site: SiteMap, org: str | None, before: RackFrames, nobodys: RackFrames | None = None
) -> RackFrames:
    """The frames of the part of a site that an organisation sees. None sees everything.

    Frames whose input equals that of `before` are the same objects. `nobodys` are the frames of the same map
    for `NOBODY`. The organisation shares those of the racks in which it holds nothing.
    """
    whole, tenancy = site, before.tenancy
    if org is not None:
        whole, tenancy = tenant_map(site, org, tenancy, None if nobodys is None else nobodys.whole)
    # The racks without an equal picture for tenants that hold nothing there.
    racks = whole.racks if nobodys is None else [shown.rack for _, shown in tenancy.shown.values()]
    named = recompute_changed(before.named, {rack.name: rack for rack in racks}, RackPlaces)
    # Names are looked up in the viewer's own part: a tenant is led to its own GPUs alone.
    wanted = {place for finding in site.findings or () for place in finding.where}
    wanted.update(place for happening in whole.happenings for place in happening.places)
    places = places_named([found for _, found in named.values()], wanted)
    if org is not None and site.findings is not None:
        whole = msgspec.structs.replace(whole, examined_at=site.examined_at)
        found = tenant_findings(site.findings, whole, places, labelled_namespaces(site, org))
        whole = msgspec.structs.replace(whole, findings=found)
    marks = None if whole.findings is None else marks_by_rack(whole.findings, places)

    known = frozenset(layer for layer in Layer if whole.known(layer))
    inputs_of_facts = {"": _FactsInput(known, whole.operator, whole.tenants, whole.compute_domains)}
    facts = recompute_changed(before.facts, inputs_of_facts, _SiteFacts)
    records = whole.domains
    inputs = {
        rack.name: _FrameInput(
            rack,
            facts[""][1],
            tuple([records[uuid] for uuid in sorted(rack.domains) if uuid in records]),
            None if marks is None else marks.get(rack.name, _NO_MARKS),
        )
        for rack in racks
    }
    memo = recompute_changed(before.memo, inputs, _rack_frame)
    own = {name: frame for name, (_, frame) in memo.items()}
    frames = own if nobodys is None else {**nobodys.frames, **own}
    return RackFrames(whole, places, tenancy, named, facts, memo, frames)


_NO_MARKS = RackMarks()


def _rack_frame(found: _FrameInput) -> RackFrame:
    rack, facts, domains, marks = found
    return RackFrame(
        rack=rack,
        operator=facts.operator,
        known=facts.known,
        answering=frozenset(domain.uuid for domain in domains if domain.answers),
        marks=marks,
        named=tuple(sorted(rack.domains - {""})) if facts.operator else (),
        tenants={id_: facts.tenants[id_] for id_ in rack.tenants if id_ in facts.tenants},
        over={name: facts.over[name] for name in rack.nodes if name in facts.over},
    )


# Colours.


COLOURS = 8
"""Hues that people can distinguish. Letters in the cells distinguish the groups of one hue."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class ColourMode(StrEnum):
    """The meaning of the colours."""

    USE = "use"
    HEALTH = "health"
    FRAGMENTATION = "fragmentation"
    TENANT = "tenant"
    PARTITION = "partition"
    CLIQUE = "clique"
    WORKLOAD = "workload"


GROUP_MODES = (ColourMode.TENANT, ColourMode.PARTITION, ColourMode.CLIQUE, ColourMode.WORKLOAD)
"""Modes in which a colour is a group of GPUs. In the others it is a state."""


class GpuState(StrEnum):
    """The state of a GPU in one mode."""

    GROUP = "group"
    FREE = "free"
    OTHERS = "others"
    """Another tenant's. A tenant sees nothing more of it."""
    UNKNOWN = "unknown"
    USED = "used"
    STRANDED = "stranded"
    """Free, in a tray that is partly taken, and so part of no free tray."""
    HEALTHY = "healthy"
    CRITICAL = "critical"
    DEGRADED = "degraded"


STATE_CLASSES = {
    GpuState.FREE: "f",
    GpuState.OTHERS: "o",
    GpuState.UNKNOWN: "q",
    GpuState.USED: "u",
    GpuState.STRANDED: "w",
    GpuState.HEALTHY: "f",
    GpuState.CRITICAL: "p",
    GpuState.DEGRADED: "g",
}
"""The style class of each state other than a group."""


class ColourGroup(msgspec.Struct, frozen=True, order=True):
    """One group of GPUs. `key` identifies it, and `name` is shown."""

    key: str
    name: str


class GpuShade(msgspec.Struct, frozen=True):
    """The group of a GPU: the last known one if its state is unknown."""

    state: GpuState
    group: ColourGroup | None = None


def _shades(unknown: GpuState, yes: GpuState, no: GpuState) -> Mapping[bool | None, GpuShade]:
    return {None: GpuShade(unknown), True: GpuShade(yes), False: GpuShade(no)}


def gpu_shade(frame: RackFrame, mode: ColourMode, spot: GpuSpot) -> GpuShade:
    """The state of a GPU, and its group. Unknown if its layer was not read recently, or is hidden."""
    tray = frame.rack.trays[spot[0]]
    gpu = tray[spot[1]]
    chain = gpu.chain
    if mode is ColourMode.FRAGMENTATION and gpu.taken is False and tray_partly_taken(tray):
        return _STRANDED
    if chain is None:
        return _HIDDEN_SHADES[gpu.taken]
    if mode is ColourMode.HEALTH:
        return _UNEXAMINED if frame.marks is None else _HEALTH_SHADES[frame.level(spot)]
    if mode not in GROUP_MODES:
        return _USE_SHADES[gpu.taken]
    group = _GROUP_OF_MODE[mode](frame, chain)
    if not _is_current(frame, mode, gpu, chain):
        return GpuShade(GpuState.UNKNOWN, group)
    return GpuShade(GpuState.FREE if group is None else GpuState.GROUP, group)


_STRANDED = GpuShade(GpuState.STRANDED)
_UNEXAMINED = GpuShade(GpuState.UNKNOWN)
_HIDDEN_SHADES = _shades(GpuState.UNKNOWN, GpuState.OTHERS, GpuState.FREE)
_HEALTH_SHADES = {
    None: GpuShade(GpuState.HEALTHY),
    Level.CRITICAL: GpuShade(GpuState.CRITICAL),
    Level.DEGRADED: GpuShade(GpuState.DEGRADED),
    Level.UNKNOWN: _UNEXAMINED,
}
_USE_SHADES = _shades(GpuState.UNKNOWN, GpuState.USED, GpuState.FREE)


def _partition_group(_: RackFrame, chain: GpuChain) -> ColourGroup | None:
    if chain.partition is None:
        return None
    if chain.logical is not None:
        return ColourGroup(chain.logical.id, chain.logical.name)
    if chain.partition.owner == "tray":
        return ColourGroup("tray", "each tray by itself")
    return ColourGroup(f"{chain.partition.domain}/{chain.partition.id}", chain.partition.name)


def _tenant_group(frame: RackFrame, chain: GpuChain) -> ColourGroup | None:
    tenant = chain.machine.tenant if chain.machine else None
    return ColourGroup(tenant, frame.tenants.get(tenant, tenant)) if tenant else None


def _clique_group(_: RackFrame, chain: GpuChain) -> ColourGroup | None:
    found = clique_of(chain)
    return ColourGroup(found, found) if found else None


def _workload_group(_: RackFrame, chain: GpuChain) -> ColourGroup | None:
    if chain.use is None or use_hidden(chain):
        return None
    if chain.compute_domain is not None:
        return ColourGroup(chain.compute_domain.uid, chain.compute_domain.key)
    return ColourGroup(chain.use.claim, chain.use.claim)


_GROUP_OF_MODE: Mapping[ColourMode, Callable[[RackFrame, GpuChain], ColourGroup | None]] = {
    ColourMode.PARTITION: _partition_group,
    ColourMode.TENANT: _tenant_group,
    ColourMode.CLIQUE: _clique_group,
    ColourMode.WORKLOAD: _workload_group,
}


def _is_current(frame: RackFrame, mode: ColourMode, gpu: MapGpu, chain: GpuChain) -> bool:
    if mode is ColourMode.PARTITION:
        answered = Layer.FABRIC in frame.known and gpu.domain in frame.answering
        certain = chain.fabric is not None and not chain.fabric.uncertain
        return answered and certain and not partition_hidden(chain)
    if mode is ColourMode.TENANT:
        return chain.machine is not None and Layer.SITE in frame.known
    if mode is ColourMode.WORKLOAD and use_hidden(chain):
        return False
    return (chain.node or chain.device) is not None and Layer.CLUSTER in frame.known


class Palette:
    """Numbers and hues for groups. A group keeps both."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._hues: dict[str, int] = {}

    def number(self, group: ColourGroup) -> int:
        """The group's number: 0 for the first group."""
        return self._numbers.setdefault(group.key, len(self._numbers))

    def give_hues(self, groups: Iterable[ColourGroup]) -> None:
        """Give hues to groups in any order. Those that are named after a colour choose first."""
        for group in sorted(groups, key=lambda group: (_named_hue(group.name) is None, group.name)):
            self.hue(group)

    def hue(self, group: ColourGroup) -> int:
        """The group's hue: the one that its name chooses, or the next that no other group has yet."""
        if group.key not in self._hues:
            first = preferred_hue(group.name)
            taken = set(self._hues.values())
            order = [(first + step) % COLOURS for step in range(COLOURS)]
            self._hues[group.key] = next((hue for hue in order if hue not in taken), first)
        return self._hues[group.key]


class MapColours:
    """The numbers of one map: groups have colours and letters, ComputeDomains have badges."""

    def __init__(self) -> None:
        self.groups = Palette()
        self.badges = Palette()


def letter_of(number: int) -> str:
    """The letter in the cells of a group. After 62 groups only colours distinguish them."""
    return LETTERS[number] if number < len(LETTERS) else "+"


_HUES_BY_NAME = {
    "blue": 0, "orange": 1, "green": 2, "pink": 3, "magenta": 3, "teal": 4, "cyan": 4, "brown": 5,
    "yellow": 6, "gold": 6, "violet": 7, "purple": 7,
}  # fmt: skip
"""A tenant that is named after a colour gets it."""


def _named_hue(name: str) -> int | None:
    return next((hue for word, hue in _HUES_BY_NAME.items() if word in name.lower()), None)


def preferred_hue(name: str) -> int:
    """The hue that a name chooses, the same in every process."""
    named = _named_hue(name)
    return sha256(name.encode()).digest()[0] % COLOURS if named is None else named
