"""What the drawing of one rack depends on, and the colours of its GPUs.

A `RackFrame` holds one rack with all that its drawing depends on and nothing else: equal frames are drawn
equal. Times are not part of it, nor is what was read of other racks; that a layer or a domain is no
longer known is.

A GPU is coloured by its group, as one layer reports it: partition, tenant, clique or workload. It is
unknown where that layer was not read, not lately, or is hidden from the viewer; the last known group is
kept. The name of a group chooses its hue, the same in every process; where another group has that hue, the
next free one is given. A group keeps its colour while the process lives, so that a new partition never
repaints racks that it is not in. There are 8 hues, of which none is red, because red means a problem; a
letter in the cell tells groups of one hue apart. In three modes a colour is a state and not a group: use,
health, and fragmentation, which shows free GPUs of which no whole tray can be had.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

import msgspec

from rackloom.core.diagnosis.findings import unique
from rackloom.core.diagnosis.incremental import Memo, recompute_changed
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, NvlinkDomainRecord
from rackloom.web.chain import clique_of, partition_hidden, use_hidden
from rackloom.web.model import MapGpu, MapRack, MapTray, SiteMap, tray_partly_taken

# Frames.


DomainLabel = tuple[str, str]
"""UID and name of a ComputeDomain."""


class FabricState(StrEnum):
    """Whether the NVLink domains of a rack were read, the worst first."""

    DISPUTED = "in dispute"
    SILENT = "not read lately"
    PAUSED = "paused"
    READ = "as last read"


class RackFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One rack."""

    rack: MapRack
    operator: bool
    """Whether the viewer sees everything."""
    asked: frozenset[Layer]
    """Layers that the site has."""
    known: frozenset[Layer]
    """Layers whose reading is current."""
    answering: frozenset[str]
    """Domains of the rack whose reading shows the present state."""
    named: tuple[str, ...]
    """UUIDs of its domains; hidden from tenants."""
    fabric: FabricState
    problems: tuple[str, ...]
    """Why other domains are not known; hidden from tenants."""
    tenants: Mapping[str, str]
    """Organisations of the tenants that hold something in it, by their ids."""
    over: Mapping[str, DomainLabel]
    """The ComputeDomain of each of its nodes that is a member of one."""


class _SiteFacts:
    """What frames depend on beside their rack. Compared by address: equal facts are the same object."""

    def __init__(self, whole: SiteMap, known: frozenset[Layer]) -> None:
        self.known = known
        self.asked = _asked(whole)
        self.operator = whole.operator
        self.tenants = whole.tenants
        self.compute_domains = whole.compute_domains
        self.over: Mapping[str, DomainLabel] = {
            node.name: (domain.uid, domain.key)
            for domain in whole.compute_domains
            for node in domain.status.nodes
        }

    def says(self, whole: SiteMap, known: frozenset[Layer]) -> bool:
        """Whether they are those of this map."""
        return (
            self.known == known
            and self.asked == _asked(whole)
            and self.operator == whole.operator
            and self.compute_domains == whole.compute_domains
            and self.tenants == whole.tenants
        )


def _asked(whole: SiteMap) -> frozenset[Layer]:
    return frozenset(status.layer for status in whole.layers)


class _FrameInput(NamedTuple):
    """Everything on which one frame depends."""

    rack: MapRack
    facts: _SiteFacts
    domains: tuple[NvlinkDomainRecord, ...]
    """Those of the rack, by UUID."""


class RackFrames(msgspec.Struct, frozen=True):
    """The frames of one map, and what the next map is compared with."""

    facts: _SiteFacts | None = None
    memo: Memo[str, _FrameInput, RackFrame] = {}

    @property
    def frames(self) -> dict[str, RackFrame]:
        """Every rack of the map, by name and in order."""
        return {name: frame for name, (_, frame) in self.memo.items()}


def rack_frames(whole: SiteMap) -> dict[str, RackFrame]:
    """Every rack of a map, by name and in order."""
    return update_rack_frames(whole, RackFrames()).frames


