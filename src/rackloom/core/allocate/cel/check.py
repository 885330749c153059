"""Static analysis of an expression: type check, constant folding, and validation of literals.

`check_types` resolves names and overloads as cel-go's checker does. It walks the tree once, keeps
bindings of type variables, collects all overloads that fit each call, and raises `CompileError` at the
first part that does not type-check. Namespaced functions such as `optional.of` become calls without a
target. If several overloads fit and their result types differ, the call has type dyn.

`constant_value` folds the parts that do not depend on the device: literals, lists and maps of them, type
names, and converted literals. Upstream folds the same parts when it builds a program, which has two visible
effects: such parts cost nothing at run time, and a conversion that must fail is refused at once.

`validate_literals` refuses well-typed expressions that can never work: malformed regular expressions,
durations, timestamps and format strings, and lists or maps with elements of mixed types.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.environment import CelEnvironment
from rackloom.core.allocate.cel.errors import CompileError, EvaluationError, no_such_overload
from rackloom.core.allocate.cel.library.conversions import parse_duration, parse_timestamp
from rackloom.core.allocate.cel.library.messages import MESSAGES, MessageType
from rackloom.core.allocate.cel.library.strings import (
    FORMAT_CLAUSE,
    FORMAT_VERB_TYPES,
    compiled_pattern,
    format_verb,
    not_formattable,
)
from rackloom.core.allocate.cel.syntax import (
    Call,
    CelNode,
    Const,
    Fold,
    Ident,
    ListNode,
    MapEntry,
    MapNode,
    MessageNode,
    ParsedExpression,
    Select,
    children,
)
from rackloom.core.allocate.cel.types import (
    NEW_MESSAGE,
    Bindings,
    CelType,
    Overload,
    are_apart,
    assignable,
    dispatch,
    most_general,
    substitute,
)
from rackloom.core.allocate.cel.values import OptionalValue, TypeName, Uint, key_of

# The type checker.


_CONSTANTS: dict[type, CelType] = {
    bool: types.BOOL,
    int: types.INT,
    Uint: types.UINT,
    float: types.DOUBLE,
    str: types.STRING,
    bytes: types.BYTES,
    type(None): types.NULL,
}


class CheckedExpression(msgspec.Struct, frozen=True):
    """A checked expression. Functions are named in full: `optional.of` is a call without target."""

    parsed: ParsedExpression
    root: CelNode
    types: Mapping[int, CelType]
    overloads: Mapping[int, tuple[Overload, ...]]
    constants: frozenset[int]
    """Ids of identifiers that name a type, not a variable."""

    @property
    def output(self) -> CelType:
        """The static type of the whole."""
        return self.types[self.root.id]


def check_types(parsed: ParsedExpression, environment: CelEnvironment) -> CheckedExpression:
    """Resolve names and overloads. Raises CompileError at the first part that does not type-check."""
    checker = _TypeChecker(parsed, environment)
    root = checker.check(parsed.root)
    types = {key: substitute(checker.bindings, of, free_to_dyn=True) for key, of in checker.types.items()}
    return CheckedExpression(parsed, root, types, checker.overloads, frozenset(checker.type_names))


class _TypeChecker:
    def __init__(self, parsed: ParsedExpression, environment: CelEnvironment) -> None:
        self.parsed = parsed
        self.environment = environment
        self.bindings: Bindings = {}
        self.types: dict[int, CelType] = {}
        self.overloads: dict[int, tuple[Overload, ...]] = {}
        self.type_names: set[int] = set()
        self.scopes: list[dict[str, CelType]] = [{"device": types.DEVICE}]
        self.fresh: Iterator[CelType] = (types.type_variable(f"_var{n}") for n in itertools.count())

    def fail(self, node_id: int, message: str, hint: str | None = None) -> CompileError:
        line, column = self.parsed.place(node_id)
        return CompileError(message, line=line, column=column, hint=hint, source=self.parsed.source)

    def type_of(self, node: CelNode) -> CelType:
        return self.types[node.id]

    def fits(self, given: CelType, wanted: CelType) -> bool:
        bindings = assignable(self.bindings, [given], [wanted])
        if bindings is None:
            return False
        self.bindings = bindings
        return True

    def expect(self, node: CelNode, wanted: CelType) -> None:
        if not self.fits(wanted, self.type_of(node)):
            raise self.mismatch(node, wanted, self.type_of(node))

    def mismatch(self, node: CelNode, wanted: CelType, found: CelType) -> CompileError:
        wanted, found = (substitute(self.bindings, type_) for type_ in (wanted, found))
        return self.fail(node.id, f"expected type '{wanted}' but found '{found}'")

    def check(self, node: CelNode) -> CelNode:
        match node:
            case Const():
                self.types[node.id] = _CONSTANTS[type(node.value)]
            case Ident():
                name = node.name.removeprefix(".")
                found = next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
                if found is None:
                    # No variable has the name, so it may be that of a type.
                    named = self.environment.type_names.get(name)
                    if named is None:
                        raise self.undeclared(node, node.name)
                    self.type_names.add(node.id)
                    found = types.type_of(named)
                self.types[node.id] = found
            case Select():
                return self.select(node)
            case Call():
                return self.call(node)
            case ListNode():
                return self.list_literal(node)
            case MapNode():
                return self.map_literal(node)
            case MessageNode():
                return self.message(node)
            case Fold():
                return self.fold(node)
        return node

    def undeclared(self, node: CelNode, name: str) -> CompileError:
        return self.fail(
            node.id, f"undeclared reference to '{name}' (in container '')", self.environment.advice(name)
        )

    def select(self, node: Select) -> CelNode:
        name = None if node.test_only else _dotted(node)
        if name is not None and name in self.environment.type_names:
            self.types[node.id] = types.type_of(self.environment.type_names[name])
            self.type_names.add(node.id)
            return Ident(node.id, name)
        operand = self.check(node.operand)
        field = self.field(node.id, operand, node.field)
        self.types[node.id] = types.BOOL if node.test_only else substitute(self.bindings, field)
        return replace(node, operand=operand)

    def field(self, node_id: int, operand: CelNode, name: str, *, optional: bool = False) -> CelType:
        """The type of `operand.name`."""
        whole = substitute(self.bindings, self.type_of(operand))
        target = types.without_optional(whole)
        match target.kind:
            case "map":
                result = target.params[1]
            case "struct":
                found = self.environment.fields.get(name) if target == types.DEVICE else None
                if found is None:
                    known = ", ".join(self.environment.fields)
                    hint = f"a device has {known}" if target == types.DEVICE else None
                    raise self.fail(node_id, f"undefined field '{name}'", hint)
                result = found
            case "param":
                self.fits(types.DYN, target)
                result = types.DYN
            case "dyn" | "any":
                result = types.DYN
            case _:
                raise self.fail(node_id, f"type '{target}' does not support field selection")
        return types.optional_of(result) if optional or types.is_optional(whole) else result

    def call(self, node: Call) -> CelNode:
        if node.function == "_?._":
            return self.optional_select(node)
        args = tuple(map(self.check, node.args))
        if node.target is None:
            return self.resolve(replace(node, args=args), node.function)
        prefix = _dotted(node.target)
        if prefix is not None and f"{prefix}.{node.function}".removeprefix(".") in self.environment.functions:
            name = f"{prefix}.{node.function}".removeprefix(".")
            return self.resolve(Call(node.id, None, name, args), name)
        target = self.check(node.target)
        return self.resolve(replace(node, target=target, args=args), node.function)

    def optional_select(self, node: Call) -> CelNode:
        field = node.args[1]
        if not isinstance(field, Const) or not isinstance(field.value, str):
            raise self.fail(field.id, "unsupported optional field selection")
        operand = self.check(node.args[0])
        result = self.field(node.id, operand, field.value, optional=True)
        self.types[field.id] = types.STRING
        self.types[node.id] = substitute(self.bindings, result)
        self.overloads[node.id] = (self.environment.functions["_?._"][0],)
        return replace(node, args=(operand, field))

    def resolve(self, call: Call, name: str) -> CelNode:
        declared = self.environment.functions.get(name)
        if declared is None:
            raise self.undeclared(call, name)
        given = [self.type_of(arg) for arg in call.operands]
        if name in ("_&&_", "_||_"):
            for arg in call.args:
                if not self.fits(self.type_of(arg), types.BOOL):
                    raise self.mismatch(arg, types.BOOL, self.type_of(arg))
        result: CelType | None = None
        chosen: list[Overload] = []
        for overload in declared:
            found = self.overload_result(overload, call, given)
            if found is None:
                continue
            chosen.append(overload)
            if result is None:
                result = found
            elif not types.is_dyn(result) and found != result:
                result = types.DYN
        if result is None:
            shown = [str(substitute(self.bindings, type_, free_to_dyn=True)) for type_ in given]
            signature = f"{shown[0]}.({', '.join(shown[1:])})" if call.target else f"({', '.join(shown)})"
            raise self.fail(call.id, f"found no matching overload for '{name}' applied to '{signature}'")
        self.types[call.id] = result
        self.overloads[call.id] = tuple(chosen)
        return call

    def overload_result(self, overload: Overload, call: Call, given: list[CelType]) -> CelType | None:
        if overload.member != (call.target is not None) or len(overload.params) != len(given):
            return None
        if are_apart(given, overload.params):
            return None
        wanted, result = list(overload.params), overload.result
        if overload.variables:
            fresh = {variable: next(self.fresh) for variable in overload.variables}
            wanted = [substitute(fresh, type_) for type_ in wanted]
            result = substitute(fresh, result)
        bindings = assignable(self.bindings, given, wanted)
        if bindings is None:
            return None
        self.bindings = bindings
        return substitute(bindings, result)

    def joined(self, so_far: CelType | None, current: CelType) -> CelType:
        if so_far is None:
            return current
        return most_general(so_far, current) if self.fits(so_far, current) else types.DYN

    def optional_item(self, node: CelNode) -> CelType:
        """The type inside an element marked with a question mark."""
        found = self.type_of(node)
        if not types.is_optional(found) and not types.is_dyn(found):
            raise self.mismatch(node, types.optional_of(found), found)
        return types.without_optional(found)

    def list_literal(self, node: ListNode) -> CelNode:
        element: CelType | None = None
        elements = tuple(map(self.check, node.elements))
        for index, item in enumerate(elements):
            found = self.optional_item(item) if index in node.optional else self.type_of(item)
            element = self.joined(element, found)
        self.types[node.id] = types.list_of(element or next(self.fresh))
        return replace(node, elements=elements)

    def map_literal(self, node: MapNode) -> CelNode:
        key: CelType | None = None
        value: CelType | None = None
        entries: list[MapEntry] = []
        for entry in node.entries:
            checked = replace(entry, key=self.check(entry.key), value=self.check(entry.value))
            key = self.joined(key, self.type_of(checked.key))
            found = self.optional_item(checked.value) if entry.optional else self.type_of(checked.value)
            value = self.joined(value, found)
            entries.append(checked)
        self.types[node.id] = types.map_of(key or next(self.fresh), value or next(self.fresh))
        return replace(node, entries=tuple(entries))

    def message(self, node: MessageNode) -> CelNode:
        """A call that builds the message of its fields."""
        declared = MESSAGES.get(node.type_name.removeprefix("."))
        if declared is None:
            known = ", ".join(name.removeprefix("google.protobuf.") for name in MESSAGES)
            undeclared = f"undeclared reference to '{node.type_name}' (in container '')"
            raise self.fail(node.id, undeclared, f"messages of google.protobuf may be built: {known}")
        values = tuple(self.check(field.value) for field in node.fields)
        for field, value in zip(node.fields, values, strict=True):
            wanted = declared.fields.get(field.name)
            if wanted is None:
                raise self.fail(field.id, f"undefined field '{field.name}'")
            found = self.optional_item(value) if field.optional else self.type_of(value)
            if not self.fits(found, wanted):
                raise self.fail(
                    field.id,
                    f"expected type of field '{field.name}' is '{wanted}' but provided type is "
                    f"'{substitute(self.bindings, found)}'",
                )
        self.types[node.id] = declared.result
        self.overloads[node.id] = (_message_builder(node, declared),)
        return Call(node.id, None, node.type_name, values)

    def fold(self, node: Fold) -> CelNode:
        iter_range, accu_init = self.check(node.iter_range), self.check(node.accu_init)
        accumulated = self.type_of(accu_init)
        variables = self.iterated(iter_range, two=bool(node.iter_var2))
        names = [node.iter_var, node.iter_var2] if node.iter_var2 else [node.iter_var]
        self.scopes.append({node.accu_var: accumulated})
        self.scopes.append(dict(zip(names, variables, strict=True)))
        condition, step = self.check(node.condition), self.check(node.step)
        self.expect(condition, types.BOOL)
        self.expect(step, accumulated)
        self.scopes.pop()
        result = self.check(node.result)
        self.scopes.pop()
        self.types[node.id] = substitute(self.bindings, self.type_of(result))
        return replace(
            node, iter_range=iter_range, accu_init=accu_init, condition=condition, step=step, result=result
        )

    def iterated(self, node: CelNode, *, two: bool) -> list[CelType]:
        """Types of the loop variables over `node`: one, or index or key and value."""
        over = substitute(self.bindings, self.type_of(node))
        match over.kind:
            case "list":
                return [types.INT, over.params[0]] if two else [over.params[0]]
            case "map":
                return list(over.params) if two else [over.params[0]]
            case "dyn" | "param":
                self.fits(types.DYN, over)
                return [types.DYN] * (1 + two)
        raise self.fail(
            node.id,
            f"expression of type '{over}' cannot be range of a comprehension (must be list, map, or dynamic)",
        )


def _message_builder(node: MessageNode, declared: MessageType) -> Overload:
    """The function that builds a message from the values of its fields."""
    fields = [(field.name, field.optional) for field in node.fields]

    def build(*values: Any) -> Any:
        present = {}
        for (name, optional), value in zip(fields, values, strict=True):
            if not optional:
                present[name] = value
            elif type(value) is not OptionalValue:
                raise no_such_overload()
            elif value.present:
                present[name] = value.value
        return declared.build(present)

    params = (types.DYN,) * len(fields)
    return Overload(NEW_MESSAGE, node.type_name, False, params, declared.result, (), build)


def _dotted(node: CelNode) -> str | None:
    """`a.b.c` as one name, if the node has that form."""
    match node:
        case Ident():
            return node.name
        case Select(test_only=False):
            prefix = _dotted(node.operand)
            return None if prefix is None else f"{prefix}.{node.field}"
    return None


# Constant folding.


NOT_CONSTANT = object()
"""The value of everything that depends on the device."""

CONVERSIONS = frozenset(
    ("bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint")
)
"""Functions that are applied to constants beforehand, and may fail then."""
_PRIMITIVES = (bool, int, Uint, float, str)


def constant_value(node: CelNode, checked: CheckedExpression) -> Any:
    """The constant value of `node`, or UNKNOWN. Raises EvaluationError for a conversion that fails."""
    match node:
        case Const():
            return node.value
        case Ident() if node.id in checked.constants:
            return TypeName(checked.types[node.id].params[0].name)
        case ListNode():
            values = [constant_value(item, checked) for item in node.elements]
            # An element with a question mark may be left out.
            if node.optional or any(value is NOT_CONSTANT for value in values):
                return NOT_CONSTANT
            return values
        case MapNode():
            return _constant_map(node, checked)
        case Call(target=None, args=(arg,)) if node.function in CONVERSIONS:
            value = constant_value(arg, checked)
            return NOT_CONSTANT if value is NOT_CONSTANT else dispatch(checked.overloads[node.id], (value,))
    return NOT_CONSTANT


def is_primitive(value: Any) -> bool:
    """Whether upstream would put the value in a membership set."""
    return type(value) in _PRIMITIVES


def same_primitive(value: Any, member: Any) -> bool:
    """Membership in such a set: by type and value, and across numeric types if no digit is lost."""
    if type(value) is bool or type(member) is bool:
        return value is member
    return is_primitive(value) and bool(value == member)


def _constant_map(node: MapNode, checked: CheckedExpression) -> Any:
    built: dict[Any, Any] = {}
    for entry in node.entries:
        key, value = constant_value(entry.key, checked), constant_value(entry.value, checked)
        if entry.optional or key is NOT_CONSTANT or value is NOT_CONSTANT:
            return NOT_CONSTANT
        built[key_of(key)] = value
    return built


# Validation of literals and homogeneous collections.


_PATTERN_FUNCTIONS = ("matches", "find", "findAll")
_LITERALS = {"duration": parse_duration, "timestamp": parse_timestamp}


def validate_literals(checked: CheckedExpression) -> None:
    """Raise CompileError for the first part that upstream would refuse."""
    _validate(checked.root, checked, formatted=False)


def _validate(node: CelNode, checked: CheckedExpression, *, formatted: bool) -> None:
    """Validate the node and its subtree. `formatted`: it is an argument of format, which may mix types."""
    try:
        match node:
            case Call():
                _validate_call(node, checked)
            case ListNode() if not formatted:
                items = [(item, number in node.optional) for number, item in enumerate(node.elements)]
                _require_one_type(checked, items)
            case MapNode() if not formatted:
                _require_one_type(checked, [(entry.key, False) for entry in node.entries])
                _require_one_type(checked, [(entry.value, entry.optional) for entry in node.entries])
    except EvaluationError as error:
        raise _compile_error(checked, node, error.message) from None
    formatted = formatted or (isinstance(node, Call) and node.function == "format")
    for child in children(node):
        _validate(child, checked, formatted=formatted)


def _compile_error(checked: CheckedExpression, node: CelNode, message: str) -> CompileError:
    line, column = checked.parsed.place(node.id)
    return CompileError(message, line=line, column=column, source=checked.parsed.source)


def _validate_call(call: Call, checked: CheckedExpression) -> None:
    operands = call.operands
    if call.function in _PATTERN_FUNCTIONS and len(operands) > 1:
        pattern = constant_value(operands[1], checked)
        if isinstance(pattern, str):
            compiled_pattern(pattern)
    if call.function in _LITERALS and isinstance(operands[0], Const):
        value = operands[0].value
        if isinstance(value, str):
            _LITERALS[call.function](value)
        # Timestamps may also be seconds. Upstream refuses a number as duration, though it has the overload.
        elif call.function == "duration":
            raise EvaluationError("invalid duration argument")
    if call.function == "format" and isinstance(call.target, Const) and isinstance(call.args[0], ListNode):
        _validate_format(str(call.target.value), call.args[0], checked)


def _validate_format(template: str, args: ListNode, checked: CheckedExpression) -> None:
    """Every clause has an argument that it can show, and every argument a clause."""
    used = 0
    for clause in FORMAT_CLAUSE.finditer(template):
        if clause[1]:
            continue
        verb = format_verb(clause, used, len(args.elements))
        if (wrong := _unshowable(verb, args.elements[used], checked)) is not None:
            raise not_formattable(verb, checked.types[wrong.id].name)
        used += 1
    if used < len(args.elements):
        raise EvaluationError(
            f"too many arguments supplied to string.format (expected {used}, got {len(args.elements)})"
        )


def _unshowable(verb: str, node: CelNode, checked: CheckedExpression) -> CelNode | None:
    """The first part of an argument that has a static type the verb does not take."""
    type_ = types.unwrapped(checked.types[node.id])
    if type_ != types.DYN and type_.name not in FORMAT_VERB_TYPES[verb]:
        return node
    if isinstance(node, ListNode | MapNode):
        return next(
            (wrong for part in children(node) if (wrong := _unshowable("s", part, checked)) is not None), None
        )
    return None


def _require_one_type(checked: CheckedExpression, items: list[tuple[CelNode, bool]]) -> None:
    """Require that all items have one type. Here dyn is a separate type."""
    wanted: CelType | None = None
    for node, optional in items:
        found = types.without_optional(checked.types[node.id]) if optional else checked.types[node.id]
        if wanted is not None and types.unwrapped(found) != types.unwrapped(wanted):
            raise _compile_error(checked, node, f"expected type '{wanted}' but found '{found}'")
        wanted = found
