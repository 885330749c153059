"""The fast path: a selector compiled to Python functions over a device view.

It covers expressions with a cost that the static estimate bounds: comparisons of fields, calls, `cel.bind`,
and comprehensions that yield a bool, a number or a list. Generated code either gives the answer of the exact
evaluator or raises, and then the exact evaluator decides. Errors, their absorption and their texts
therefore have one implementation.

- A path with constant names, such as `device.attributes["d"].x`, is one look-up. A name that `cel.bind`
  gives to a path stands for that path. Any other bound value is computed at its binding.
- A comparison or call looks at the class of its operands and calls the implementation directly. Python
  compares bool, int, float and str as CEL does only when both sides have the same class.
- A comprehension becomes a separate function with a loop. Names in scope are its parameters. Lists grow in
  place, because nothing else refers to an accumulator.

Names reach the generated source through `repr`, literals as bound values, so no text of the expression is
executed. Python compiles a source once: selectors often differ in their literals alone. Local variables are
numbered.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any

from rackloom.core.allocate.cel import check, types
from rackloom.core.allocate.cel.check import CheckedExpression
from rackloom.core.allocate.cel.environment import DeviceView
from rackloom.core.allocate.cel.errors import EvaluationError
from rackloom.core.allocate.cel.library.operators import index_container
from rackloom.core.allocate.cel.library.strings import compiled_pattern
from rackloom.core.allocate.cel.syntax import RESULT, Call, CelNode, Const, Fold, Ident, ListNode, Select
from rackloom.core.allocate.cel.types import CelType, Overload, dispatch
from rackloom.core.allocate.cel.values import TYPE_NAMES, equal, same_value

FastFunction = Callable[[DeviceView], bool]

_COMPARED = (bool, int, float, str)
"""Classes that Python compares as CEL does when both sides are of one of them."""
_ORDERS = {"_<_": "<", "_<=_": "<=", "_>_": ">", "_>=_": ">="}
_PURE_LITERALS = ("quantity", "semver", "ip", "cidr", "duration", "timestamp")
_MAX_ITEMS, _MAX_NAMES = 64, 32
"""Items of a list, and names of a domain, that a loop may have here: the estimate of cost assumes no more."""
_MAX_OVERLOADS = 4
"""Overloads that a call tries by class before it leaves the choice to `dispatch`."""

DevicePath = tuple[str, ...]
"""Constant names of a path that starts at the device."""
Scope = Mapping[str, str | DevicePath]
"""The meaning of each name in scope: a local variable of the generated code, or a path."""


class NotCompilable(Exception):
    """The expression, or the device at hand, needs the exact evaluator."""


def fast_path(checked: CheckedExpression) -> FastFunction | None:
    """The generated function, or None if the expression is not simple."""
    writer = _PythonWriter(checked)
    try:
        body = writer.truth(checked.root, {"device": ()})
        main = f"def fast(view):\n    a = view.attributes\n    c = view.capacity\n    return {body}\n"
        code = code_of("".join((*writer.functions, main)))
    except (NotCompilable, EvaluationError, SyntaxError, MemoryError):
        # Python's own parser limits how deeply an expression nests.
        return None
    before = set(writer.names)
    exec(code, writer.names)  # noqa: S102 - only code written below
    for name in writer.names.keys() - before - {"__builtins__"}:
        # Code remembers where it found its names, so functions that share it would slow each other down.
        function = writer.names[name]
        function.__code__ = function.__code__.replace()
    return writer.names["fast"]  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def code_of(source: str) -> CodeType:
    """Selectors that differ in numbers and texts only have the same source."""
    return compile(source, "<selector>", "exec")


def _raise_not_compilable(value: Any) -> Any:
    raise NotCompilable(value)


def _few_items(items: Any) -> Any:
    if items.__class__ is not list or len(items) > _MAX_ITEMS:
        raise NotCompilable(items)
    return items


def _few_names(names: Collection[str]) -> Collection[str]:
    if len(names) > _MAX_NAMES:
        raise NotCompilable(names)
    return names


class _PythonWriter:
    """Writes nodes as Python expressions. `names` are the values that they refer to."""

    def __init__(self, checked: CheckedExpression) -> None:
        self.checked = checked
        self.names: dict[str, Any] = {
            "unsuited": _raise_not_compilable,
            "equal": equal,
            "same": same_value,
            "dispatch": dispatch,
            "index": index_container,
            "few": _few_items,
            "names": _few_names,
        }
        self.functions: list[str] = []
        self.locals = 0

    def name(self, value: Any) -> str:
        chosen = f"k{len(self.names)}"
        self.names[chosen] = value
        return chosen

    def local(self) -> str:
        self.locals += 1
        return f"t{self.locals}"

    def constant(self, node: CelNode) -> Any:
        """The value of a node if it is the same for every device, or NOT_CONSTANT."""
        value = check.constant_value(node, self.checked)
        if value is check.NOT_CONSTANT and isinstance(node, Call) and node.function in _PURE_LITERALS:
            args = tuple(map(self.constant, node.operands))
            if check.NOT_CONSTANT not in args:
                return dispatch(self.checked.overloads[node.id], args)
        return value

    def type_of(self, node: CelNode) -> CelType:
        return self.checked.types[node.id]

    def truth(self, node: CelNode, scope: Scope) -> str:
        """A node as a bool. A value of dynamic type is tested at run time."""
        code = self.value(node, scope)
        if self.type_of(node) == types.BOOL:
            return code
        local = self.local()
        return f"({local} if ({local} := {code}).__class__ is bool else unsuited({local}))"

    def value(self, node: CelNode, scope: Scope) -> str:
        known = self.constant(node)
        if known is not check.NOT_CONSTANT:
            return self.literal(known)
        path = self.path(node, scope)
        if path is not None:
            return self.at_path(path)
        match node:
            case Ident():
                return str(scope[node.name.removeprefix(".")])
            case Select():
                return self.select(node, scope)
            case Call():
                return self.call(node, scope)
            case ListNode() if not node.optional:
                return f"[{', '.join(self.value(item, scope) for item in node.elements)}]"
            case Fold():
                return self.bind(node, scope) if node.is_bind else self.fold(node, scope)
        raise NotCompilable

    def literal(self, value: Any) -> str:
        return repr(value) if type(value) is bool else self.name(value)

    # Paths.

    def path(self, node: CelNode, scope: Scope) -> DevicePath | None:
        """The path that a node is, with names known beforehand, or None if it is no such path."""
        match node:
            case Ident():
                found = scope.get(node.name.removeprefix("."))
                return found if isinstance(found, tuple) else None
            case Select(operand=operand, field=str(key), test_only=False):
                return self.longer_path(operand, key, scope)
            case Call(function="_[_]", args=(operand, Const(value=str(key)))):
                return self.longer_path(operand, key, scope)
        return None

    def longer_path(self, operand: CelNode, key: str, scope: Scope) -> DevicePath | None:
        path = self.path(operand, scope)
        return None if path is None or len(path) > 2 else (*path, key)

    def at_path(self, path: DevicePath) -> str:
        match path:
            case ("driver",):
                return "view.driver"
            case ("allowMultipleAllocations",):
                return "view.allow_multiple_allocations"
            case (kind,):
                return f"{self.fields(kind)}.by_domain"
            case (kind, domain):
                return f"{self.fields(kind)}.by_domain[{domain!r}]"
            case (kind, domain, identifier) if "/" not in domain:
                return f"{self.fields(kind)}[{f'{domain}/{identifier}'!r}]"
        raise NotCompilable

    def fields(self, kind: str) -> str:
        return {"attributes": "a", "capacity": "c"}[kind]

    def domain(self, node: CelNode, scope: Scope) -> tuple[str, str]:
        """The fields and the domain of a path that leads to one domain."""
        match self.path(node, scope):
            case (kind, domain) if "/" not in domain:
                return self.fields(kind), domain
        raise NotCompilable

    def select(self, node: Select, scope: Scope) -> str:
        """A field of a value that is no path, or the presence test of a path."""
        if not node.test_only:
            if types.is_optional(self.type_of(node.operand)):
                raise NotCompilable
            return f"index({self.value(node.operand, scope)}, {node.field!r})"
        fields, domain = self.domain(node.operand, scope)
        return f"{fields}.has({f'{domain}/{node.field}'!r})"

    # Calls.

    def call(self, node: Call, scope: Scope) -> str:
        match node.function, node.operands:
            case "_&&_", (first, second):
                return f"({self.truth(first, scope)} and {self.truth(second, scope)})"
            case "_||_", (first, second):
                return f"({self.truth(first, scope)} or {self.truth(second, scope)})"
            case "!_", (first,):
                return f"(not {self.truth(first, scope)})"
            case "@not_strictly_false", (first,):
                return self.truth(first, scope)
            case "_?_:_", (condition, first, second):
                chosen = f"{self.value(first, scope)} if {self.truth(condition, scope)}"
                return f"({chosen} else {self.value(second, scope)})"
        return self.strict_call(node, scope)

    def strict_call(self, node: Call, scope: Scope) -> str:
        """A call that needs all its arguments."""
        match node.function, node.operands:
            case "_[_]", (first, second) if not types.is_optional(self.type_of(first)):
                return f"index({self.value(first, scope)}, {self.value(second, scope)})"
            case "_==_", (first, second):
                return self.compared(first, second, scope, "==", "equal({}, {})")
            case "_!=_", (first, second):
                return self.compared(first, second, scope, "!=", "(not same({}, {}))")
            case "@in", (first, second):
                return self.membership(node, first, second, scope)
            case "matches", (first, Const(value=str(pattern))):
                search, local = self.name(compiled_pattern(pattern).search), self.local()
                text = f"({local} := {self.value(first, scope)}).__class__ is str"
                return f"({search}({local}) if {text} else unsuited({local}))"
            case (
                "orValue",
                (Call(function="_?._" | "_[?_]", args=(operand, Const(value=str(key)))), other),
            ):
                fields, domain = self.domain(operand, scope)
                # The default is computed even if the value is present. A constant raises no error then.
                if self.constant(other) is check.NOT_CONSTANT:
                    raise NotCompilable
                return f"{fields}.value_or({f'{domain}/{key}'!r}, {self.value(other, scope)})"
            case (("_?._" | "_[?_]" | "or" | "orValue"), _):
                raise NotCompilable
        if node.function in _ORDERS:
            first, second = node.operands
            general = f"dispatch({self.name(self.checked.overloads[node.id])}, ({{}}, {{}}))"
            return self.compared(first, second, scope, _ORDERS[node.function], general)
        return self.dispatched(node, scope)

    def dispatched(self, node: Call, scope: Scope) -> str:
        """A call, by the classes of its arguments if few overloads fit, or else by `dispatch`."""
        overloads = self.checked.overloads[node.id]
        known = [self.constant(arg) for arg in node.operands]
        args, found = [], []
        for arg, value in zip(node.operands, known, strict=True):
            if value is not check.NOT_CONSTANT:
                args.append(self.literal(value))
            else:
                args.append(self.local())
                found.append(f"({args[-1]} := {self.value(arg, scope)})")
        branches = self.direct_calls(overloads, known, args)
        general = f"dispatch({self.name(overloads)}, ({', '.join(args)},))" if args else ""
        code = "".join(f"{call} if {test} else " for call, test in branches) + general
        if not args:
            return f"{self.name(overloads[0].impl)}()"
        # The arguments are computed first, in order. The last part of the tuple is the call.
        return f"({', '.join((*found, code))})[-1]" if found else f"({code})"

    def direct_calls(
        self, overloads: tuple[Overload, ...], known: list[Any], args: list[str]
    ) -> list[tuple[str, str]]:
        """The call and the test of each overload that the constant arguments leave, in order.

        The list ends at the first overload with types that a class does not determine, because the test
        is exact only up to there.
        """
        branches: list[tuple[str, str]] = []
        for overload in overloads:
            if len(overload.params) != len(args):
                continue
            tests = []
            for param, value, arg in zip(overload.params, known, args, strict=True):
                test = self.class_test(param, value, arg)
                if test is None:
                    return branches
                tests.append(test)
            if "False" in tests:
                continue
            if len(branches) == _MAX_OVERLOADS:
                break
            asked = [test for test in tests if test != "True"]
            branches.append((f"{self.name(overload.impl)}({', '.join(args)})", " and ".join(asked) or "True"))
        return branches

    def class_test(self, param: CelType, value: Any, arg: str) -> str | None:
        """The Python test for a parameter's type, or None if the argument's class does not determine it."""
        if param.kind in ("dyn", "any", "param"):
            return "True"
        # The class of a list shows nothing of its items, so the parameter has to take lists of anything.
        if param.kind == "list" and param.params[0].kind not in ("dyn", "any", "param"):
            return None
        classes = _CLASSES.get(param.name, ())
        if value is not check.NOT_CONSTANT:
            return str(type(value) in classes)
        if len(classes) == 1:
            kind = classes[0]
            return f"{arg}.__class__ is {kind.__name__ if kind in (*_COMPARED, list) else self.name(kind)}"
        return f"{arg}.__class__ in {self.name(classes)}"

    def compared(self, first: CelNode, second: CelNode, scope: Scope, operator: str, general: str) -> str:
        """Compare directly if one side is a literal and the other turns out to be of its class."""
        for position, side in enumerate((first, second)):
            known = self.constant(side)
            if type(known) in _COMPARED:
                kind, other = type(known).__name__, self.value((second, first)[position], scope)
                local, literal = self.local(), self.literal(known)
                pair = (literal, local) if position == 0 else (local, literal)
                direct = f"({pair[0]} {operator} {pair[1]})"
                return f"({direct} if ({local} := {other}).__class__ is {kind} else {general.format(*pair)})"
        left, right = self.local(), self.local()
        # Both sides are computed, and then compared directly if both are texts.
        both = (
            f"(({left} := {self.value(first, scope)}).__class__ is str)"
            f" & (({right} := {self.value(second, scope)}).__class__ is str)"
        )
        return f"(({left} {operator} {right}) if {both} else {general.format(left, right)})"

    def membership(self, node: Call, item: CelNode, container: CelNode, scope: Scope) -> str:
        known, key = self.constant(container), self.constant(item)
        local = self.local()
        if known is check.NOT_CONSTANT:
            path = self.path(container, scope)
            if path is None:
                return self.dispatched(node, scope)
            if len(path) == 1 and isinstance(key, str):
                return f"bool({self.fields(path[0])}.identifiers({key!r}))" if "/" not in key else "False"
            fields, domain = self.domain(container, scope)
            if isinstance(key, str):
                return f"{fields}.has({f'{domain}/{key}'!r})"
            prefix = f"{domain}/"
            return (
                f"({fields}.has({prefix!r} + {local}) if ({local} := {self.value(item, scope)}).__class__"
                f" is str else unsuited({local}))"
            )
        kinds = {type(item) for item in known} if isinstance(known, list) else set()
        if len(kinds) != 1 or not kinds <= {str, int}:
            raise NotCompilable
        return (
            f"({local} in {self.name(frozenset(known))} if ({local} := {self.value(item, scope)}).__class__"
            f" is {kinds.pop().__name__} else unsuited({local}))"
        )

    # Bindings and comprehensions.

    def bind(self, node: Fold, scope: Scope) -> str:
        path = self.path(node.accu_init, scope)
        if path is not None:
            return self.value(node.result, {**scope, node.accu_var: path})
        local = self.local()
        start, result = self.value(node.accu_init, scope), {**scope, node.accu_var: local}
        return f"(({local} := {start}), {self.value(node.result, result)})[1]"

    def fold(self, node: Fold, scope: Scope) -> str:
        """A call of a function that is written for the comprehension."""
        items = self.items(node, scope)
        captured = sorted({name for name in scope.values() if isinstance(name, str)})
        accu, first, second = self.local(), self.local(), self.local()
        outer = {**scope, node.accu_var: accu}
        if not isinstance(node.accu_init, ListNode):
            start = self.value(node.accu_init, scope)
        elif node.accu_init.elements:
            raise NotCompilable
        else:
            # Each call makes a new list, because it grows. A constant would be one list for all calls.
            start = "[]"
        inner = {**outer, node.iter_var: first, **({node.iter_var2: second} if node.iter_var2 else {})}
        name = f"f{len(self.functions)}_{accu}"
        parameters = ", ".join(("view", "a", "c", "items", *captured))
        head = f"{first}, {second} in enumerate(items)" if node.iter_var2 else f"{first} in items"
        lines = [f"def {name}({parameters}):", f" {accu} = {start}", f" for {head}:"]
        if self.constant(node.condition) is not True:
            lines.append(f"  if not {self.truth(node.condition, inner)}: break")
        lines += [f"  {line}" for line in self.step(node.step, node, inner)]
        lines.append(f" return {self.value(node.result, outer)}")
        self.functions.append("\n".join((*lines, "")))
        return f"{name}({', '.join(('view', 'a', 'c', items, *captured))})"

    def items(self, node: Fold, scope: Scope) -> str:
        """The range of a comprehension, as a list."""
        known = self.constant(node.iter_range)
        if known is not check.NOT_CONSTANT:
            if type(known) is not list or len(known) > _MAX_ITEMS:
                raise NotCompilable
            return self.literal(known)
        path = self.path(node.iter_range, scope)
        if path is not None and len(path) < 3:
            if node.iter_var2:
                raise NotCompilable
            if len(path) == 1:
                return f"names({self.at_path(path)})"
            fields, domain = self.domain(node.iter_range, scope)
            return f"names({fields}.identifiers({domain!r}))"
        return f"few({self.value(node.iter_range, scope)})"

    def step(self, node: CelNode, fold: Fold, scope: Scope) -> list[str]:
        """Statements that bring the accumulator forward by one item."""
        accu = scope[fold.accu_var]
        match node:
            case Call(function="_?_:_", args=(condition, then, Ident(name=kept))) if kept == fold.accu_var:
                inner = self.step(then, fold, scope)
                return [f"if {self.truth(condition, scope)}:", *(f" {line}" for line in inner)]
            case Call(
                function="_+_", args=(Ident(name=kept), ListNode(elements=(item,), optional=marked))
            ) if kept == fold.accu_var == RESULT and not marked and isinstance(fold.accu_init, ListNode):
                return [f"{accu}.append({self.value(item, scope)})"]
            case Call(function="_+_", args=(Ident(name=kept), Const(value=1))) if (
                kept == fold.accu_var == RESULT and type(self.constant(fold.accu_init)) is int
            ):
                return [f"{accu} += 1"]
        if isinstance(fold.accu_init, ListNode):
            raise NotCompilable
        return [f"{accu} = {self.value(node, scope)}"]


_CLASSES = {
    name: tuple(kind for kind, other in TYPE_NAMES.items() if other == name) for name in TYPE_NAMES.values()
}
"""The classes of values that have each CEL type."""
