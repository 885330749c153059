"""The worst-case cost of a selector, without any device: the API server's admission criterion.

The estimator walks the tree once. For each node it carries its size, the sizes of its contents, and the
path from the device that leads to it. The path gives the API's size limits. A comprehension costs its
range size times the cost of condition and step. The range of a conditional covers both branches. If
several overloads fit, their ranges are united.

`max_cost` is 2**64 - 1 if nothing bounds the cost.
"""

import msgspec

from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.call_costs import (
    ONE,
    UNKNOWN_SIZE,
    WIDEST,
    ZERO,
    CallEstimate,
    CostOperand,
    CostRange,
    DevicePath,
    ElementSizes,
    device_size,
    estimate_of,
    exactly,
)
from rackloom.core.allocate.cel.check import CheckedExpression
from rackloom.core.allocate.cel.syntax import (
    RESULT,
    Call,
    CelNode,
    Const,
    Fold,
    Ident,
    ListNode,
    MapNode,
    MessageNode,
    Select,
)
from rackloom.core.allocate.cel.types import CelType, Overload

_LIST, _MAP = 10, 30
_STRING = 0.1


class LocalVariable(msgspec.Struct, frozen=True):
    """The known facts of a local variable."""

    path: DevicePath | None
    size: CostRange | None
    entries: ElementSizes | None


def max_cost(checked: CheckedExpression) -> int:
    """The worst-case cost of one evaluation, or 2**64 - 1 if nothing bounds it."""
    return _CostEstimator(checked).cost(checked.root).high


