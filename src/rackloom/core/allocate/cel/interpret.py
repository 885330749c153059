"""The exact evaluator: CEL's rules for errors and upstream's run-time cost, node by node.

`interpreter` turns every node into one closure over an `EvaluationFrame`. An error is a value that
strict calls pass on. Only a cost over the limit is raised.

Cost follows cel-go's attribute model. A path such as `device.attributes["d"].x` is one attribute: its
start costs one unit, and so does every qualifier, except an optional one that finds nothing. A branch
of `?:` that is an attribute does not pay for its start. A strict call with up to two arguments
evaluates both even if the first fails, and charges both. One with more arguments stops at the first
error.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import msgspec

from rackloom.core.allocate.cel import check
from rackloom.core.allocate.cel.call_costs import charge_of
from rackloom.core.allocate.cel.check import CheckedExpression
from rackloom.core.allocate.cel.errors import CostExceeded, EvaluationError, no_such_overload
from rackloom.core.allocate.cel.runtime import (
    EvaluationFrame,
    Evaluator,
    LazyValue,
    append_step,
    constant_membership,
    has_field,
    is_accumulator,
    is_constant_list,
    logical_step,
    not_strictly_false_step,
    one_variable_range,
    or_step,
    read_variable,
    select_step,
    two_variable_range,
)
from rackloom.core.allocate.cel.syntax import (
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
from rackloom.core.allocate.cel.types import dispatch
from rackloom.core.allocate.cel.values import OptionalValue, equal, key_of, same_value

_LIST_COST, _MAP_COST = 10, 30


class _AttributePath(msgspec.Struct, frozen=True):
    """A value that can be selected from. `root_cost` is the charge for its start when it is observed."""

    code: Evaluator
    root_cost: int


def interpreter(checked: CheckedExpression) -> Evaluator:
    """The evaluator of a checked expression: it returns a value or an EvaluationError."""
    return _EvaluatorBuilder(checked).plan(checked.root)


class _EvaluatorBuilder:
    """Turns nodes into closures."""

    def __init__(self, checked: CheckedExpression) -> None:
        self.checked = checked

    def plan(self, node: CelNode) -> Evaluator:
        if (known := check.constant_value(node, self.checked)) is not check.NOT_CONSTANT:
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
            case Const() | MessageNode():
                raise AssertionError(node)

    @staticmethod
    def is_attribute(node: CelNode) -> bool:
        """Whether selections from `node` extend one path instead of starting a new one."""
        if isinstance(node, Call):
            return node.function in ("_[_]", "_[?_]", "_?._", "_?_:_")
        return isinstance(node, Ident | Select)

    def attribute(self, node: CelNode) -> Evaluator:
        """A whole path, with one unit for its start."""
        path = self.path(node)
        code, cost = path.code, path.root_cost
        if not cost:
            return code

        def run(frame: EvaluationFrame) -> Any:
            value = code(frame)
            frame.charge(cost)
            return value

        return run

    def path(self, node: CelNode) -> _AttributePath:
        if check.constant_value(node, self.checked) is check.NOT_CONSTANT:
            match node:
                case Ident():
                    return _AttributePath(read_variable(node.name), 1)
                case Select():
                    return self.select(node)
                case Call() if node.function == "_?_:_":
                    return _AttributePath(self.conditional(node), 0)
                case Call() if self.is_attribute(node):
                    return self.index(node)
        return _AttributePath(self.plan(node), 1)

    def select(self, node: Select) -> _AttributePath:
        operand = self.path(node.operand)
        if node.test_only:
            return _AttributePath(has_field(operand.code, node.field), operand.root_cost)
        return _AttributePath(
            select_step(operand.code, lambda _: node.field, optional=False), operand.root_cost
        )

    def index(self, node: Call) -> _AttributePath:
        operand = self.path(node.args[0])
        key = node.args[1]
        bare = self.is_attribute(key) and check.constant_value(key, self.checked) is check.NOT_CONSTANT
        code = self.path(key).code if bare else self.plan(key)
        optional = node.function != "_[_]"
        return _AttributePath(select_step(operand.code, code, optional=optional), operand.root_cost)

    def conditional(self, node: Call) -> Evaluator:
        condition = self.plan(node.args[0])
        yes, no = (self.branch(arg) for arg in node.args[1:])

        def run(frame: EvaluationFrame) -> Any:
            chosen = condition(frame)
            if chosen is True:
                return yes(frame)
            if chosen is False:
                return no(frame)
            return chosen if isinstance(chosen, EvaluationError) else no_such_overload()

        return run

    def branch(self, node: CelNode) -> Evaluator:
        """A branch of ?:, without the charge for the start of its path."""
        if self.is_attribute(node) and check.constant_value(node, self.checked) is check.NOT_CONSTANT:
            return self.path(node).code
        return self.plan(node)

    def call(self, node: Call) -> Evaluator:
        args = [self.plan(arg) for arg in node.operands]
        match node.function:
            case "_&&_" | "_||_":
                return logical_step(args[0], args[1], decides=node.function == "_||_")
            case "orValue" | "or":
                return or_step(args[0], args[1], node.function)
            case "_==_":
                return self.strict(node, args, lambda values: equal(*values))
            case "_!=_":
                return self.strict(node, args, lambda values: not same_value(*values))
            case "@not_strictly_false":
                return not_strictly_false_step(args[0])
            case "_+_" if is_accumulator(node.args[0]) and isinstance(node.args[1], ListNode):
                return append_step(args[1])
            case "@in" if is_constant_list(check.constant_value(node.args[1], self.checked)):
                return constant_membership(args[0], check.constant_value(node.args[1], self.checked))
        candidates = self.checked.overloads[node.id]
        return self.strict(node, args, lambda values: dispatch(candidates, values))

    def strict(self, node: Call, args: list[Evaluator], apply: Callable[[tuple[Any, ...]], Any]) -> Evaluator:
        """A call that needs all its arguments: the first error among them is its result."""
        overloads = self.checked.overloads[node.id]
        single = overloads[0].id if len(overloads) == 1 else ""
        eager, charge = len(args) <= 2, charge_of(single, node.function)

        def run(frame: EvaluationFrame) -> Any:
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
            frame.charge(charge(values, result))
            return result

        return run

    def list_literal(self, node: ListNode) -> Evaluator:
        items = [(self.plan(item), position in node.optional) for position, item in enumerate(node.elements)]

        def run(frame: EvaluationFrame) -> Any:
            values = []
            for code, optional in items:
                value = code(frame)
                if optional:
                    value = _inside_optional(value)
                if isinstance(value, EvaluationError):
                    return value
                if value is not _ABSENT:
                    values.append(value)
            frame.charge(_LIST_COST)
            return values

        return run

    def map_literal(self, node: MapNode) -> Evaluator:
        entries = [(self.plan(entry.key), self.plan(entry.value), entry.optional) for entry in node.entries]

        def run(frame: EvaluationFrame) -> Any:
            built: dict[Any, Any] = {}
            for key_code, value_code, optional in entries:
                key = key_code(frame)
                if isinstance(key, EvaluationError):
                    return key
                value = value_code(frame)
                if optional:
                    value = _inside_optional(value)
                if isinstance(value, EvaluationError):
                    return value
                if value is not _ABSENT:
                    built[key_of(key)] = value
            frame.charge(_MAP_COST)
            return built

        return run

    def bind(self, node: Fold) -> Evaluator:
        bound, result, name = self.plan(node.accu_init), self.plan(node.result), node.accu_var

        def run(frame: EvaluationFrame) -> Any:
            outer = frame.scope
            frame.scope = {**outer, name: LazyValue(bound, outer)}
            value = result(frame)
            frame.scope = outer
            return value

        return run

    def fold(self, node: Fold) -> Evaluator:
        over, start = self.plan(node.iter_range), self.plan(node.accu_init)
        condition, step, result = self.plan(node.condition), self.plan(node.step), self.plan(node.result)
        entries = two_variable_range if node.iter_var2 else one_variable_range
        name, name2, accu = node.iter_var, node.iter_var2, node.accu_var

        def run(frame: EvaluationFrame) -> Any:
            items = over(frame)
            if isinstance(items, EvaluationError):
                return items
            rounds = entries(items)
            if isinstance(rounds, EvaluationError):
                return rounds
            outer = frame.scope
            loop = frame.scope = {**outer, accu: copy(start(frame))}
            for first, second in rounds:
                loop[name] = first
                if name2:
                    loop[name2] = second
                if condition(frame) is False:
                    break
                loop[accu] = step(frame)
            frame.scope = {**outer, accu: loop[accu]}
            value = result(frame)
            frame.scope = outer
            return value

        return run


_ABSENT = object()


def _inside_optional(value: Any) -> Any:
    """The value of an element with a question mark. An error stays, and an absent value is left out."""
    if isinstance(value, EvaluationError):
        return value
    if type(value) is not OptionalValue:
        return no_such_overload()
    return value.value if value.present else _ABSENT
