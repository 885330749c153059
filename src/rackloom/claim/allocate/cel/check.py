"""The type checker: which expressions are meaningful for a device, and which overloads each call may take."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rackloom.claim.allocate.cel import types as t
from rackloom.claim.allocate.cel.environment import Environment
from rackloom.claim.allocate.cel.errors import CompileError
from rackloom.claim.allocate.cel.nodes import (
    Call,
    Const,
    Entry,
    Fold,
    Ident,
    ListNode,
    MapNode,
    Node,
    Parsed,
    Select,
    StructNode,
)
from rackloom.claim.allocate.cel.overloads import Overload
from rackloom.claim.allocate.cel.types import Type
from rackloom.claim.allocate.cel.unify import Bindings, assignable, most_general, substitute
from rackloom.claim.allocate.cel.values import Uint

_CONSTANTS: dict[type, Type] = {
    bool: t.BOOL,
    int: t.INT,
    Uint: t.UINT,
    float: t.DOUBLE,
    str: t.STRING,
    bytes: t.BYTES,
    type(None): t.NULL,
}


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked expression. Functions are named in full: `optional.of` is a call without target."""

    parsed: Parsed
    root: Node
    types: Mapping[int, Type]
    overloads: Mapping[int, tuple[Overload, ...]]
    constants: frozenset[int]
    """Ids of identifiers that name a type, not a variable."""

    @property
    def output(self) -> Type:
        """The static type of the whole."""
        return self.types[self.root.id]


def check(parsed: Parsed, environment: Environment) -> Checked:
    """Resolve names and overloads. Raises CompileError at the first part that does not type-check."""
    checker = _Checker(parsed, environment)
    root = checker.check(parsed.root)
    types = {key: substitute(checker.bindings, of, free_to_dyn=True) for key, of in checker.types.items()}
    return Checked(parsed, root, types, checker.overloads, frozenset(checker.type_names))


