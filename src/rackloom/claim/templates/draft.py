"""From groups of devices to the requests, selectors and constraints of a ResourceClaimTemplate."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from rackloom.claim.allocate import cel
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.objects import (
    CelSelector,
    DeviceClaim,
    DeviceClass,
    DeviceConstraint,
    DeviceRequest,
    DeviceSelector,
    ExactDeviceRequest,
    ObjectMeta,
    ResourceClaimSpec,
    ResourceClaimTemplate,
    ResourceClaimTemplateSpec,
)
from rackloom.claim.allocate.slices import GPU_DRIVER
from rackloom.claim.templates import published
from rackloom.claim.templates.hardware import Hardware, Stock
from rackloom.claim.templates.layout import Group
from rackloom.claim.templates.places import Place, places
from rackloom.claim.templates.selectors import Told, told_by_names, told_by_traits
from rackloom.claim.templates.wish import Align, Wish
from rackloom.errors import Refused

_MATCHING = {Align.NUMA: published.NUMA_NODE, Align.PCIE: published.PCIE_ROOT}


class Draft:
    """The template of a wish for one kind of node, and how each request was told. May be refused."""

    def __init__(self, stock: Stock, hardware: Hardware, wish: Wish, groups: Sequence[Group]) -> None:
        self._stock = stock
        self._hardware = hardware
        self._wish = wish
        self.told: dict[str, list[str]] = {}
        """By what requests and constraints select and who says so, with the names of which it is true."""
        found = () if wish.unaligned else places(hardware, wish.align)
        self._matching = matching(hardware, wish.align, found)
        if self._matching:
            gpus = tuple(chain.from_iterable(place.gpus for place in found))
            nics = tuple(chain.from_iterable(place.nics for place in found))
            groups = [Group(one.gpu_count, one.nic_count, gpus, nics, one.place) for one in groups]
        endings = [f"-{number}" for number in range(len(groups))] if wish.pairs else [""]
        self._names = [(f"gpu{ending}", f"nic{ending}") for ending in endings]
        requests = list(chain.from_iterable(map(self._requests, self._names, groups)))
        self.template = _template(wish, requests, list(self._constraints()))

    def _requests(self, names: tuple[str, str], group: Group) -> Iterator[DeviceRequest]:
        # A rail is a name, not a property: what happens to tell a NIC here may tell another one elsewhere.
        by_name = self._wish.align is Align.RAIL
        wanted = [self._hardware.gpus[index] for index in group.gpus]
        told = _told(wanted, self._hardware.gpus, () if by_name else published.GPU_TRAITS, published.GPU_IDS)
        yield self._request(names[0], group.gpu_count, wanted, told, group)
        wanted = [self._hardware.nics[index] for index in group.nics]
        told = _told(wanted, self._hardware.nics, () if by_name else published.NIC_TRAITS, published.NIC_IDS)
        yield self._request(names[1], group.nic_count, wanted, told, group)

    def _request(
        self, name: str, count: int, wanted: Sequence[Candidate], told: Told | None, group: Group
    ) -> DeviceRequest:
        kind = "GPU" if wanted[0].id.driver == GPU_DRIVER else "NIC"
        if told is None:
            lacking = ", ".join(published.GPU_IDS[:1] if kind == "GPU" else published.NIC_IDS[:3])
            where = "" if self._matching else f" of {group.place.title}"
            raise Refused(
                f"the {kind}s{where} cannot be selected on {self._hardware.machine.name}: their driver "
                f"publishes nothing that tells them from the others ({lacking})"
            )
        self.told.setdefault(self._note(kind, wanted, told, group), []).append(name)
        selectors = (DeviceSelector(cel=CelSelector(expression=told.expression)),) if told.expression else ()
        return DeviceRequest(
            name=name,
            exactly=ExactDeviceRequest(
                device_class_name=_class_of(self._stock.classes, wanted),
                selectors=selectors,
                allocation_mode="ExactCount",
                count=count,
            ),
        )

    def _note(self, kind: str, wanted: Sequence[Candidate], told: Told, group: Group) -> str:
        by = f"by {', '.join(told.by)}" if told.by else "by class alone"
        out_of = f"out of {len(wanted)} {kind}{'' if len(wanted) == 1 else 's'}, {by}"
        if self._matching:
            return f"{out_of}; wherever they are"
        if self._wish.unaligned and kind == "NIC":
            return f"{out_of}; not near the GPUs, as asked"
        return f"{out_of}; {group.place.title} (source: {group.place.source})"

    def _constraints(self) -> Iterator[DeviceConstraint]:
        if self._matching is None:
            return
        for names in self._names:
            both = f"one {self._matching}, which both drivers publish"
            self.told.setdefault(both, []).append(" with ".join(names))
            yield DeviceConstraint(requests=names, match_attribute=self._matching)


def matching(hardware: Hardware, align: Align, found: Sequence[Place]) -> str | None:
    """The attribute whose values are the places: all devices of a place share one, and no two places do."""
    name = _MATCHING.get(align)
    if name is None or not found:
        return None
    values = [
        {
            published.value_of(device, name)
            for device in chain((hardware.gpus[g] for g in one.gpus), (hardware.nics[n] for n in one.nics))
        }
        for one in found
    ]
    told = all(len(of) == 1 and None not in of for of in values)
    return name if told and max(Counter(chain.from_iterable(values)).values()) == 1 else None


def _told(
    wanted: Sequence[Candidate], among: Sequence[Candidate], traits: Sequence[str], names: Sequence[str]
) -> Told | None:
    by_traits = told_by_traits(wanted, among, traits) if traits else None
    return by_traits or told_by_names(wanted, among, names)


def _class_of(classes: Sequence[DeviceClass], wanted: Sequence[Candidate]) -> str:
    """The first class that all of the devices belong to."""
    for one in classes:
        tests = [selector.cel.expression for selector in one.spec.selectors if selector.cel]
        if tests and all(_matches(test, device) for test in tests for device in wanted):
            return one.metadata.name
    raise Refused(f"no device class holds the devices of {wanted[0].id.driver}")


def _matches(expression: str, device: Candidate) -> bool:
    try:
        return cel.compile(expression).matches(device.view)
    except (cel.CompileError, cel.EvaluationError):
        return False


def _template(
    wish: Wish, requests: Sequence[DeviceRequest], constraints: Sequence[DeviceConstraint]
) -> ResourceClaimTemplate:
    devices = DeviceClaim(requests=tuple(requests), constraints=tuple(constraints))
    return ResourceClaimTemplate(
        metadata=ObjectMeta(name=wish.title),
        spec=ResourceClaimTemplateSpec(spec=ResourceClaimSpec(devices=devices)),
    )
