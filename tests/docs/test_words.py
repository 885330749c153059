"""Names in the code: classes are unique, and the words that docs/glossary.md replaced do not return."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "rackloom"
LAYERS = sorted(path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists())
OTHERS = ("tests", "benchmarks", "deploy", "examples")
REPLACED = {
    "desk": "the subject: allocation problem, webhook, placer",
    "echoes": "expectations",
    "lender": "attachment manager",
    "mishaps": "fault injector",
    "one": "the thing's name: gpu, tray, claim, pod",
    "said": "message, reported, text",
    "strangers": "unmanaged GPUs",
    "tell": "render, report",
    "things": "objects, owned objects",
    "told": "message, reported, text",
    "wish": "spec, desired state, request, intent",
    "wishes": "spec, desired state, requests, intents",
    "workbench": "controller runtime",
}
"""Words that were names here, with their replacements."""


def trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        if "_pb2" not in path.name and "migrations" not in path.parts:  # what has run is never edited
            yield path, ast.parse(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_public_classes_have_names_of_their_own_within_a_layer(layer: str) -> None:
    defined = defaultdict(list)
    for path, tree in trees(SOURCES / layer):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(path.relative_to(SOURCES)))
    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}


@pytest.mark.slow
@pytest.mark.parametrize("folder", [*(f"src/rackloom/{layer}" for layer in LAYERS), *OTHERS])
def test_replaced_words_do_not_return_as_names(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: {REPLACED[name.strip('_')]}"
        for path, tree in trees(ROOT / folder)
        for line, name in names(tree)
        if name.strip("_") in REPLACED
    ]
    assert found == []


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names in a module: functions, classes, parameters, variables, methods and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
