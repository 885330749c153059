"""Search over what one viewer sees: a part of any name leads to its place on the map.

An index is made from the viewer's own map, which holds nothing of other tenants (`tenancy`), so a tenant
cannot find objects that it may not see. The names of each rack are kept as text, one line for each object, in
three levels: objects that span trays (racks, tenants, partitions, jobs), trays and objects that run on one,
and the parts of a tray. A rack whose part of the map did not change keeps its text.

A part has a line for its name and one for each name that a vendor's tool prints. Any of them leads to its
name. `canonical_name` reads a query first. The search covers the texts of all racks: first whole names, then
beginnings, then parts of names, the coarse levels first. It ends when it has found `MOST_RESULTS` objects.
Finding text in text is fast: a query without a match reads all names of the site a few times.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rackloom.core.diagnosis.incremental import Memo, recompute_changed
from rackloom.core.diagnosis.index import tray_nics
from rackloom.core.diagnosis.snapshot import DeviceRecord, GpuChain
from rackloom.topology.part_names import canonical_name, read_part_name
from rackloom.web.chain import clique_of, use_hidden
from rackloom.web.model import MapGpu, MapRack, SiteMap, rack_id
from rackloom.web.serial_thread import SerialThread

MOST_RESULTS = 12
LONGEST_QUERY = 100
"""Characters of a query. The rest is ignored."""
INDEXES_KEPT = 32
"""Organisations whose index is kept."""


# The names of one rack.


_SPANS, _TRAYS, _PARTS = range(3)
"""The levels: objects over many trays, objects of one tray, parts of a tray."""
_LEVEL_OF_KIND = {
    "rack": _SPANS,
    "tenant": _SPANS,
    "VPC": _SPANS,
    "partition": _SPANS,
    "logical partition": _SPANS,
    "domain": _SPANS,
    "switch controller": _SPANS,
    "ComputeDomain": _SPANS,
    "clique": _SPANS,
    "job": _SPANS,
    "tray": _TRAYS,
    "node": _TRAYS,
    "machine": _TRAYS,
    "instance": _TRAYS,
    "pod": _TRAYS,
    "claim": _TRAYS,
    "GPU": _PARTS,
    "NIC": _PARTS,
    "device": _PARTS,
    "PCI address": _PARTS,
}
"""Every kind of object that is found, and its level."""


class _NamedObject(msgspec.Struct, frozen=True, gc=False):
    """An object with a name, and the first of its GPUs in a rack."""

    kind: str
    name: str
    tray: int
    gpu: int
    part: str
    """The name of the GPU or NIC that it is, or else of the tray that it is or runs on."""


class _RackFacts(msgspec.Struct, frozen=True):
    """Everything on which the names of a rack depend."""

    rack: MapRack
    operator: bool
    tenants: Mapping[str, str]
    vpcs: Mapping[str, str]
    controllers: tuple[str, ...]
    """Addresses of the switch controllers of its domains."""


class _RackNames(msgspec.Struct, frozen=True, gc=False):
    """The names of one rack, by level: one line for each object."""

    rack: str
    folded: tuple[str, ...]
    """Lines of kind, tab and name, in the form in which names are compared."""
    written: tuple[str, ...]
    """The same lines as they are shown, with tray and GPU."""


def _fold(text: str) -> str:
    """The form in which names are compared: without case, and with single spaces."""
    return " ".join(text.split()).casefold()


_FOLDED_KINDS = {kind: _fold(kind) for kind in _LEVEL_OF_KIND}


def _rack_names(facts: _RackFacts) -> _RackNames:
    found: dict[tuple[str, str], _NamedObject] = {}
    for tray, gpus in enumerate(facts.rack.trays):
        whole = gpus[0].place.name.tray
        nics = tray_nics((gpu.chain for gpu in gpus if gpu.chain), whole)
        tray_name = _one_line(str(whole))
        for number, gpu in enumerate(gpus):
            own = _one_line(str(gpu.place.name))
            for kind, name in _names_of_gpu(facts, gpu, own, tray_name):
                if name and (kind, name) not in found:
                    part = own if _LEVEL_OF_KIND[kind] == _PARTS else tray_name
                    found[kind, name] = _NamedObject(kind, name, tray, number, part)
            for nic in () if gpu.chain is None else gpu.chain.nics:
                part = _one_line(str(nics[nic.device_id]))
                for kind, name in _names_of_nic(nic, part):
                    found.setdefault((kind, name), _NamedObject(kind, name, tray, number, part))
    levels: list[list[_NamedObject]] = [[], [], []]
    for entry in found.values():
        levels[_LEVEL_OF_KIND[entry.kind]].append(entry)
    return _RackNames(
        facts.rack.name,
        tuple(
            "\n" + "".join(f"{_FOLDED_KINDS[e.kind]}\t{_fold(e.name)}\n" for e in level) for level in levels
        ),
        tuple(
            "\n".join(f"{e.kind}\t{_one_line(e.name)}\t{e.tray}\t{e.gpu}\t{e.part}" for e in level)
            for level in levels
        ),
    )


def _one_line(name: str) -> str:
    return " ".join(name.split())


def _names_of_gpu(facts: _RackFacts, gpu: MapGpu, own: str, tray: str) -> Iterator[tuple[str, str | None]]:
    """Kind and name of everything that a GPU is, is in, or is used by, as far as the viewer sees it."""
    place = gpu.place
    yield "rack", place.rack
    yield "tray", tray
    yield "GPU", own
    if facts.operator:
        yield "domain", gpu.domain
        for address in facts.controllers:
            yield "switch controller", address
        if place.chassis:
            yield "tray", f"{place.chassis}{tray.removeprefix(place.rack)}"
            yield "GPU", f"{place.chassis}{own.removeprefix(place.rack)}"
    if gpu.chain is not None:
        yield from _names_of_chain(facts, gpu.chain)


def _names_of_nic(nic: DeviceRecord, own: str) -> Iterator[tuple[str, str]]:
    yield "NIC", own
    yield "NIC", f"{nic.node}/{nic.name}"
    if nic.key.pci_address is not None:
        yield "PCI address", f"{nic.key.pci_address.value} of {nic.node}"


def _names_of_chain(facts: _RackFacts, chain: GpuChain) -> Iterator[tuple[str, str | None]]:
    if machine := chain.machine:
        yield "machine", machine.id
        yield "instance", machine.instance
        yield "tenant", machine.tenant and facts.tenants.get(machine.tenant, machine.tenant)
        yield "VPC", machine.vpc and facts.vpcs.get(machine.vpc, machine.vpc)
    if chain.partition is not None:
        yield "partition", chain.partition.name
    if chain.logical is not None:
        yield "logical partition", chain.logical.name
        yield "logical partition", chain.logical.id
    if chain.fabric is not None:
        yield "GPU", f"{chain.fabric.guid:#018x}"
    if chain.key.gpu_uuid is not None:
        yield "GPU", chain.key.gpu_uuid.value
    yield "clique", clique_of(chain)
    yield from _names_in_cluster(chain)


def _names_in_cluster(chain: GpuChain) -> Iterator[tuple[str, str | None]]:
    device = chain.device
    node = chain.node.name if chain.node is not None else device.node if device is not None else ""
    yield "node", node
    if device is not None:
        yield "device", f"{node}/{device.name}"
    if chain.key.pci_address is not None:
        yield "PCI address", f"{chain.key.pci_address.value} of {node}"
    if chain.use is not None and not use_hidden(chain):
        yield "claim", chain.use.claim
        yield from (("pod", pod) for pod in chain.use.pods)
        yield from (("job", job) for job in chain.use.jobs)
    if chain.compute_domain is not None:
        yield "ComputeDomain", chain.compute_domain.key


# One query.


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One object that was found."""

    kind: str
    name: str
    rack: str
    """The first rack that it is in."""
    gpu: str
    """Id of its first GPU there. Empty if it is the rack itself."""
    part: str = ""
    """The name of that GPU, NIC or tray."""
    more_racks: int = 0
    """Number of further racks that it is in."""