def update_rack_frames(whole: SiteMap, before: RackFrames) -> RackFrames:
    """The frames of a map; those whose input equals that of `before` are the same objects."""
    known = frozenset(layer for layer in Layer if whole.known(layer))
    facts = before.facts
    if facts is None or not facts.says(whole, known):
        facts = _SiteFacts(whole, known)
    records = whole.domains
    inputs = {
        rack.name: _FrameInput(
            rack, facts, tuple([records[uuid] for uuid in sorted(rack.domains) if uuid in records])
        )
        for rack in whole.racks
    }
    return RackFrames(facts, recompute_changed(before.memo, inputs, _rack_frame))


def _rack_frame(found: _FrameInput) -> RackFrame:
    rack, facts, domains = found
    answering = frozenset(domain.uuid for domain in domains if domain.answers)
    return RackFrame(
        rack=rack,
        operator=facts.operator,
        asked=facts.asked,
        known=facts.known,
        answering=answering,
        named=tuple(sorted(rack.domains - {""})) if facts.operator else (),
        fabric=_fabric_state(domains, all_answer=len(answering) == len(rack.domains)),
        problems=unique(*(domain.problem for domain in domains if domain.problem)),
        tenants={id_: facts.tenants[id_] for id_ in rack.tenants if id_ in facts.tenants},
        over={name: facts.over[name] for name in rack.nodes if name in facts.over},
    )


def _fabric_state(domains: Sequence[NvlinkDomainRecord], *, all_answer: bool) -> FabricState:
    if any(domain.disputed for domain in domains):
        return FabricState.DISPUTED
    if not all_answer:
        return FabricState.SILENT
    return FabricState.PAUSED if any(domain.paused for domain in domains) else FabricState.READ


# Colours.


COLOURS = 8
"""Hues that people can distinguish; letters in the cells distinguish the groups of one hue."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class ColourMode(StrEnum):
    """What the colours mean."""

    USE = "use"
    HEALTH = "health"
    FRAGMENTATION = "fragmentation"
    TENANT = "tenant"
    PARTITION = "partition"
    CLIQUE = "clique"
    WORKLOAD = "workload"


GROUP_MODES = (ColourMode.TENANT, ColourMode.PARTITION, ColourMode.CLIQUE, ColourMode.WORKLOAD)
"""Modes in which a colour is a group of GPUs; in the others it is a state."""


class GpuState(StrEnum):
    """What is known of a GPU in one mode."""

    GROUP = "group"
    FREE = "free"
    OTHERS = "others"
    """Another tenant's; a tenant sees no more of it."""
    UNKNOWN = "unknown"
    USED = "used"
    STRANDED = "stranded"
    """Free, in a tray that is partly taken: no whole tray can be had of it."""
    HEALTHY = "healthy"
    PROBLEM = "problem"


STATE_CLASSES = {
    GpuState.FREE: "f",
    GpuState.OTHERS: "o",
    GpuState.UNKNOWN: "q",
    GpuState.USED: "u",
    GpuState.STRANDED: "w",
    GpuState.HEALTHY: "f",
    GpuState.PROBLEM: "p",
}
"""The style class of each state that is no group."""


class ColourGroup(msgspec.Struct, frozen=True, order=True):
    """One group of GPUs: `key` tells groups apart, `name` is shown."""

    key: str
    name: str


class GpuShade(msgspec.Struct, frozen=True):
    """The group of a GPU: the last known one where its state is unknown."""

    state: GpuState
    group: ColourGroup | None = None


def _shades(unknown: GpuState, yes: GpuState, no: GpuState) -> Mapping[bool | None, GpuShade]:
    return {None: GpuShade(unknown), True: GpuShade(yes), False: GpuShade(no)}


