"""Figures of this tree that only fall, and their ceilings. `make lint` runs this module.

    python -m tools.ratchets                exits with 1 if a figure exceeds its ceiling or is far below it
    python -m tools.ratchets --lower        lowers the ceilings to the figures (`make ceilings`)
    python -m tools.ratchets --show NAME    the lines that count: of `kubernetes_modules`, or of a pattern

`ceilings.toml` keeps one ceiling for each figure. A change that lowers a figure also lowers the ceiling, so
that the next change cannot spend the gain. This module never raises a ceiling. If more is needed, edit the
file, and a reviewer sees it. A figure may stay a little below its ceiling (`slack`). Otherwise every change
would edit the same lines of the file, and any two changes would conflict.

The figures:

- `code_lines`: lines of `src` that carry code. Blank lines, comments, docstrings and the modules that protoc
  writes do not count. Every string that is a whole statement is a docstring.
- `docs_words`: words of the pages below `docs`, as `wc -w` counts them.
- `kubernetes_modules`: modules that look into Kubernetes objects by key, outside the packages that read them.
- `files_read`: files that a reader opens to follow one story (`benchmarks/files_read.py`).
- `prose`: habits of grammar that make text hard to read, per 10,000 words of comments, docstrings and pages.
  Their ceilings fall to the rates of `GUIDE`.
- `test_cpu_seconds`: `make test` measures it (`tools/cpu_seconds.py`), not this module.

Files that git ignores do not count. A regular expression finds comments and strings, which takes a third of
the time of `tokenize`. The syntax tree shows which strings are docstrings.
"""

import argparse
import ast
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import files_read

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = ROOT / "ceilings.toml"
PACKAGE = "src/rackloom/"

Key = tuple[str, ...]
"""The place of a figure in the file, such as `("prose", "src", "semicolon")`."""
MEASURED_ELSEWHERE = frozenset({("test_cpu_seconds",)})

# Each tree of prose has its own rates: tests are far from pages.
TREES = {"src": ("src",), "pages": ("docs", "README.md", "deploy"), "tests": ("tests",)}
PROTOC = re.compile(r"_pb2(_grpc)?\.py$")
GENERATED_CLIENT = (f"{PACKAGE}client/models.py", f"{PACKAGE}client/operations.py")

# These read Kubernetes objects, or stand in for a server of them. All other modules should take their values.
OBJECT_READERS = tuple(
    PACKAGE + name for name in ("core/cluster/", "claim/kube/", "claim/node/requests", "lab/")
)
# No Kubernetes object gets here: an import contract keeps both off `core.cluster`. Their JSON is REST, ASGI
# messages and the output of tools, and has the same names for other fields.
OTHER_JSON = tuple(PACKAGE + name for name in ("carve/", "core/transfer/"))
OBJECT_FIELDS = frozenset(
    {
        *("metadata", "spec", "status", "allocatable", "nodeName", "containers"),
        *("ownerReferences", "managedFields", "finalizers", "resourceVersion", "creationTimestamp"),
        *("deletionTimestamp", "conditions", "allocation", "reservedFor", "schedulingGates"),
        *("resourceClaims", "podSets", "topologyRequest", "webhooks", "clientConfig"),
    }
)
LOOKUPS = frozenset({"get", "pop", "setdefault"})
BY_PATH = frozenset({"value_at", "itemgetter"})
"""Functions that look up the constants in their arguments."""

PATTERNS = {
    # A clause without a noun as the subject. Questions may start like this.
    "what or who at the start": r"(?:^|(?<=[.!?:] ))(?:What(?:ever)?|Who(?:ever|se)?)\b(?![^.?!\n]*\?)",
    "what or who as a noun": r"(?<=[a-z,;] )(?:what(?:ever)?|who(?:ever|se|m))\b",
    "fragment after a semicolon": r";[ \t]+(?:(?:an )?empty|None|else|nothing|those|what|where|whoever)\b",
    # Only a place takes this word.
    "where for if": r"(?:\b(?:and|but|else|False|None|only|or|than|there|True) |[,;] )where\b|^Where\b",
    "nobody": r"\b(?:any|every|no|some)body\b",
    "of its own": r"\b(?:by (?:itself|themselves)|of (?:(?:his|its|their) own|others|ours))\b",
    "anew": r"\b(?:anew|hence(?:forth)?|meanwhile|once more|there(?:by|of))\b",
    "ask": r"\bask(?:ed|ing|s)?\b",
    "say or tell": r"\b(?:sa(?:id|ys)|tells?|told)\b",
    "so many": r"\bso (?:few|many|much)\b",
    "semicolon": r";",
}
COMPILED = {name: re.compile(pattern, re.MULTILINE) for name, pattern in PATTERNS.items()}
GUIDE = {
    "what or who at the start": 3.0,
    "what or who as a noun": 18.0,
    "fragment after a semicolon": 1.0,
    "where for if": 4.0,
    "nobody": 0.5,
    "of its own": 1.0,
    "anew": 1.5,
    "ask": 4.0,
    "say or tell": 5.0,
    "so many": 1.0,
    "semicolon": 35.0,
}
"""Rates of well-written projects of the field. A ceiling falls to this rate, in tests to twice of it."""