SearchIndex = Memo[str, _RackFacts, _RackNames]
"""The names of each rack, by rack."""


def update_index(whole: SiteMap, before: SearchIndex) -> SearchIndex:
    """The index of a map. Racks that equal those of `before` keep their names."""
    inputs = {rack.name: _rack_facts(whole, rack) for rack in whole.racks}
    return recompute_changed(before, inputs, _rack_names)


def _rack_facts(whole: SiteMap, rack: MapRack) -> _RackFacts:
    domains = [whole.domains[uuid] for uuid in sorted(rack.domains) if uuid in whole.domains]
    vpcs = whole.vpcs if rack.tenants else {}
    return _RackFacts(
        rack=rack,
        operator=whole.operator,
        tenants={id_: whole.tenants[id_] for id_ in rack.tenants if id_ in whole.tenants},
        vpcs=vpcs,
        controllers=tuple(url for domain in domains for url in domain.endpoints),
    )


def search(index: SearchIndex, query: str) -> tuple[SearchResult, ...]:
    """The objects whose names hold `query`, the best first. None for an empty query."""
    query = " ".join(query[:LONGEST_QUERY].split())
    if not query:
        return ()
    # A switch tray is drawn in its rack, and no layer reports more of it.
    canonical = canonical_name(query)
    part = read_part_name(canonical)
    wanted = tuple(dict.fromkeys(map(_fold, (query, canonical if part.switch is None else part.rack))))
    racks = [names for _, names in index.values()]
    found: dict[tuple[str, str], SearchResult] = {}
    for forms in zip(*map(_patterns, wanted), strict=True):
        patterns = [pattern for form in forms for pattern in form]
        for level in (_SPANS, _TRAYS, _PARTS):
            for names in racks:
                for pattern in patterns:
                    _collect(names, level, pattern, found)
                if len(found) >= MOST_RESULTS:
                    return _with_racks(racks, found)
    return _with_racks(racks, found)


