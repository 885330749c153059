"""What a selector can read of a device, so that one verdict serves all devices that agree on it."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from rackloom.claim.allocate.cel.check import Checked
from rackloom.claim.allocate.cel.device import DeviceView
from rackloom.claim.allocate.cel.nodes import Call, Const, Fold, Ident, Node, Select, children
from rackloom.claim.allocate.quantity import Quantity
from rackloom.claim.allocate.semver import Semver

Read = tuple[str, str | None, str | None]
"""Kind (`driver`, `allowMultipleAllocations`, `attribute`, `capacity`), domain, identifier; None is any."""

_KINDS = {"attributes": "attribute", "capacity": "capacity"}
_LEAF = 3
"""Steps from the device to one attribute: attributes, domain, identifier."""

Path = tuple[str | None, ...]


def reads_of(checked: Checked) -> frozenset[Read]:
    """Everything that the result can depend on."""
    tracer = _Tracer()
    tracer.use(checked.root)
    return frozenset(read for path in tracer.paths for read in _reads(path))


def _reads(path: Path) -> Iterable[Read]:
    if not path:
        return [read for name in ("driver", "allowMultipleAllocations", *_KINDS) for read in _reads((name,))]
    kind = path[0] or ""
    if kind not in _KINDS:
        return [(kind, None, None)]
    domain, identifier = (*path[1:_LEAF], None, None)[:2]
    return [(_KINDS[kind], domain, identifier)]


class _Tracer:
    """Follows paths that start at the device; what is done with one decides how much of it is read."""

    def __init__(self) -> None:
        self.paths: set[Path] = set()
        self.scopes: list[dict[str, Path | None]] = [{"device": ()}]

    def use(self, node: Node) -> None:
        """The value of `node` matters as a whole."""
        path = self.follow(node)
        if path is not None:
            self.paths.add(path)

    def follow(self, node: Node) -> Path | None:
        """The path that `node` is, unread so far; None for anything else, whose parts are then used."""
        match node:
            case Ident():
                return self.named(node.name.removeprefix("."))
            case Select():
                return self.step(node.operand, node.field)
            case Call(function="_[_]" | "_[?_]" | "_?._", args=(operand, key)):
                return self.keyed(operand, key)
            case Call(function="@in", args=(Const(value=str(key)), container)):
                path = self.step(container, key)
                if path is not None:
                    self.paths.add(path)
                return None
            case Fold() if node.is_bind:
                return self.bound(node)
            case Fold():
                self.folded(node)
                return None
        for child in children(node):
            self.use(child)
        return None

    def named(self, name: str) -> Path | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def keyed(self, operand: Node, key: Node) -> Path | None:
        if isinstance(key, Const):
            return self.step(operand, key.value if isinstance(key.value, str) else None)
        self.use(key)
        return self.step(operand, None)

    def step(self, operand: Node, key: str | None) -> Path | None:
        path = self.follow(operand)
        if path is None:
            return None
        return path if len(path) == _LEAF else (*path, key)

    def bound(self, node: Fold) -> Path | None:
        self.scopes.append({node.accu_var: self.follow(node.accu_init)})
        result = self.follow(node.result)
        self.scopes.pop()
        return result

    def folded(self, node: Fold) -> None:
        self.use(node.iter_range)
        self.use(node.accu_init)
        self.scopes.append({node.accu_var: None, node.iter_var: None, node.iter_var2: None})
        for part in (node.condition, node.step, node.result):
            self.use(part)
        self.scopes.pop()


def key_function(reads: frozenset[Read]) -> Callable[[DeviceView], Hashable]:
    """A function from a device to the values that `reads` names."""
    ordered = sorted(reads, key=str)
    return lambda view: (view.problem, *(_value(view, read) for read in ordered))


def _value(view: DeviceView, read: Read) -> Hashable:
    kind, domain, identifier = read
    if kind not in ("attribute", "capacity"):
        return view.variable.get(kind)
    domains: Mapping[str, Mapping[str, Any]] = view.attributes if kind == "attribute" else view.capacity
    chosen = domains if domain is None else {domain: domains[domain]} if domain in domains else {}
    if domain is not None and identifier is not None:
        values = chosen.get(domain, {})
        return _frozen(values[identifier]) if identifier in values else None
    return tuple(
        (where, name, _frozen(value))
        for where in sorted(chosen)
        for name, value in sorted(chosen[where].items())
        if identifier in (None, name)
    )


def _frozen(value: Any) -> Hashable:
    """A hashable stand-in that tells types apart, as Python's 1 and True would not."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, Quantity):
        return value.unscaled, value.scale, value.format, value.unbounded
    if isinstance(value, Semver):
        return type(value), str(value)
    return type(value), value