class Line(msgspec.Struct, frozen=True):
    """One line of a file."""

    path: str
    number: int
    text: str


class Scan(msgspec.Struct):
    """All that the figures need of the files."""

    prose: dict[str, list[Line]]
    """The comments, docstrings and pages of each tree."""
    object_lookups: list[Line]
    code_lines: int = 0
    docs_words: int = 0


class Module(msgspec.Struct, frozen=True):
    """All that the figures need of one Python module."""

    code_lines: int
    prose: list[tuple[int, str]]
    """Comments and docstrings by line number."""


# A comment or a string, whichever starts first: a hash in a string starts no comment, and a quote in a
# comment starts no string.
COMMENT_OR_STRING = re.compile(
    r'''\#[^\n]*
    | """(?:[^"\\]|\\.|"(?!""))*""" | \'\'\'(?:[^'\\]|\\.|'(?!\'\'))*\'\'\'
    | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*\'''',
    re.DOTALL | re.VERBOSE,
)


def read_module(text: str) -> Module:
    """Reads one Python module."""
    # Comments go, and each line of a string becomes a word: the lines that are not blank then carry code.
    comments: list[tuple[int, str]] = []
    line, place = 1, 0

    def replace(found: re.Match[str]) -> str:
        nonlocal line, place
        line, place = line + text.count("\n", place, found.start()), found.start()
        if not found[0].startswith("#"):
            return "\n".join("x" * (found[0].count("\n") + 1))
        comments.append((line, found[0].lstrip("# ")))
        return ""

    code = COMMENT_OR_STRING.sub(replace, text).split("\n")
    code_lines = {number for number, content in enumerate(code, 1) if content.strip()}

    docstrings: list[tuple[int, str]] = []
    for node in statements(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring)), lineno=first, end_lineno=last):
                code_lines.difference_update(range(first, (last or first) + 1))
                docstrings += enumerate(docstring.splitlines(), first)
    return Module(len(code_lines), docstrings + comments)


def object_lookups(text: str) -> list[int]:
    """The lines of a module that look into Kubernetes objects."""
    # The walk through all expressions is slow, so modules that quote no field skip it.
    if not re.search(rf"""["'](?:{"|".join(OBJECT_FIELDS)})["']""", text):
        return []
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr | ast.pattern))
    return sorted({node.lineno for node in nodes if not OBJECT_FIELDS.isdisjoint(looked_up(node))})


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements of a module, without their expressions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, block, ())


def looked_up(node: ast.expr | ast.pattern) -> Iterator[object]:
    """The constant keys of a lookup in a mapping, in one of the forms that Python has for it."""
    keys: Sequence[ast.expr] = ()
    match node:
        case ast.Subscript():
            keys = [node.slice]
        case ast.Call(func=ast.Attribute(attr=name)) if name in LOOKUPS:
            keys = node.args[:1]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in BY_PATH:
            parts = (part for argument in node.args for part in ast.walk(argument))
            keys = [part for part in parts if isinstance(part, ast.expr)]
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            keys = [node.left]
        case ast.MatchMapping():
            keys = node.keys
    return (key.value for key in keys if isinstance(key, ast.Constant))


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page, without blocks of code. A span of code counts as one word."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`|\|", " x ", line)


def scan() -> Scan:
    """Reads every file of the trees once."""
    found = Scan(prose={}, object_lookups=[])
    for tree, paths in TREES.items():
        prose = found.prose[tree] = []
        for path in tracked_files(*paths):
            text = (ROOT / path).read_text() if path.endswith((".md", ".py")) else ""
            if path.endswith(".md"):
                prose += (Line(path, *numbered) for numbered in markdown_prose(text))
                found.docs_words += len(text.split()) if path.startswith("docs/") else 0
            elif path.endswith(".py") and not PROTOC.search(path):
                module = read_module(text)
                if path not in GENERATED_CLIENT:
                    prose += (Line(path, *numbered) for numbered in module.prose)
                if tree == "src":
                    found.code_lines += module.code_lines
                    if not path.startswith(OBJECT_READERS + OTHER_JSON):
                        lines = text.split("\n")
                        found.object_lookups += (Line(path, at, lines[at - 1]) for at in object_lookups(text))
    return found


