"""The ceilings of ceilings.toml: the way figures are counted, and the differences that fail."""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

from rackloom import core
from tools import ratchets

SAMPLE = '''"""A head
of two lines."""

import os  # trailing

# alone
TEXT = """# no comment

in a string"""
NAME = "a # in quotes"  # but this is one


class A:
    # Before the docstring.
    field: int
    """Of the field."""

    def f(self):
        """One line."""
        return f"{self.field}#" if 'it"s' else (
            1,  # one

            2,
        )
'''
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def tokenised(text: str) -> tuple[int, list[str]]:
    """The code lines and comments of a module, by Python's tokenizer."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code: set[int] = set()
    for token in tokens:
        if token.type not in LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                code -= set(range(node.lineno, node.end_lineno + 1))
    return len(code), [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]


def test_code_lines_and_prose_of_a_module():
    module = ratchets.read_module(SAMPLE)
    assert module.code_lines == 1 + 3 + 1 + 1 + 1 + 1 + 4
    assert sorted(module.prose) == [
        (1, "A head"),
        (2, "of two lines."),
        (4, "trailing"),
        (6, "alone"),
        (10, "but this is one"),
        (14, "Before the docstring."),
        (16, "Of the field."),
        (19, "One line."),
        (21, "one"),
    ]


def test_the_fast_scan_agrees_with_the_tokenizer():
    modules = [Path(ratchets.__file__), Path(__file__), *Path(core.__file__).parent.glob("partitions/*.py")]
    for text in (SAMPLE, *(path.read_text() for path in modules)):
        module = ratchets.read_module(text)
        code_lines, comments = tokenised(text)
        assert module.code_lines == code_lines
        assert [found for _, found in module.prose][len(module.prose) - len(comments) :] == comments


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ('x = pod["metadata"]["name"]', True),
        ('x = pod.get("spec", {})', True),
        ('x = node.get("allocatable")', True),
        ('pod["status"] = {}', True),
        ('pod.setdefault("metadata", {})', True),
        ('x = pod["metadata" if a else b]', False),
        ('x = value_at(pod, ("spec", "priority"))', True),
        ('x = operator.itemgetter("status")(pod)', True),
        ('x = "deletionTimestamp" in meta', True),
        ('x = status.get("conditions")', True),
        ("x = value_at(pod, path)", False),
        ("x = pod.metadata.name", False),
        ('x = {"metadata": {"name": "a"}}', False),
        ('x = pod["kind"]', False),
        ('x = read("spec")', False),
        ('# pod["metadata"]', False),
    ],
)
def test_lookups_in_objects(line, counts):
    assert ratchets.object_lookups(line) == ([1] if counts else [])


def test_a_pattern_looks_into_an_object():
    text = 'match pod:\n    case {"spec": {"nodeName": name}}:\n        pass\n'
    assert ratchets.object_lookups(text) == [2]


def test_lookups_count_where_kubernetes_objects_may_be(tmp_path, monkeypatch):
    for place in (
        "core/cluster/pods.py",
        "carve/api/rest.py",
        "core/transfer/records.py",
        "core/place/plan.py",
    ):
        path = tmp_path / "src/rackloom" / place
        path.parent.mkdir(parents=True)
        path.write_text('x = found["status"]\n')
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(ratchets, "ROOT", tmp_path)
    assert [line.path for line in ratchets.scan().object_lookups] == ["src/rackloom/core/place/plan.py"]


def test_an_import_contract_holds_for_each_exception():
    contracts = tomllib.loads((ratchets.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = (each for each in contracts if each.get("forbidden_modules") == ["rackloom.core.cluster"])
    packages = [name.removeprefix("src/").rstrip("/").replace("/", ".") for name in ratchets.OTHER_JSON]
    assert contract["source_modules"] == packages


@pytest.mark.parametrize(
    ("name", "poor", "good"),
    [
        ("what or who at the start", "What a node holds.", "What holds the lock? The devices of a node."),
        ("what or who as a noun", "reads what the node holds", "reads the devices of the node"),
        ("fragment after a semicolon", "The node; None without one.", "The node, or None."),
        ("where for if", "the node, where there is one", "the rack where the node stands"),
        ("nobody", "nobody owns it", "it has no owner"),
        ("of its own", "each has a lock of its own", "each has its own lock"),
        ("anew", "the list is read once more", "the list is read again"),
        ("ask", "asks the server", "calls the server"),
        ("say or tell", "the log says why", "the log shows why"),
        ("so many", "so many seconds", "this number of seconds"),
        ("semicolon", "It waits; it reads.", "It waits. It reads."),
    ],
)
def test_each_pattern_finds_its_habit(name, poor, good):
    assert ratchets.COMPILED[name].search(poor)
    assert not ratchets.COMPILED[name].search(good)


def test_a_rate_is_per_ten_thousand_words_and_rounded_up():
    lines = [ratchets.Line("a.md", 1, "one two three; four"), ratchets.Line("a.md", 2, "five six seven")]
    assert ratchets.rates(lines)["semicolon"] == 1428.6  # 10,000 / 7 is 1428.57
    assert ratchets.rates([])["semicolon"] == 0


def test_pages_count_without_code():
    page = "Text `a; b` | cell\n```sh\necho; echo\n```\n    indented;\nend"
    assert list(ratchets.markdown_prose(page)) == [(1, "Text  x   x  cell"), (6, "end")]


CODE, RATE, STORY = ("code_lines",), ("prose", "src", "ask"), ("files_read", "one gang")


@pytest.mark.parametrize(
    ("key", "ceiling", "figure", "complaint"),
    [
        (CODE, 1000, 1000, None),
        (CODE, 1000, 1001, "above its ceiling of 1,000"),
        (CODE, 1000, 995, None),
        (CODE, 1000, 994, "lower its ceiling of 1,000 with `make ceilings`"),
        (("kubernetes_modules",), 78, 77, "lower its ceiling"),
        (("kubernetes_modules",), 78, 79, '--show "kubernetes_modules"'),
        (STORY, 31, 30, "lower its ceiling"),
        (STORY, 31, 32, "above its ceiling"),
        (RATE, 20.0, 20.1, '--show "ask"'),
        (RATE, 20.0, 19.6, None),
        (RATE, 20.0, 19.5, "lower its ceiling"),
    ],
)
def test_a_figure_stays_just_below_its_ceiling(key, ceiling, figure, complaint):
    found = ratchets.complaints({key: ceiling, ("test_cpu_seconds",): 1}, {key: figure})
    assert len(found) == (complaint is not None)
    assert all(complaint in line for line in found)


def test_a_figure_without_a_ceiling_fails_and_so_does_a_ceiling_without_a_figure():
    assert ratchets.complaints({CODE: 1}, {STORY: 2}) == [
        "code_lines is not a figure: remove its line from ceilings.toml",
        "files_read / one gang is 2 and has no ceiling: add a line to ceilings.toml",
    ]


FILE = """# Kept.
code_lines = 1_000
docs_words = 50  # kept, too
test_cpu_seconds = 650

