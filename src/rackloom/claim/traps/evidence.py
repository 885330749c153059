"""What claims are checked against: the devices of given nodes, or of typical ones where none are given."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rackloom.claim.allocate import cel
from rackloom.claim.allocate.allocator import allocate
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.objects import DeviceClass, DeviceSelector, ResourceClaim
from rackloom.claim.allocate.outcome import Allocation, Outcome
from rackloom.claim.allocate.use import DeviceId
from rackloom.claim.templates.hardware import Stock, stock_of_slices
from rackloom.claim.traps.typical import always, typical_slices


@dataclass(frozen=True, eq=False)
class Evidence:
    """The devices that a claim may meet."""

    stock: Stock
    given: bool
    """Real nodes: what is not there does not exist. Else only what drivers publish anywhere is known."""
    machines: tuple[Stock, ...] = ()
    """Where no nodes are given: published machines, to tell whether any could serve a claim."""

    @cached_property
    def classes(self) -> dict[str, DeviceClass]:
        """Device classes by name."""
        return {one.metadata.name: one for one in self.stock.classes}

    @cached_property
    def devices(self) -> tuple[Candidate, ...]:
        """The devices of one node of each kind."""
        return tuple(one for kind in self.stock.kinds for one in kind.devices)

    @cached_property
    def excluded(self) -> dict[DeviceId, str]:
        """NICs that must not carry tenant data, with the reason."""
        return {
            kind.nics[nic.index].id: nic.excluded
            for kind in self.stock.kinds
            for nic in kind.machine.nics
            if nic.excluded is not None and self.given
        }

    def of_class(self, name: str) -> list[Candidate]:
        """The devices that belong to a class."""
        return self.passing(self.devices, self.classes[name].spec.selectors)

    def passing(self, devices: Sequence[Candidate], selectors: Iterable[DeviceSelector]) -> list[Candidate]:
        """The devices that selectors let through, as far as is known."""
        left = list(devices)
        for one in selectors:
            program = compiled(one.cel.expression) if one.cel else None
            left = [device for device in left if program is not None and self._passes(program, device)]
        return left

    def fails(self, program: cel.Program, device: Candidate) -> bool:
        """Whether a selector has no answer for a device, and not for want of what a profile does not know."""
        if not isinstance(truth(program, device), cel.EvaluationError):
            return False
        missing = [name for name in names_read(program) if device.attribute(name) is None]
        return not missing or any(self.lacks(device, name) for name in missing)

    def lacks(self, device: Candidate, name: str) -> bool:
        """Whether a device does not publish an attribute, for sure."""
        if device.attribute(name) is not None:
            return False
        return self.stock.observed or name not in always(device.id.driver)

    def _passes(self, program: cel.Program, device: Candidate) -> bool:
        answer = truth(program, device)
        return answer if isinstance(answer, bool) else not self.fails(program, device)


def evidence_of(
    stock: Stock | None, classes: Iterable[DeviceClass] = (), machines: Iterable[Stock] = ()
) -> Evidence:
    """Evidence from given nodes, or from typical ones; `classes` win over those of the nodes."""
    base = stock or stock_of_slices(typical_slices())
    named = {one.metadata.name: one for one in (*base.classes, *classes)}
    merged = Stock(base.kinds, tuple(named.values()), base.index, base.source, observed=base.observed)
    return Evidence(merged, stock is not None, tuple(machines) if stock is None else ())


def compiled(expression: str) -> cel.Program | None:
    """The program, or None for one that does not compile."""
    try:
        return cel.compile(expression)
    except cel.CompileError:
        return None


def truth(program: cel.Program, device: Candidate) -> bool | cel.EvaluationError:
    """The answer of a selector for a device, or why there is none."""
    try:
        return program.matches(device.view)
    except cel.EvaluationError as error:
        return error


def names_read(program: cel.Program) -> list[str]:
    """The attributes that a selector reads by name, as `domain/identifier`."""
    return sorted(
        f"{domain}/{name}" for kind, domain, name in program.reads if kind == "attribute" and domain and name
    )


def outcomes(stocks: Iterable[Stock], claim: ResourceClaim) -> Iterator[Outcome]:
    """What each kind of node answers to a claim, with nothing in use."""
    free = ResourceClaim(metadata=claim.metadata, spec=claim.spec)
    for stock in stocks:
        for kind in stock.kinds:
            yield allocate(kind.nodes[0], stock.classes, stock.index, [free])


def served(stocks: Iterable[Stock], claim: ResourceClaim) -> bool:
    """Whether some node can serve a claim."""
    return any(isinstance(one, Allocation) for one in outcomes(stocks, claim))