def tracked_files(*paths: str) -> list[str]:
    """Files that git tracks, or would track after `git add`: a new file counts before its commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        sys.exit(f"The figures need a git checkout. git ls-files failed: {listing.stderr.strip()}")
    names = sorted({name for name in listing.stdout.split("\0") if name})
    return [name for name in names if (ROOT / name).is_file()]


def rates(prose: list[Line]) -> dict[str, float]:
    """Matches of each pattern per 10,000 words, rounded up to a tenth: one more match rarely moves it."""
    text = "\n".join(line.text for line in prose)
    words = len(text.split()) or 1
    return {name: math.ceil(1e5 * len(found.findall(text)) / words) / 10 for name, found in COMPILED.items()}


def measure(ceilings: Mapping[Key, float]) -> dict[Key, float]:
    """The figures of the present tree. The stories of `files_read` take half of the time."""
    found = scan()
    figures: dict[Key, float] = {
        ("code_lines",): found.code_lines,
        ("docs_words",): found.docs_words,
        ("kubernetes_modules",): len({line.path for line in found.object_lookups}),
    }
    for story in files_read.STORIES:
        key = ("files_read", story.title)
        figures[key] = len(files_read.files_of(story, enough=int(ceilings.get(key, 0))))
    for tree, prose in found.prose.items():
        figures |= {("prose", tree, name): rate for name, rate in rates(prose).items()}
    return figures


def read_ceilings(text: str) -> dict[Key, float]:
    """The ceilings of the file by their keys."""

    def leaves(value: Any, key: Key) -> Iterator[tuple[Key, float]]:
        if isinstance(value, dict):
            for name in value:
                yield from leaves(value[name], (*key, name))
        else:
            yield key, value

    return dict(leaves(tomllib.loads(text), ()))


def slack(key: Key, ceiling: float) -> float:
    """How far below its ceiling a figure may stay. A rate also moves with words that match no pattern."""
    return max(0.2, 0.02 * ceiling) if key[0] == "prose" else math.floor(0.005 * ceiling)


def floor(key: Key) -> float:
    """The ceiling from which a figure need not fall."""
    return GUIDE[key[2]] * (2 if key[1] == "tests" else 1) if key[0] == "prose" else 0.0


def complaints(ceilings: Mapping[Key, float], figures: Mapping[Key, float]) -> list[str]:
    """One line for each figure that does not fit its ceiling, with the remedy."""
    found: list[str] = []
    for key in sorted(figures.keys() | ceilings.keys() - MEASURED_ELSEWHERE):
        name, figure, ceiling = " / ".join(key), figures.get(key), ceilings.get(key)
        if figure is None:
            found.append(f"{name} is not a figure: remove its line from ceilings.toml")
        elif ceiling is None:
            found.append(f"{name} is {figure:,} and has no ceiling: add a line to ceilings.toml")
        elif figure > ceiling:
            show = key[0] in ("prose", "kubernetes_modules")
            remedy = f': find them with `python -m tools.ratchets --show "{key[-1]}"`' if show else ""
            found.append(f"{name} is {figure:,}, above its ceiling of {ceiling:,}{remedy}")
        elif figure < ceiling - slack(key, ceiling) and ceiling > floor(key):
            found.append(f"{name} fell to {figure:,}: lower its ceiling of {ceiling:,} with `make ceilings`")
    return found


CEILING_LINE = re.compile(r'^(?P<name>"[^"]+"|[\w-]+)(?P<equals> = )(?P<value>[\d_.]+)', re.MULTILINE)


def lowered(text: str, figures: Mapping[Key, float]) -> str:
    """The file with the ceilings of these figures, if lower. Comments and the order of lines stay."""
    section: Key = ()
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith("["):
            section = tuple(line[1 : line.index("]")].split("."))
        elif assigned := CEILING_LINE.match(line):
            key = (*section, assigned["name"].strip('"'))
            figure = max(figures[key], floor(key)) if key in figures else math.inf
            if figure < float(assigned["value"]):
                value = f"{figure:_}" if isinstance(figure, int) else f"{figure}"
                line = line[: assigned.start("value")] + value + line[assigned.end("value") :]
        lines.append(line)
    return "\n".join(lines)


def show(name: str) -> None:
    """Prints the lines that a figure counts."""
    found = scan()
    if name == "kubernetes_modules":
        lines = found.object_lookups
    elif name in COMPILED:
        every = (line for prose in found.prose.values() for line in prose)
        lines = [line for line in every if COMPILED[name].search(line.text)]
    else:
        sys.exit(f"--show {name}: no such figure. It is kubernetes_modules or one of: {', '.join(COMPILED)}")
    for line in lines:
        print(f"{line.path}:{line.number}: {line.text.strip()}")


def main() -> None:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the figures")
    parser.add_argument("--show", metavar="NAME", help="print the lines that a figure counts")
    words = parser.parse_args()
    if words.show:
        show(words.show)
        return
    figures = measure(read_ceilings(CEILINGS.read_text()))
    if words.lower:
        CEILINGS.write_text(lowered(CEILINGS.read_text(), figures))
    ceilings = read_ceilings(CEILINGS.read_text())
    goals: dict[Key, float] = {("files_read", story.title): story.goal for story in files_read.STORIES}
    for key, figure in figures.items():
        if key[0] != "prose":
            goal = f", goal {goals[key]}: MISSED" if figure > goals.get(key, math.inf) else ""
            print(f"{' / '.join(key)}: {figure:,} (ceiling {ceilings.get(key, 0):,}{goal})")
    if found := complaints(ceilings, figures):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