def gpu_shade(frame: RackFrame, mode: ColourMode, tray: MapTray, gpu: MapGpu) -> GpuShade:
    """The state of a GPU, and its group. Unknown if what defines it was not read lately, or is hidden."""
    chain = gpu.chain
    if mode is ColourMode.FRAGMENTATION and gpu.taken is False and tray_partly_taken(tray):
        return _STRANDED
    if chain is None:
        return _HIDDEN_SHADES[gpu.taken]
    if mode is ColourMode.HEALTH:
        return _HEALTH_SHADES[gpu_health(frame, gpu)]
    if mode not in GROUP_MODES:
        return _USE_SHADES[gpu.taken]
    group = _GROUP_OF_MODE[mode](frame, chain)
    if not _is_current(frame, mode, gpu, chain):
        return GpuShade(GpuState.UNKNOWN, group)
    return GpuShade(GpuState.FREE if group is None else GpuState.GROUP, group)


_STRANDED = GpuShade(GpuState.STRANDED)
_HIDDEN_SHADES = _shades(GpuState.UNKNOWN, GpuState.OTHERS, GpuState.FREE)
_HEALTH_SHADES = _shades(GpuState.UNKNOWN, GpuState.HEALTHY, GpuState.PROBLEM)
_USE_SHADES = _shades(GpuState.UNKNOWN, GpuState.USED, GpuState.FREE)


def gpu_health(frame: RackFrame, gpu: MapGpu) -> bool | None:
    """Whether every layer that is asked calls a GPU, its machine and its node well.

    A problem counts until it is seen to be over. None: hidden from the viewer, or a layer was not read
    lately or does not report the GPU.
    """
    chain = gpu.chain
    if chain is None:
        return None
    if is_sick(chain) or is_node_lost(frame, chain) or (chain.machine is not None and chain.machine.health):
        return False
    if Layer.FABRIC in frame.asked:
        current = Layer.FABRIC in frame.known and gpu.domain in frame.answering
        if not current or chain.fabric is None or chain.fabric.healthy is None:
            return None
    on_node = chain.device is not None or chain.node is not None
    if Layer.CLUSTER in frame.asked and (on_node and Layer.CLUSTER not in frame.known):
        return None
    return True if chain.fabric is not None or on_node else None


def is_sick(chain: GpuChain) -> bool:
    """Whether a GPU's switch controller says so, or its plugin keeps workloads off it."""
    if chain.fabric is not None and chain.fabric.healthy is False:
        return True
    taints = () if chain.device is None else chain.device.taints
    return bool(taints) and any(not taint.endswith(":None") for taint in taints)


def is_node_lost(frame: RackFrame, chain: GpuChain) -> bool:
    """Whether the node of a GPU is not known to be ready, by a cluster that was read."""
    return chain.node is not None and Layer.CLUSTER in frame.known and chain.node.ready is not True


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
    """Numbers and hues for groups; a group keeps both."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._hues: dict[str, int] = {}

    def number(self, group: ColourGroup) -> int:
        """The group's number: 0 for the first that came."""
        return self._numbers.setdefault(group.key, len(self._numbers))

    def give_hues(self, groups: Iterable[ColourGroup]) -> None:
        """Give hues to some groups, whatever their order: to those that are called by a colour first."""
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
    """The letter in the cells of a group; after 62 groups only colours distinguish them."""
    return LETTERS[number] if number < len(LETTERS) else "+"


_HUES_BY_NAME = {
    "blue": 0, "orange": 1, "green": 2, "pink": 3, "magenta": 3, "teal": 4, "cyan": 4, "brown": 5,
    "yellow": 6, "gold": 6, "violet": 7, "purple": 7,
}  # fmt: skip
"""A tenant that is called by a colour has it."""


def _named_hue(name: str) -> int | None:
    return next((hue for word, hue in _HUES_BY_NAME.items() if word in name.lower()), None)


def preferred_hue(name: str) -> int:
    """The hue that a name chooses, the same in every process."""
    named = _named_hue(name)
    return sha256(name.encode()).digest()[0] % COLOURS if named is None else named