class _CostEstimator:
    def __init__(self, checked: CheckedExpression) -> None:
        self.checked = checked
        self.paths: dict[int, DevicePath | None] = {}
        self.sizes: dict[int, CostRange] = {}
        self.entry_sizes: dict[int, ElementSizes] = {}
        self.locals: dict[str, list[LocalVariable]] = {}

    def cost(self, node: CelNode) -> CostRange:
        match node:
            case Const() | MessageNode():  # The checker leaves no message.
                return ZERO
            case Ident():
                local = self.local(node.name)
                self.paths[node.id] = (node.name,) if local is None else local.path
                return ONE
            case Select():
                return self.select(node)
            case Call():
                return self.call(node)
            case ListNode():
                return self.list_literal(node)
            case MapNode():
                return self.map_literal(node)
            case Fold():
                return self.bind(node) if node.is_bind else self.fold(node)

    def local(self, name: str) -> LocalVariable | None:
        stack = self.locals.get(name)
        return stack[-1] if stack else None

    def path(self, node: CelNode) -> DevicePath | None:
        if isinstance(node, Ident) and (local := self.local(node.name)) is not None:
            return local.path
        return self.paths.get(node.id)

    def type_of(self, node: CelNode) -> CelType:
        return self.checked.types[node.id]

    def size(self, node: CelNode) -> CostRange | None:
        if node.id in self.sizes:
            return self.sizes[node.id]
        if (literal := _literal_size(node)) is not None:
            return literal
        if (device := device_size(self.path(node))) is not None:
            self.sizes[node.id] = device
            return device
        if _is_scalar(self.type_of(node)):
            return ONE
        local = self.local(node.name) if isinstance(node, Ident) else None
        return local.size if local is not None else None

    def entries(self, node: CelNode) -> ElementSizes | None:
        if node.id in self.entry_sizes:
            return self.entry_sizes[node.id]
        local = self.local(node.name) if isinstance(node, Ident) else None
        return local.entries if local is not None else None

    def size_or_unknown(self, node: CelNode) -> CostRange:
        return self.size(node) or UNKNOWN_SIZE

    def operand(self, node: CelNode) -> CostOperand:
        path = self.path(node)
        if path and path[0] == RESULT:
            path = None
        return CostOperand(node, self.type_of(node), path, self.size(node))

    def select(self, node: Select) -> CostRange:
        cost = self.cost(node.operand)
        if node.test_only:
            return cost
        if self.type_of(node.operand).kind in ("map", "struct", "param"):
            cost = cost.plus(ONE)
        self.paths[node.id] = (*(self.path(node.operand) or ()), node.field)
        return cost

    def list_literal(self, node: ListNode) -> CostRange:
        cost, item = exactly(_LIST), WIDEST if node.elements else CostRange(0, 0)
        for element in node.elements:
            cost = cost.plus(self.cost(element))
            item = item.union(self.size_or_unknown(element))
        self.entry_sizes[node.id] = ElementSizes("list", ONE, item)
        return cost

    def map_literal(self, node: MapNode) -> CostRange:
        cost = exactly(_MAP)
        key = value = WIDEST if node.entries else CostRange(0, 0)
        for entry in node.entries:
            cost = cost.plus(self.cost(entry.key)).plus(self.cost(entry.value))
            key = key.union(self.size_or_unknown(entry.key))
            value = value.union(self.size_or_unknown(entry.value))
        self.entry_sizes[node.id] = ElementSizes("map", key, value)
        return cost

    def push(self, name: str, local: LocalVariable) -> None:
        self.locals.setdefault(name, []).append(local)

    def pop(self, *names: str) -> None:
        for name in names:
            self.locals[name].pop()

    def bind(self, node: Fold) -> CostRange:
        cost = self.cost(node.iter_range).plus(self.cost(node.accu_init))
        self.push_accumulator(node)
        cost = cost.plus(self.cost(node.result))
        self.pop(node.accu_var)
        self.copy(node, node.result)
        return cost

    def push_accumulator(self, node: Fold) -> None:
        start = node.accu_init
        self.push(node.accu_var, LocalVariable(self.path(start), self.size(start), self.entries(start)))

    def copy(self, target: CelNode, source: CelNode) -> None:
        if (size := self.size(source)) is not None:
            self.sizes[target.id] = size
        if (entries := self.entries(source)) is not None:
            self.entry_sizes[target.id] = entries

    def fold(self, node: Fold) -> CostRange:
        cost = self.cost(node.iter_range).plus(self.cost(node.accu_init))
        self.push_accumulator(node)
        variables = self.push_iterated(node)
        loop = self.cost(node.condition)
        step = self.cost(node.step)
        self.pop(*variables)
        cost = cost.plus(self.cost(node.result))
        self.pop(node.accu_var)
        rounds = self.size_or_unknown(node.iter_range)
        if isinstance(node.accu_init, Const):
            self.sizes[node.id] = self.size_or_unknown(node.accu_init)
        elif isinstance(node.accu_init, ListNode | MapNode):
            self.sizes[node.id] = rounds
            if (entries := self.entries(node.step)) is not None:
                self.entry_sizes[node.id] = entries
        return cost.plus(rounds.times(step.plus(loop)))

    def push_iterated(self, node: Fold) -> tuple[str, ...]:
        """Declare the loop variables: index or key, and element or value."""
        over = node.iter_range
        entries, path = self.entries(over), self.path(over) or ()
        is_list = (entries.kind if entries else self.type_of(over).kind) == "list"
        key = LocalVariable((*path, "@indices" if is_list else "@keys"), entries and entries.key, None)
        value = LocalVariable((*path, "@items" if is_list else "@values"), entries and entries.value, None)
        if node.iter_var2:
            self.push(node.iter_var, key)
            self.push(node.iter_var2, value)
            return node.iter_var, node.iter_var2
        self.push(node.iter_var, value if is_list else key)
        return (node.iter_var,)

    def call(self, node: Call) -> CostRange:
        if node.function == "dyn":
            cost = self.cost(node.args[0]).plus(ONE)
            self.copy(node, node.args[0])
            return cost
        arg_costs = [self.cost(arg) for arg in node.args]
        args = [self.operand(arg) for arg in node.args]
        cost, target = ZERO, None
        if node.target is not None:
            cost = self.cost(node.target)
            target = self.operand(node.target)
        spent, size = WIDEST, None
        before = ZERO
        for arg_cost in arg_costs:
            before = before.plus(arg_cost)
        operands = args if target is None else [target, *args]
        for overload in self.checked.overloads[node.id]:
            estimate = self.overload(node, overload, operands, arg_costs, before)
            spent = spent.union(estimate.cost)
            if estimate.size is not None:
                size = estimate.size if size is None else size.union(estimate.size)
            if overload.id in ("index_list", "index_map"):
                # The element of a container has the size that the container knows, and a longer path.
                entries = self.entries(node.args[0])
                step = "@items" if overload.id == "index_list" else "@values"
                self.paths[node.id] = (*(self.path(node.args[0]) or ()), step)
                size = entries.value if entries is not None else None
            if size is None:
                size = self.size(node)
        if size is not None:
            self.sizes[node.id] = size
        return cost.plus(spent)

    def overload(
        self,
        node: Call,
        overload: Overload,
        operands: list[CostOperand],
        costs: list[CostRange],
        spent: CostRange,
    ) -> CallEstimate:
        """Cost of the call and its arguments, which cost `spent`, under one overload."""
        estimate = estimate_of(overload.id, node.function)
        found = estimate(operands) if estimate is not None else None
        if found is not None:
            return CallEstimate(found.cost.plus(spent), found.size)
        match overload.id:
            case "logical_and" | "logical_or":
                return CallEstimate(CostRange(costs[0].low, costs[0].plus(costs[1]).high))
            case "conditional":
                # Either branch may run, so the range covers both.
                self.merge_entries(node, node.args[1], node.args[2])
                size = operands[1].size.union(operands[2].size)
                return CallEstimate(costs[0].plus(costs[1].union(costs[2])), size)
            case "add_string" | "add_bytes" | "add_list":
                # Upstream prices joined lists at one unit, and joined texts by their length.
                self.merge_entries(node, node.args[0], node.args[1])
                size = operands[0].size.plus(operands[1].size)
                cost = ONE if overload.id == "add_list" else size.scaled(_STRING)
                return CallEstimate(cost.plus(spent), size)
        return CallEstimate(ONE.plus(spent))

    def merge_entries(self, node: Call, left: CelNode, right: CelNode) -> None:
        """The result has the elements of either operand."""
        if (sizes := self.entries(left)) and (merged := sizes.union(self.entries(right))):
            self.entry_sizes[node.id] = merged


def _literal_size(node: CelNode) -> CostRange | None:
    match node:
        case Const(value=str() | bytes()):
            return exactly(len(node.value))
        case Const():
            return ONE
        case ListNode():
            return exactly(len(node.elements))
        case MapNode():
            return exactly(len(node.entries))
    return None


def _is_scalar(type_: CelType) -> bool:
    if types.is_optional(type_):
        return _is_scalar(type_.params[0])
    return types.unwrapped(type_).kind in ("bool", "double", "duration", "int", "timestamp", "uint")