[files_read]
"one gang" = 31

[prose.src]
"ask" = 20.0
"""


def test_ceilings_fall_and_never_rise():
    figures = {CODE: 900, ("docs_words",): 60, STORY: 30, RATE: 19.9}
    text = ratchets.lowered(FILE, figures)
    assert text == FILE.replace("1_000", "900").replace("= 31", "= 30").replace("20.0", "19.9")
    assert ratchets.lowered(text, {key: figure + 5 for key, figure in figures.items()}) == text
    assert ratchets.lowered(FILE, {CODE: 999_999 - 999_000}) == FILE.replace("1_000", "999")


def run(monkeypatch, path, figures, *words):
    monkeypatch.setattr(ratchets, "CEILINGS", path)
    monkeypatch.setattr(ratchets, "measure", lambda _ceilings: figures)
    monkeypatch.setattr(sys, "argv", ["ratchets", *words])
    ratchets.main()


def test_the_program_fails_above_a_ceiling_and_lowering_does_not_help(monkeypatch, tmp_path):
    path = tmp_path / "ceilings.toml"
    path.write_text(FILE)
    met = {CODE: 1000, ("docs_words",): 50, STORY: 31, RATE: 20.0}
    run(monkeypatch, path, met)
    for words in ((), ("--lower",)):
        with pytest.raises(SystemExit, match="code_lines is 1,001, above its ceiling of 1,000"):
            run(monkeypatch, path, met | {CODE: 1001}, *words)
    assert path.read_text() == FILE


def test_the_program_fails_far_below_a_ceiling_until_it_is_lowered(monkeypatch, tmp_path):
    path = tmp_path / "ceilings.toml"
    path.write_text(FILE)
    less = {CODE: 900, ("docs_words",): 50, STORY: 31, RATE: 20.0}
    with pytest.raises(SystemExit, match="make ceilings"):
        run(monkeypatch, path, less)
    run(monkeypatch, path, less, "--lower")
    run(monkeypatch, path, less)
    assert ratchets.read_ceilings(path.read_text())[CODE] == 900


def test_a_comment_behind_a_section_hides_no_ceiling():
    text = FILE.replace("[prose.src]", "[prose.src]  # per 10,000 words")
    assert text != FILE
    lower = ratchets.lowered(text, {RATE: 6.0})
    assert ratchets.read_ceilings(lower)[RATE] == 6.0


def test_the_ceiling_of_a_rate_falls_to_that_of_the_guide():
    assert ratchets.read_ceilings(ratchets.lowered(FILE, {RATE: 1.0}))[RATE] == 4.0
    assert ratchets.complaints({RATE: 4.0}, {RATE: 1.0}) == []
    in_tests = ("prose", "tests", "ask")
    assert len(ratchets.complaints({RATE: 8.0, in_tests: 8.0}, {RATE: 1.0, in_tests: 1.0})) == 1


def test_the_file_has_a_ceiling_for_each_figure():
    ceilings = ratchets.read_ceilings(ratchets.CEILINGS.read_text())
    counts = {("code_lines",), ("docs_words",), ("kubernetes_modules",), ("test_cpu_seconds",)}
    stories = {("files_read", story.title) for story in ratchets.files_read.STORIES}
    assert ceilings.keys() == counts | stories | {
        ("prose", tree, name) for tree in ratchets.TREES for name in ratchets.PATTERNS
    }


def test_files_of_git_are_listed_and_ignored_files_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(ratchets, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="need a git checkout"):
        ratchets.tracked_files("docs")
    ratchets.subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "docs").mkdir()
    for name in ("new.md", "made.md"):
        (tmp_path / "docs" / name).touch()
    (tmp_path / ".gitignore").write_text("made.md\n")
    assert ratchets.tracked_files("docs") == ["docs/new.md"]
