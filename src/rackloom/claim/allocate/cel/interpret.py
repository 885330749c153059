"""The exact evaluator: CEL's rules for errors and upstream's run-time cost, node by node.

An error is a value here: `&&` and `||` may still absorb it, and strict calls pass it on. Only running over
the cost limit is raised. Every node becomes one closure over a `Frame`.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

from rackloom.claim.allocate.cel import constants
from rackloom.claim.allocate.cel.check import Checked
from rackloom.claim.allocate.cel.errors import CostExceeded, EvaluationError, no_such_overload
from rackloom.claim.allocate.cel.nodes import (
    Call,
    Const,
    Fold,
    Ident,
    ListNode,
    MapNode,
    Node,
    Select,
    StructNode,
)
from rackloom.claim.allocate.cel.overloads import dispatch
from rackloom.claim.allocate.cel.runtime_cost import call_cost
from rackloom.claim.allocate.cel.steps import (
    Eval,
    Frame,
    Lazy,
    append,
    either,
    is_accumulator,
    is_constant_list,
    logical,
    membership,
    not_strictly_false,
    or_value,
    pairs,
    presence,
    qualified,
    singles,
    variable,
)
from rackloom.claim.allocate.cel.values import (
    OptionalValue,
    equal,
    key_of,
    same,
)

_LIST_COST, _MAP_COST = 10, 30


@dataclass(frozen=True, slots=True)
class _Path:
    """Something that can be selected from: `root` charges what reaching the start costs when observed."""

    code: Eval
    root_cost: int


def interpreter(checked: Checked) -> Eval:
    """The evaluator of a checked expression: it returns a value or an EvaluationError."""
    return _Planner(checked).plan(checked.root)


def is_error(value: Any) -> bool:
    """Whether an evaluation ended in an error."""
    return isinstance(value, EvaluationError)


class _Planner:
    """Turns nodes into closures."""

    def __init__(self, checked: Checked) -> None:
        self.checked = checked

    def plan(self, node: Node) -> Eval:
        if (known := constants.value_of(node, self.checked)) is not constants.UNKNOWN:
            return lambda _: known
        match node:
            case Ident() | Select():
                return self.attribute(node)
            case Call():
                return self.attribute(node) if self.is_attribute(node) else self.call(node)
            case ListNode():
                return self.list_literal(node)
            case MapNode():
                return self.map_literal(node)
            case Fold():
                return self.bind(node) if node.is_bind else self.fold(node)
            case Const() | StructNode():
                raise AssertionError(node)

    @staticmethod
    def is_attribute(node: Node) -> bool:
        """Whether selections from `node` extend one path instead of starting a new one."""
        match node:
            case Ident() | Select():
                return True
            case Call():
                return node.function in ("_[_]", "_[?_]", "_?._", "_?_:_")
        return False

    def attribute(self, node: Node) -> Eval:
        """A whole path, with one unit for its start."""
        path = self.path(node)
        code, cost = path.code, path.root_cost
        if not cost:
            return code

        def run(frame: Frame) -> Any:
            value = code(frame)
            frame.charge(cost)
            return value

        return run

    def path(self, node: Node) -> _Path:
        if constants.value_of(node, self.checked) is constants.UNKNOWN:
            match node:
                case Ident():
                    return _Path(variable(node.name), 1)
                case Select():
                    return self.select(node)
                case Call() if node.function == "_?_:_":
                    return _Path(self.conditional(node), 0)
                case Call() if self.is_attribute(node):
                    return self.index(node)
        return _Path(self.plan(node), 1)

    def select(self, node: Select) -> _Path:
        operand = self.path(node.operand)
        if node.test_only:
            return _Path(presence(operand.code, node.field), operand.root_cost)
        return _Path(qualified(operand.code, lambda _: node.field, optional=False), operand.root_cost)

    def index(self, node: Call) -> _Path:
        operand = self.path(node.args[0])
        key = node.args[1]
        bare = self.is_attribute(key) and constants.value_of(key, self.checked) is constants.UNKNOWN
        code = self.path(key).code if bare else self.plan(key)
        optional = node.function != "_[_]"
        return _Path(qualified(operand.code, code, optional=optional), operand.root_cost)

    def conditional(self, node: Call) -> Eval:
        condition = self.plan(node.args[0])
        yes, no = (self.branch(arg) for arg in node.args[1:])

        def run(frame: Frame) -> Any:
            chosen = condition(frame)
            if chosen is True:
                return yes(frame)
            if chosen is False:
                return no(frame)
            return chosen if is_error(chosen) else no_such_overload()

        return run

    def branch(self, node: Node) -> Eval:
        """A branch of ?:, whose path is not charged for its start."""
        if self.is_attribute(node) and constants.value_of(node, self.checked) is constants.UNKNOWN:
            return self.path(node).code
        return self.plan(node)

    def call(self, node: Call) -> Eval:
        args = [self.plan(arg) for arg in node.operands]
        match node.function:
            case "_&&_":
                return logical(args[0], args[1], decides=False)
            case "_||_":
                return logical(args[0], args[1], decides=True)
            case "orValue":
                return or_value(args[0], args[1])
            case "or":
                return either(args[0], args[1])
            case "_==_":
                return self.strict(node, args, lambda values: equal(*values))
            case "_!=_":
                return self.strict(node, args, lambda values: not same(*values))
            case "@not_strictly_false":
                return not_strictly_false(args[0])
            case "_+_" if is_accumulator(node.args[0]) and isinstance(node.args[1], ListNode):
                return append(args[1])
            case "@in" if is_constant_list(constants.value_of(node.args[1], self.checked)):
                return membership(args[0], constants.value_of(node.args[1], self.checked))
        candidates = self.checked.overloads[node.id]
        return self.strict(node, args, lambda values: dispatch(candidates, values))

    def strict(self, node: Call, args: list[Eval], apply: Callable[[tuple[Any, ...]], Any]) -> Eval:
        """A call that needs all its arguments: the first error among them is its result."""
        overloads = self.checked.overloads[node.id]
        single = overloads[0].id if len(overloads) == 1 else ""
        function, eager = node.function, len(args) <= 2

        def run(frame: Frame) -> Any:
            values = []
            failed = None
            for arg in args:
                value = arg(frame)
                if failed is None and isinstance(value, EvaluationError):
                    if not eager:
                        return value
                    failed = value
                values.append(value)
            result = failed
            if failed is None:
                try:
                    result = apply(tuple(values))
                except CostExceeded:
                    raise
                except EvaluationError as error:
                    result = error
            frame.charge(call_cost(function, single, values, result))
            return result

        return run

    def list_literal(self, node: ListNode) -> Eval:
        items = [(self.plan(item), position in node.optional) for position, item in enumerate(node.elements)]

        def run(frame: Frame) -> Any:
            values = []
            for code, optional in items:
                value = code(frame)
                if isinstance(value, EvaluationError):
                    return value
                if optional:
                    if type(value) is not OptionalValue:
                        return no_such_overload()
                    if not value.present:
                        continue
                    value = value.value
                values.append(value)
            frame.charge(_LIST_COST)
            return values

        return run

    def map_literal(self, node: MapNode) -> Eval:
        entries = [(self.plan(entry.key), self.plan(entry.value), entry.optional) for entry in node.entries]

        def run(frame: Frame) -> Any:
            built: dict[Any, Any] = {}
            for key_code, value_code, optional in entries:
                key = key_code(frame)
                if isinstance(key, EvaluationError):
                    return key
                value = value_code(frame)
                if isinstance(value, EvaluationError):
                    return value
                if optional:
                    if type(value) is not OptionalValue:
                        return no_such_overload()
                    if not value.present:
                        continue
                    value = value.value
                built[key_of(key)] = value
            frame.charge(_MAP_COST)
            return built

        return run

    def bind(self, node: Fold) -> Eval:
        bound, result, name = self.plan(node.accu_init), self.plan(node.result), node.accu_var

        def run(frame: Frame) -> Any:
            outer = frame.scope
            frame.scope = {**outer, name: Lazy(bound, outer)}
            value = result(frame)
            frame.scope = outer
            return value

        return run

    def fold(self, node: Fold) -> Eval:
        over, start = self.plan(node.iter_range), self.plan(node.accu_init)
        condition, step, result = self.plan(node.condition), self.plan(node.step), self.plan(node.result)
        entries = pairs if node.iter_var2 else singles
        one, two, accu = node.iter_var, node.iter_var2, node.accu_var

        def run(frame: Frame) -> Any:
            items = over(frame)
            if isinstance(items, EvaluationError):
                return items
            rounds = entries(items)
            if isinstance(rounds, EvaluationError):
                return rounds
            outer = frame.scope
            loop = frame.scope = {**outer, accu: copy(start(frame))}
            for first, second in rounds:
                loop[one] = first
                if two:
                    loop[two] = second
                if condition(frame) is False:
                    break
                loop[accu] = step(frame)
            frame.scope = {**outer, accu: loop[accu]}
            value = result(frame)
            frame.scope = outer
            return value

        return run