def _patterns(wanted: str) -> Iterator[Sequence[str]]:
    """The patterns of whole names, beginnings and parts of names. `node n1` restricts the kind as well."""
    kinds = (kind for kind in _FOLDED_KINDS.values() if wanted.startswith(f"{kind} "))
    of_kind = [f"{kind}\t{wanted.removeprefix(kind).strip()}" for kind in kinds]
    yield (f"\t{wanted}\n", *(f"\n{text}\n" for text in of_kind))
    yield (f"\t{wanted}", *(f"\n{text}" for text in of_kind))
    yield (wanted,)


def _collect(names: _RackNames, level: int, pattern: str, found: dict[tuple[str, str], SearchResult]) -> None:
    """Add the objects of a rack whose lines hold `pattern`, until there are enough."""
    text = names.folded[level]
    at = text.find(pattern)
    if at < 0:
        return
    written = names.written[level].split("\n")
    while at >= 0 and len(found) < MOST_RESULTS:
        # A pattern may begin with the end of the line before.
        within = at + (pattern[0] == "\n")
        kind, name, tray, gpu, part = written[text.count("\n", 0, within) - 1].split("\t")
        id_ = "" if kind == "rack" else f"{rack_id(names.rack)}-{tray}-{gpu}"
        result = SearchResult(kind=kind, name=name, rack=names.rack, gpu=id_, part=part)
        found.setdefault((kind, name), result)
        at = text.find(pattern, text.index("\n", within))


def _with_racks(
    racks: Sequence[_RackNames], found: Mapping[tuple[str, str], SearchResult]
) -> tuple[SearchResult, ...]:
    """The results, each with its number of further racks. Parts of a tray are in one rack."""
    return tuple(
        result
        if _LEVEL_OF_KIND[kind] == _PARTS
        else msgspec.structs.replace(result, more_racks=_racks_with(racks, kind, name) - 1)
        for (kind, name), result in found.items()
    )


def _racks_with(racks: Sequence[_RackNames], kind: str, name: str) -> int:
    line, level = f"\n{_FOLDED_KINDS[kind]}\t{_fold(name)}\n", _LEVEL_OF_KIND[kind]
    return sum(line in names.folded[level] for names in racks)


# The indexes of all viewers.


class SearchIndexes:
    """The index of each organisation that has searched, with None for operators."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[str | None, SearchIndex] = OrderedDict()
        self._thread = SerialThread()

    async def search(self, org: str | None, whole: SiteMap, query: str) -> tuple[SearchResult, ...]:
        """The results of a viewer's search on its own map. One search runs at a time."""
        return await self._thread.run(self._search, org, whole, query) if query.strip() else ()

    def _search(self, org: str | None, whole: SiteMap, query: str) -> tuple[SearchResult, ...]:
        self._indexes[org] = update_index(whole, self._indexes.get(org, {}))
        self._indexes.move_to_end(org)
        while len(self._indexes) > INDEXES_KEPT:
            self._indexes.popitem(last=False)
        return search(self._indexes[org], query)
