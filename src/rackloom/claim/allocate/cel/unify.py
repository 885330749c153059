"""Type assignment with type variables: the rules by which CEL decides that an argument fits a parameter."""

from rackloom.claim.allocate.cel.types import DYN, Type, is_dyn

Bindings = dict[Type, Type]
"""What each type variable stands for so far."""

_NULLABLE = ("opaque", "struct", "any", "timestamp", "duration")


def assignable(bindings: Bindings, given: list[Type], wanted: list[Type]) -> Bindings | None:
    """The bindings after assigning each of `given` to its `wanted`, or None if one does not fit."""
    tried = dict(bindings)
    return tried if _all_fit(tried, given, wanted) else None


def substitute(bindings: Bindings, type_: Type, *, free_to_dyn: bool = False) -> Type:
    """`type_` with bound variables replaced; free ones become dyn if asked."""
    if type_.kind == "param":
        if type_ in bindings:
            return substitute(bindings, bindings[type_], free_to_dyn=free_to_dyn)
        return DYN if free_to_dyn else type_
    if not type_.params:
        return type_
    inner = tuple(substitute(bindings, part, free_to_dyn=free_to_dyn) for part in type_.params)
    return Type(type_.kind, type_.name, inner)


def most_general(one: Type, two: Type) -> Type:
    """The less specific of two types that fit each other."""
    return one if _no_more_specific(one, two) else two


def _all_fit(bindings: Bindings, given: list[Type], wanted: list[Type]) -> bool:
    return len(given) == len(wanted) and all(
        _fits(bindings, one, two) for one, two in zip(given, wanted, strict=True)
    )


def _fits(bindings: Bindings, one: Type, two: Type) -> bool:
    if two.kind == "param":
        valid, bound = _bind(bindings, one, two)
        if valid or bound:
            return valid
    if one.kind == "param":
        return _bind(bindings, two, one)[0]
    if is_dyn(one) or is_dyn(two) or "error" in (one.kind, two.kind):
        return True
    if one.kind == "null" or two.kind == "null":
        other = two if one.kind == "null" else one
        return other.kind == "null" or other.kind in _NULLABLE
    if one.kind == "type":
        return two.kind == "type"
    return (one.kind, one.name) == (two.kind, two.name) and _all_fit(
        bindings, list(one.params), list(two.params)
    )


def _bind(bindings: Bindings, type_: Type, variable: Type) -> tuple[bool, bool]:
    """Whether `variable` can stand for `type_`, and whether it already stood for something."""
    if type_ == variable:
        return True, True
    if variable in bindings:
        current = bindings[variable]
        if type_ == current:
            return True, True
        if not _fits(bindings, type_, current):
            return False, True
        general = most_general(type_, current)
        if not _occurs(bindings, variable, general):
            bindings[variable] = general
        return True, True
    if _occurs(bindings, variable, type_):
        return False, False
    bindings[variable] = type_
    return True, False


def _occurs(bindings: Bindings, variable: Type, within: Type) -> bool:
    if variable == within:
        return True
    if within.kind == "param":
        return within in bindings and _occurs(bindings, variable, bindings[within])
    return any(_occurs(bindings, variable, part) for part in within.params)


def _no_more_specific(one: Type, two: Type) -> bool:
    if is_dyn(one) or one.kind == "param":
        return True
    if is_dyn(two) or two.kind == "param" or (one.kind, one.name) != (two.kind, two.name):
        return False
    if one.kind == "type":
        return True
    return len(one.params) == len(two.params) and all(map(_no_more_specific, one.params, two.params))
