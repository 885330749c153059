"""The links, files, commands and make targets that the pages name exist."""

import re
import shlex
from itertools import groupby
from pathlib import Path

import pytest
from cyclopts.exceptions import CycloptsError
from docs.site.build import REFERENCES
from docs.site.pages import PRINTS
from tests.docs.markdown import FENCED, PAGES, ROOT, lines, spans

from rackloom.cli.main import app

SOURCE = ROOT / "src" / "rackloom"
SEPARATORS = frozenset("();|&<>")
SETTING = re.compile(r"[A-Z_]+=")
PATH = re.compile(r"[\w-]+(/[\w.-]+)+\.(py|sh|md|json|yaml|toml|txt|proto|mod|go|service)")

each_page = pytest.mark.parametrize("name", PAGES)


def words(line):
    """The simple commands of a shell line, as lists of words. Empty if the line is not shell."""
    reader = shlex.shlex(line, posix=True, punctuation_chars="".join(SEPARATORS))
    reader.whitespace_split = True
    try:
        parts = groupby(reader, key=SEPARATORS.issuperset)
        return [list(part) for separates, part in parts if not separates]
    except ValueError:
        return []


def calls(name):
    """Every call of rackloom in the blocks of a page: its environment variables and its arguments."""
    for line in lines(name):
        for command in words(line.removeprefix("$ ")) if "rackloom" in line else ():
            settings = dict(word.split("=", 1) for word in command if SETTING.match(word))
            rest = [word for word in command if not SETTING.match(word)]
            if rest and rest[0] in ("rackloom", ".venv/bin/rackloom"):
                yield settings, rest[1:]


def test_there_are_pages_and_commands_to_look_at():
    assert {"README.md", "CONTRIBUTING.md", "docs/api.md", "examples/imex-minimal/README.md"} <= PAGES.keys()
    assert sum(len(list(calls(name))) for name in PAGES) > 50


def anchor(heading):
    """The name that a heading has in links to it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@each_page
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", PAGES[name])):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, part = target.partition("#")
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), target
        if part:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert part in {anchor(heading) for heading in headings}, target


@each_page
def test_every_command_in_a_block_can_be_parsed(name, monkeypatch):
    for settings, arguments in calls(name):
        if arguments[0] == "help":  # The program takes this word before it has commands parsed.
            arguments = [*arguments[1:], "--help"]
        with monkeypatch.context() as patch:
            for variable, value in settings.items():
                patch.setenv(variable, value)
            try:
                app.parse_args(arguments, print_error=False, exit_on_error=False)
            except CycloptsError as wrong:
                pytest.fail(f"rackloom {shlex.join(arguments)}: {wrong}")


def command_of(words):
    """The command that the words call or request help for, and the remaining words."""
    words = words[1:] if words[0] == "help" else words
    _, found, rest = app.parse_commands([word.strip("[]") for word in words])
    return found[-1], rest


def options_of(command):
    return {name for argument in command.assemble_argument_collection() for name in argument.names}


@each_page
def test_every_command_in_the_text_exists_with_the_options_that_it_is_told_with(name):
    for span in spans(name):
        if span.startswith("rackloom "):
            command, rest = command_of(span.split()[1:])
            assert command is not app, span
            options = {word.partition("=")[0] for word in rest if word.startswith("--")} - {"--help"}
            assert not options or options <= options_of(command), span


@each_page
def test_every_make_target_exists(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = (re.match(r"make ([a-z-]+)", line) for line in (*lines(name), *spans(name)))
    assert {found.group(1) for found in commands if found} <= targets


@pytest.fixture(scope="module")
def files():
    """Every file that a page may name, as a path that begins with a slash."""
    folders = ("src", "tests", "docs", "deploy", "examples", "benchmarks", "requirements")
    return {f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")}


@each_page
def test_every_file_of_ours_that_is_named_is_there(name, files):
    paths = {word for text in (*spans(name), *lines(name)) for word in text.split() if PATH.fullmatch(word)}
    assert {path for path in paths if not any(file.endswith(f"/{path}") for file in files)} == set()


@each_page
def test_every_test_that_is_named_is_there(name, files):
    named = {span for span in spans(name) if re.fullmatch(r"test_\w+", span)}
    named -= {Path(file).stem for file in files}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")) if named else ""
    assert {test for test in named if f"def {test}(" not in tests} == set()


def test_every_page_is_listed_and_the_list_is_reached_from_the_readme():
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", PAGES["docs/README.md"]))
    assert {name for name in PAGES if name.startswith("docs/")} == {f"docs/{page}" for page in listed} | {
        "docs/README.md"
    }
    assert "](docs/README.md)" in PAGES["README.md"]


def test_the_architecture_lists_the_packages_that_there_are():
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", PAGES["docs/architecture.md"], re.MULTILINE))
    there = {str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("__init__.py")} - {"."}
    verbs = {"carve", "claim", "core", "prove"}
    rooms = {verb for verb in there - verbs if verb.count("/") == (verb.split("/")[0] in verbs)}
    assert rooms <= listed <= there


@each_page
def test_every_generated_page_that_is_named_is_there(name):
    assert set(PRINTS.findall(PAGES[name])) <= REFERENCES.keys()
