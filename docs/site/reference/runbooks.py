"""The runbooks, a page for each check: its texts (core/diagnosis/runbooks.toml), and its possible results.

Messages and commands are read from the calls that make the findings, in the checks. Values that are put into
them are written in capitals. A text that another function makes is looked for there.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from docs.site.reference.markdown import cell, code, made_from, table
from docs.site.reference.source_trees import calls, constant, modules

from rackloom.core.diagnosis.catalogue import HOST_CHECKS, Check, runbook_name
from rackloom.core.diagnosis.repair_steps import is_known, repair_steps
from rackloom.core.diagnosis.runbooks import Runbook, runbooks

_MAKERS = {"fails": (2, 3), "unknown": (2, 3)}
"""Functions that make a finding, with the positions of its message and its fix."""
_DEEPEST = 4
"""How many functions deep a text is looked for."""


def page() -> str:
    """The list of all runbooks; the pages themselves are in the navigation."""
    rows = [
        (
            f"[{cell(book.check)}](runbooks/{book.name}.md)",
            cell(book.title),
            "host" if book.check in HOST_CHECKS else "site",
        )
        for book in runbooks().values()
    ]
    listed = "\n".join(f"runbooks/{name}" for name in runbooks())
    return "\n\n".join(
        [
            "# Runbooks",
            made_from("the texts of the findings"),
            "One page for each check of [the doctor](../docs/doctor.md). A finding names its runbook; "
            "`rackloom doctor --runbook NAME` prints it, and the [rack map](../docs/map.md) links to it.",
            table(("check", "title of its finding", "examines"), rows),
            f"```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{listed}\n```",
        ]
    )


def pages() -> dict[str, str]:
    """The page of each runbook, by its name."""
    return {name: _page(book) for name, book in runbooks().items()}


def _page(book: Runbook) -> str:
    reported = messages(book.check)
    steps = {
        step.command: step
        for fix in commands(book.check)
        for step in repair_steps(fix)
        if is_known(step.command)
    }
    parts = [
        f"# {book.check}",
        made_from("the texts of the findings"),
        f"A finding of this check begins: *{book.title}.*",
        f"## What it means\n\n{book.means}",
        f"## See for yourself\n\n{book.look}",
        f"## Mend it\n\n{book.mend}",
    ]
    if steps:
        rows = [(code(step.command), step.effect.value, cell(step.does)) for step in steps.values()]
        parts += [
            "The finding has its commands with the names of the place. Among them:",
            table(("command", "effect", "what it does"), rows),
        ]
    if reported:
        parts += ["## What the finding may say\n\n" + "\n".join(f"- {text}" for text in reported)]
    for head, checks in (("May come from", book.causes), ("May bring with it", book.consequences)):
        if checks:
            parts.append(
                f"## {head}\n\n" + "\n".join(f"- [{check}]({runbook_name(check)}.md)" for check in checks)
            )
    return "\n\n".join(parts) + "\n"


def messages(check: Check) -> tuple[str, ...]:
    """The messages of a check's findings, with words in capitals in place of names."""
    return tuple(text for text in _texts_of(check, 0) if re.search("[a-z]{2}", text))


def commands(check: Check) -> tuple[str, ...]:
    """Fixes of a check, in the same way."""
    return _texts_of(check, 1)


def _texts_of(check: Check, which: int) -> tuple[str, ...]:
    """Messages (0) or fixes (1) in the order in which the code has them, each once."""
    found = (
        text
        for functions, name, call in _findings()
        if _names_check(call, check) and len(call.args) > _MAKERS[name][which]
        for text in _texts(call.args[_MAKERS[name][which]], functions)
    )
    return tuple(dict.fromkeys(found))


def _names_check(call: ast.Call, check: Check) -> bool:
    return (
        any(isinstance(part, ast.Attribute) and part.attr == check.name for part in ast.walk(call.args[0]))
        if call.args
        else False
    )


_Functions = dict[str, ast.FunctionDef]


@cache
def _findings() -> tuple[tuple[_Functions, str, ast.Call], ...]:
    """Every call that makes a finding, with the functions of its module."""
    found: list[tuple[_Functions, str, ast.Call]] = []
    for path, tree in modules():
        if path.startswith("core/diagnosis/checks/"):
            functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            found += [(functions, name, call) for name, call in calls(tree) if name in _MAKERS]
    return tuple(found)


def _texts(node: ast.expr, functions: _Functions, depth: int = 0) -> Iterator[str]:
    """The texts that an expression may be, as far as the code shows it."""
    if (text := constant(node)) is not None:
        yield text
    elif isinstance(node, ast.JoinedStr):
        yield "".join(constant(part) or _placeholder(part) for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, functions, depth)
        yield from _texts(node.orelse, functions, depth)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and depth < _DEEPEST:
        function = functions.get(node.func.id)
        for part in () if function is None else ast.walk(function):
            if isinstance(part, ast.Return) and part.value is not None:
                yield from _texts(part.value, functions, depth + 1)


def _placeholder(part: ast.expr) -> str:
    """The name of what is put into a text, in capitals: NODE of `{quote(node)}`."""
    names = [
        n.attr if isinstance(n, ast.Attribute) else n.id
        for n in ast.walk(part)
        if isinstance(n, ast.Attribute | ast.Name)
    ]
    names = [name for name in names if name not in ("quote", "len", "first_few", "join", "sorted", "str")]
    return names[0].strip("_").upper() if names else "…"
