"""Functions as data: each overload is declared by its signature, next to the code that computes it.

The signature `"string.indexOf(string, int) -> int"` is all the checker needs, and its parameter types are
what run-time dispatch looks at.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rackloom.claim.allocate.cel.errors import EvaluationError, no_such_overload
from rackloom.claim.allocate.cel.types import Type, parse_type, split_top
from rackloom.claim.allocate.cel.values import TYPE_NAMES

Impl = Callable[..., Any]
F = TypeVar("F", bound=Impl)


@dataclass(frozen=True, slots=True, eq=False)
class Overload:
    """One form of a function: `params` start with the receiver if `member`."""

    id: str
    function: str
    member: bool
    params: tuple[Type, ...]
    result: Type
    variables: tuple[Type, ...]
    impl: Impl

    def accepts(self, args: tuple[Any, ...]) -> bool:
        """Whether the values have the declared types, as far as that shows at run time."""
        return len(args) == len(self.params) and all(map(_accepts, self.params, args))


class Library:
    """A set of overloads, filled by decorating their implementations."""

    def __init__(self) -> None:
        self.overloads: list[Overload] = []

    def add(self, overload_id: str, signature: str) -> Callable[[F], F]:
        """Declare the decorated function as the overload with this id and signature."""

        def declare(impl: F) -> F:
            self.overloads.append(declared(overload_id, signature, impl))
            return impl

        return declare

    def __iter__(self) -> Iterator[Overload]:
        return iter(self.overloads)


def declared(overload_id: str, signature: str, impl: Impl) -> Overload:
    """An overload from its signature."""
    head, result = signature.rsplit(" -> ", 1)
    path, args = head[:-1].split("(", 1)
    receiver, function = _receiver(path)
    params = tuple(map(parse_type, [*receiver, *split_top(args)]))
    of = parse_type(result)
    variables = tuple(dict.fromkeys(_variables([*params, of])))
    return Overload(overload_id, function, bool(receiver), params, of, variables, impl)


def dispatch(candidates: tuple[Overload, ...], args: tuple[Any, ...]) -> Any:
    """Apply the first candidate that accepts the values."""
    for overload in candidates:
        if overload.accepts(args):
            return overload.impl(*args)
    shown = ", ".join(TYPE_NAMES[type(arg)] for arg in args)
    raise no_such_overload(f"{candidates[0].function}({shown})")


def unavailable(*args: object) -> Any:
    """The implementation of functions whose receiver no selector can obtain."""
    raise no_such_overload()


def as_error(error: ValueError) -> EvaluationError:
    """A value error of a parser as the evaluation error it means here."""
    return EvaluationError(str(error))


def _receiver(path: str) -> tuple[list[str], str]:
    """Split `list<A>.size` into receiver type and name; a plain or namespaced function has no receiver."""
    owner, dot, name = path.rpartition(".")
    if (
        not dot
        or path.startswith("_")
        or owner in ("cel", "optional", "sets", "lists", "strings", "ip", "format")
    ):
        return [], path
    return [owner], name


def _variables(types: Iterable[Type]) -> Iterator[Type]:
    for one in types:
        if one.kind == "param":
            yield one
        yield from _variables(one.params)


def _accepts(wanted: Type, value: Any) -> bool:
    if wanted.kind in ("dyn", "any", "param"):
        return True
    if TYPE_NAMES[type(value)] != wanted.name:
        return False
    if wanted.kind != "list" or not value or any(_variables([wanted])):
        return True
    return _accepts(wanted.params[0], value[0])
