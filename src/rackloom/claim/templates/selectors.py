"""A selector that picks out given devices: what they have in common and others lack, else their names.

Every attribute is read through `.?` with a default, so that a device of another machine that lacks it is left
out and not an error, which would stop the pod on every node.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rackloom.claim.allocate import cel
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.templates.published import RDMA, Scalar, value_of


@dataclass(frozen=True, slots=True)
class Told:
    """How a set of devices is told from the others."""

    expression: str | None
    """None: all devices of the class will do."""
    by: tuple[str, ...]
    """The attributes that it reads."""


def told_by_traits(
    wanted: Sequence[Candidate], among: Sequence[Candidate], traits: Sequence[str]
) -> Told | None:
    """The fewest of `traits` that `wanted` share and that select just them; RDMA is kept in any case."""
    shared = {name: value for name in traits if (value := _shared(wanted, name)) is not None}
    if not _exact(shared, wanted, among):
        return None
    for name in reversed(list(shared)):
        rest = {one: value for one, value in shared.items() if one != name}
        if shared.get(RDMA) is True and name == RDMA:
            continue
        shared = rest if _exact(rest, wanted, among) else shared
    tests = [_equals(name, value) for name, value in shared.items()]
    return Told(" && ".join(tests) or None, tuple(shared))


def told_by_names(
    wanted: Sequence[Candidate], among: Sequence[Candidate], names: Sequence[str]
) -> Told | None:
    """A list of the values of the first of `names` that all of `wanted` publish and no others share."""
    for name in names:
        values = [value_of(one, name) for one in wanted]
        if not all(isinstance(value, str) for value in values):
            continue
        one_of = f"== {json.dumps(values[0])}" if len(values) == 1 else f"in {json.dumps(values)}"
        expression = f'{_read(name)}.orValue("") {one_of}'
        if _selects(expression, wanted, among):
            return Told(expression, (name,))
    return None


def _shared(devices: Sequence[Candidate], name: str) -> Scalar | None:
    values = {(type(value), value) for value in (value_of(one, name) for one in devices)}
    return values.pop()[1] if len(values) == 1 else None


def _exact(traits: dict[str, Scalar], wanted: Sequence[Candidate], among: Sequence[Candidate]) -> bool:
    expression = " && ".join(_equals(name, value) for name, value in traits.items())
    return _selects(expression or "true", wanted, among)


def _selects(expression: str, wanted: Sequence[Candidate], among: Sequence[Candidate]) -> bool:
    program = cel.compile(expression)
    return {one.id for one in among if program.matches(one.view)} == {one.id for one in wanted}


def _equals(name: str, value: Scalar) -> str:
    """`value` is compared with what the attribute is, or with a default of its type that it never is."""
    absent = {bool: "false", int: "-1", str: '""'}[type(value)]
    return f"{_read(name)}.orValue({absent}) == {json.dumps(value)}"


def _read(name: str) -> str:
    domain, _, identifier = name.partition("/")
    return f'device.attributes["{domain}"].?{identifier}'