class _Checker:
    def __init__(self, parsed: Parsed, environment: Environment) -> None:
        self.parsed = parsed
        self.environment = environment
        self.bindings: Bindings = {}
        self.types: dict[int, Type] = {}
        self.overloads: dict[int, tuple[Overload, ...]] = {}
        self.type_names: set[int] = set()
        self.scopes: list[dict[str, Type]] = [{"device": t.DEVICE}]
        self.fresh: Iterator[Type] = (t.param(f"_var{n}") for n in itertools.count())

    def fail(self, node_id: int, message: str, hint: str | None = None) -> CompileError:
        line, column = self.parsed.place(node_id)
        return CompileError(message, line=line, column=column, hint=hint, source=self.parsed.source)

    def type_of(self, node: Node) -> Type:
        return self.types[node.id]

    def fits(self, given: Type, wanted: Type) -> bool:
        bindings = assignable(self.bindings, [given], [wanted])
        if bindings is None:
            return False
        self.bindings = bindings
        return True

    def expect(self, node: Node, wanted: Type) -> None:
        if not self.fits(wanted, self.type_of(node)):
            raise self.mismatch(node, wanted, self.type_of(node))

    def mismatch(self, node: Node, wanted: Type, found: Type) -> CompileError:
        wanted, found = (substitute(self.bindings, one) for one in (wanted, found))
        return self.fail(node.id, f"expected type '{wanted}' but found '{found}'")

    def check(self, node: Node) -> Node:
        match node:
            case Const():
                self.types[node.id] = _CONSTANTS[type(node.value)]
            case Ident():
                self.types[node.id] = self.ident(node)
            case Select():
                return self.select(node)
            case Call():
                return self.call(node)
            case ListNode():
                return self.list_literal(node)
            case MapNode():
                return self.map_literal(node)
            case StructNode():
                raise self.struct(node)
            case Fold():
                return self.fold(node)
        return node

    def struct(self, node: StructNode) -> CompileError:
        return self.fail(
            node.id,
            f"undeclared reference to '{node.type_name}' (in container '')",
            "message values cannot be built in selectors",
        )

    def lookup(self, name: str) -> Type | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def ident(self, node: Ident) -> Type:
        found = self.lookup(node.name.removeprefix("."))
        if found is not None:
            return found
        named = self.environment.type_names.get(node.name.removeprefix("."))
        if named is None:
            raise self.undeclared(node, node.name)
        self.type_names.add(node.id)
        return t.type_of(named)

    def undeclared(self, node: Node, name: str) -> CompileError:
        return self.fail(
            node.id, f"undeclared reference to '{name}' (in container '')", self.environment.advice(name)
        )

    def select(self, node: Select) -> Node:
        name = None if node.test_only else _dotted(node)
        if name is not None and name in self.environment.type_names:
            self.types[node.id] = t.type_of(self.environment.type_names[name])
            self.type_names.add(node.id)
            return Ident(node.id, name)
        operand = self.check(node.operand)
        field = self.field(node.id, operand, node.field)
        self.types[node.id] = t.BOOL if node.test_only else substitute(self.bindings, field)
        return replace(node, operand=operand)

    def field(self, node_id: int, operand: Node, name: str, *, optional: bool = False) -> Type:
        """The type of `operand.name`."""
        whole = substitute(self.bindings, self.type_of(operand))
        target = t.unwrapped(whole)
        match target.kind:
            case "map":
                result = target.params[1]
            case "struct":
                result = self.member(node_id, target, name)
            case "param":
                self.fits(t.DYN, target)
                result = t.DYN
            case "dyn" | "any" | "error":
                result = t.DYN
            case _:
                raise self.fail(node_id, f"type '{target}' does not support field selection")
        return t.optional_of(result) if optional or t.is_optional(whole) else result

    def member(self, node_id: int, target: Type, name: str) -> Type:
        found = self.environment.fields.get(name) if target == t.DEVICE else None
        if found is None:
            known = ", ".join(self.environment.fields)
            hint = f"a device has {known}" if target == t.DEVICE else None
            raise self.fail(node_id, f"undefined field '{name}'", hint)
        return found

    def call(self, node: Call) -> Node:
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

    def optional_select(self, node: Call) -> Node:
        field = node.args[1]
        if not isinstance(field, Const) or not isinstance(field.value, str):
            raise self.fail(field.id, "unsupported optional field selection")
        operand = self.check(node.args[0])
        result = self.field(node.id, operand, field.value, optional=True)
        self.types[field.id] = t.STRING
        self.types[node.id] = substitute(self.bindings, result)
        self.overloads[node.id] = (self.environment.functions["_?._"][0],)
        return replace(node, args=(operand, field))

    def resolve(self, call: Call, name: str) -> Node:
        declared = self.environment.functions.get(name)
        if declared is None:
            raise self.undeclared(call, name)
        given = [self.type_of(arg) for arg in call.operands]
        if name in ("_&&_", "_||_"):
            for arg in call.args:
                if not self.fits(self.type_of(arg), t.BOOL):
                    raise self.mismatch(arg, t.BOOL, self.type_of(arg))
        result: Type | None = None
        chosen: list[Overload] = []
        for overload in declared:
            found = self.overload_result(overload, call, given)
            if found is None:
                continue
            chosen.append(overload)
            if result is None:
                result = found
            elif not t.is_dyn(result) and found != result:
                result = t.DYN
        if result is None:
            raise self.no_overload(call, name, given)
        self.types[call.id] = result
        self.overloads[call.id] = tuple(chosen)
        return call

    def overload_result(self, overload: Overload, call: Call, given: list[Type]) -> Type | None:
        if overload.member != (call.target is not None):
            return None
        wanted, result = list(overload.params), overload.result
        if overload.variables:
            fresh = {variable: next(self.fresh) for variable in overload.variables}
            wanted = [substitute(fresh, one) for one in wanted]
            result = substitute(fresh, result)
        bindings = assignable(self.bindings, given, wanted)
        if bindings is None:
            return None
        self.bindings = bindings
        return substitute(bindings, result)

    def no_overload(self, call: Call, name: str, given: list[Type]) -> CompileError:
        shown = [str(substitute(self.bindings, one, free_to_dyn=True)) for one in given]
        signature = f"{shown[0]}.({', '.join(shown[1:])})" if call.target else f"({', '.join(shown)})"
        return self.fail(call.id, f"found no matching overload for '{name}' applied to '{signature}'")

    def joined(self, so_far: Type | None, current: Type) -> Type:
        if so_far is None:
            return current
        return most_general(so_far, current) if self.fits(so_far, current) else t.DYN

    def optional_item(self, node: Node) -> Type:
        """The type inside an element marked with a question mark."""
        found = self.type_of(node)
        if not t.is_optional(found) and not t.is_dyn(found):
            raise self.mismatch(node, t.optional_of(found), found)
        return t.unwrapped(found)

    def list_literal(self, node: ListNode) -> Node:
        element: Type | None = None
        elements = tuple(map(self.check, node.elements))
        for index, item in enumerate(elements):
            found = self.optional_item(item) if index in node.optional else self.type_of(item)
            element = self.joined(element, found)
        self.types[node.id] = t.list_of(element or next(self.fresh))
        return replace(node, elements=elements)

    def map_literal(self, node: MapNode) -> Node:
        key: Type | None = None
        value: Type | None = None
        entries: list[Entry] = []
        for entry in node.entries:
            checked = replace(entry, key=self.check(entry.key), value=self.check(entry.value))
            key = self.joined(key, self.type_of(checked.key))
            found = self.optional_item(checked.value) if entry.optional else self.type_of(checked.value)
            value = self.joined(value, found)
            entries.append(checked)
        self.types[node.id] = t.map_of(key or next(self.fresh), value or next(self.fresh))
        return replace(node, entries=tuple(entries))

    def fold(self, node: Fold) -> Node:
        iter_range, accu_init = self.check(node.iter_range), self.check(node.accu_init)
        accumulated = self.type_of(accu_init)
        variables = self.iterated(iter_range, two=bool(node.iter_var2))
        names = [node.iter_var, node.iter_var2] if node.iter_var2 else [node.iter_var]
        self.scopes.append({node.accu_var: accumulated})
        self.scopes.append(dict(zip(names, variables, strict=True)))
        condition, step = self.check(node.condition), self.check(node.step)
        self.expect(condition, t.BOOL)
        self.expect(step, accumulated)
        self.scopes.pop()
        result = self.check(node.result)
        self.scopes.pop()
        self.types[node.id] = substitute(self.bindings, self.type_of(result))
        return replace(
            node, iter_range=iter_range, accu_init=accu_init, condition=condition, step=step, result=result
        )

    def iterated(self, node: Node, *, two: bool) -> list[Type]:
        """Types of the loop variables over `node`: one, or index or key and value."""
        over = substitute(self.bindings, self.type_of(node))
        match over.kind:
            case "list":
                return [t.INT, over.params[0]] if two else [over.params[0]]
            case "map":
                return list(over.params) if two else [over.params[0]]
            case "dyn" | "param" | "error":
                self.fits(t.DYN, over)
                return [t.DYN] * (1 + two)
        raise self.fail(
            node.id,
            f"expression of type '{over}' cannot be range of a comprehension (must be list, map, or dynamic)",
        )


def _dotted(node: Node) -> str | None:
    """`a.b.c` as one name, if that is what the node is."""
    match node:
        case Ident():
            return node.name
        case Select(test_only=False):
            prefix = _dotted(node.operand)
            return None if prefix is None else f"{prefix}.{node.field}"
    return None
