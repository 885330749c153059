"""The conditions and their reasons, read from the calls that make them.

Where a reason is not written in the call itself, it is looked for where it comes from: a function whose
result is passed on, a constant, or the names of the same function. A reason that cannot be found is an error,
so the page cannot silently lack it.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from docs.site.reference.markdown import code, made_from, table
from docs.site.reference.source_trees import SOURCE, calls, constant

_REASON = re.compile(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*")
STATUSES = ("True", "False", "Unknown")


@dataclass(frozen=True)
class Subject:
    """An object with conditions: who makes them where."""

    kind: str
    about: str
    module: str
    maker: str


SUBJECTS = (
    Subject(
        "ComputeDomain",
        "[compute-domains.md](../docs/compute-domains.md#the-status)",
        "core.domains.conditions",
        "_new_condition",
    ),
    Subject("GangPlan", "[gangs.md](../docs/gangs.md)", "core.gangs.reconcile", "gang_condition"),
)


@dataclass(frozen=True)
class Reason:
    """That a condition of an object may have this status for this reason."""

    type: str
    status: str
    reason: str


def page() -> str:
    """Every condition with its statuses and reasons; each is also an Event where it begins."""
    parts = [
        "# Conditions and reasons",
        made_from("the code that sets them"),
        "A status is `True`, `False` or `Unknown`; a missing answer is never taken for a good one. The "
        "message of a condition names what it is about and what helps. Where the status depends on more than "
        "the reason, each that the code may set is listed.",
    ]
    for subject in SUBJECTS:
        found = sorted(set(reasons(subject)), key=lambda r: (r.type, STATUSES.index(r.status), r.reason))
        rows = [(code(r.type), code(r.status), code(r.reason)) for r in found]
        parts += [
            f"## {subject.kind}",
            f"What each means: {subject.about}.",
            table(("condition", "status", "reason"), rows),
        ]
    lease = [(code(status), code(reason)) for status, reason in lease_reasons()]
    parts += [
        "## Address of a NIC by DHCP",
        "On the device in the status of its ResourceClaim, and as an Event on the pod: "
        "[nics.md](../docs/nics.md).",
        table(("holds", "reason"), lease),
    ]
    return "\n\n".join(parts) + "\n"


def reasons(subject: Subject) -> Iterator[Reason]:
    """Every combination that the code of a subject may set. ValueError where a reason is not found."""
    module = importlib.import_module(f"rackloom.{subject.module}")
    tree = ast.parse((SOURCE / f"{subject.module.replace('.', '/')}.py").read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for function in functions.values():
        if function.name == subject.maker:
            continue
        for name, call in calls(function):
            if name == subject.maker:
                yield from _Call(module, functions, function, call).reasons()


@dataclass(frozen=True)
class _Call:
    """A call that makes a condition, and where to look for what it passes on."""

    module: ModuleType
    functions: dict[str, ast.FunctionDef]
    function: ast.FunctionDef
    call: ast.Call

    def reasons(self) -> Iterator[Reason]:
        first, *others = self.call.args
        types = self._types(first)
        for statuses, reasons in self._statuses_and_reasons(others):
            if not statuses or not reasons:
                raise ValueError(f"{self.module.__name__}:{self.call.lineno}: a reason cannot be read")
            yield from (Reason(type_, s, r) for type_ in types for s in statuses for r in reasons)

    def _types(self, node: ast.expr) -> list[str]:
        """The type of a condition: a constant of the module, or the names that a loop goes through."""
        value = self._value(node)
        if isinstance(value, str):
            return [value]
        loops = (
            part.iter for part in ast.walk(self.function) if isinstance(part, ast.For | ast.comprehension)
        )
        names = [item for loop in loops if isinstance(loop, ast.Tuple) for item in loop.elts]
        return [found for item in names if isinstance(found := self._value(item), str)]

    def _value(self, node: ast.expr) -> object:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return getattr(self.module, name, None)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return getattr(getattr(self.module, owner, None), name, None)
        return None

    def _statuses_and_reasons(self, arguments: list[ast.expr]) -> Iterator[tuple[list[str], list[str]]]:
        first, *others = arguments
        if isinstance(first, ast.Starred):  # a constant of status and reason
            status, reason = self._value(first.value)  # type: ignore[misc]
            yield [status], [reason]
            return
        statuses = self._texts(first, STATUSES)
        if not statuses:  # status, reason and message come from one function
            for answer in self._answers(first):
                yield [answer[0]], [answer[1]]
            return
        yield statuses, self._reasons(others[0])

    def _texts(self, node: ast.expr, among: tuple[str, ...]) -> list[str]:
        found = (constant(part) for part in ast.walk(node))
        return [text for text in found if text in among]

    def _reasons(self, node: ast.expr) -> list[str]:
        if text := constant(node):
            return [text]
        if isinstance(node, ast.Attribute):  # the reason of a problem: every problem that is made here
            return [text for _, call in self._made("DomainProblem") if (text := constant(call.args[0]))]
        if isinstance(node, ast.Starred) and (answers := self._answers(node.value)):
            return [answer[0] for answer in answers]
        texts = (constant(part) for part in ast.walk(self.function))
        return [text for text in texts if text and _REASON.fullmatch(text) and text not in STATUSES]

    def _made(self, name: str) -> Iterator[tuple[str, ast.Call]]:
        for function in self.functions.values():
            yield from (found for found in calls(function) if found[0] == name)

    def _answers(self, node: ast.expr) -> list[list[str]]:
        """The leading constants of what a function here returns; of a name, of what it was set to."""
        if isinstance(node, ast.Name):
            for part in ast.walk(self.function):
                if isinstance(part, ast.Assign) and node.id in _targets(part):
                    return self._answers(part.value)
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions
        ):
            return []
        returned = (
            part.value for part in ast.walk(self.functions[node.func.id]) if isinstance(part, ast.Return)
        )
        tuples = (value for value in returned if isinstance(value, ast.Tuple))
        return [[text for item in value.elts if (text := constant(item))] for value in tuples]


def _targets(node: ast.Assign) -> set[str]:
    return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def lease_reasons() -> list[tuple[str, str]]:
    """The reasons for the lease of an address, from the function that makes them."""
    tree = ast.parse((SOURCE / "claim" / "node" / "nic" / "status.py").read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            status, reason = map(constant, node.value.elts)
            if status in STATUSES and reason:
                found.append((status, reason))
    if not found:
        raise ValueError("claim/node/nic/status.py: no reason of a lease can be read")
    return found
