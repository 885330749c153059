"""The parsed modules of the package, for pages that are read from the code without running it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import rackloom

SOURCE = Path(rackloom.__file__).parent


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """Each module by its path below the package, parsed. Generated code and migrations are left out."""
    return tuple(
        (str(path.relative_to(SOURCE)), ast.parse(path.read_text()))
        for path in sorted(SOURCE.rglob("*.py"))
        if "_pb2" not in path.name and "migrations" not in path.parts
    )


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a tree, with the last part of the name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                yield function.id, node
            elif isinstance(function, ast.Attribute):
                yield function.attr, node


def constant(node: ast.AST | None) -> str | None:
    """The text of a constant; None for anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
