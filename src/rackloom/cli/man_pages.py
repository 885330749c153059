"""`rackloom help --man DIR`: the manual as man pages, `rackloom(1)` and one for each of its commands.

The text is that of `--help` and of the site's page of commands: all three are written from the declarations
of the commands. cyclopts writes them as Markdown, of which this turns the part that it uses into roff:
headings, fenced lines, lists, paragraphs, code and emphasis.
"""

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from cyclopts import App

from rackloom import __version__
from rackloom.cli.main import describe
from rackloom.errors import Refused, file_error_text

EXIT_STATUS = (
    ("0", "It was done."),
    ("1", "It was refused, or something is unhealthy."),
    ("2", "The command line is not one that this command takes."),
    ("130", "It was interrupted by Ctrl-C."),
)
ENVIRONMENT = (
    ("NO_COLOR", "Whatever its value: nothing is coloured, also on a terminal."),
    ("COLUMNS", "The width of help and error messages."),
)


def write_man_pages(program: App, directory: Path) -> list[Path]:
    """Write all pages into a directory, which is made if need be. Raises Refused where that fails."""
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in man_pages(program):
            file = directory / f"{name}.1"
            file.write_text(text)
            written.append(file)
    except OSError as error:
        raise Refused(
            f"{directory} cannot be written: {file_error_text(error)}",
            nearest_fix="name a directory of yours, such as ~/.local/share/man/man1",
        ) from error
    return written


def man_pages(program: App) -> Iterator[tuple[str, str]]:
    """The name and the text of each page: of the program, then of its commands."""
    commands = {name: program[name] for name in program if not name.startswith("-")}
    summaries = {name: _summary(command) for name, command in commands.items()}
    yield "rackloom", _program_page(program, summaries)
    for name, command in commands.items():
        yield f"rackloom-{name}", _command_page(name, command, summaries[name])


def _program_page(program: App, summaries: dict[str, str]) -> str:
    described = cleandoc(program.help).partition("\n")[2]
    commands = (line for name, what in summaries.items() for line in _entry(f"rackloom-{name}(1)", [what]))
    return _page(
        "rackloom",
        _summary(program),
        ["rackloom COMMAND [OPTIONS]"],
        [*_roff(described), ".SH COMMANDS", *commands],
        [f"rackloom-{name}" for name in summaries],
    )


def _command_page(name: str, command: App, summary: str) -> str:
    describe_all(command)
    text = command.generate_docs(output_format="markdown", recursive=True, heading_level=1)
    text = re.sub(rf"^(#+ |```console\n){name}\b", rf"\1rackloom {name}", text, flags=re.MULTILINE)
    usage = re.findall(r"```console\n(.*)\n```", text)
    # The first heading and usage are those of the page.
    body = re.sub(r"\A# .*\n+```console\n.*\n```\n+", "", text)
    synopsis = [line for line in usage if not line.endswith(" COMMAND")]
    return _page(f"rackloom-{name}", summary, synopsis, list(_roff(body)), ["rackloom"])


def describe_all(command: App) -> None:
    """Have the help of a command and of all below it show their docstrings."""
    describe(command)
    for name in command:
        if not name.startswith("-"):
            describe_all(command[name])


def _summary(command: App) -> str:
    return command.help.strip().partition("\n")[0]


def _page(name: str, summary: str, synopsis: list[str], body: list[str], see_also: list[str]) -> str:
    lines = [
        f'.TH {name.upper()} 1 "" "Rackloom {__version__}" "Rackloom"',
        ".nh",  # No hyphens in words, which may be parts of commands.
        ".SH NAME",
        f"{_escaped(name)} \\- {_inline(summary.rstrip('.'))}",
        ".SH SYNOPSIS",
        ".nf",
        *(f"\\fB{_escaped(line)}\\fR" for line in synopsis),
        ".fi",
        ".SH DESCRIPTION",
        *body,
        ".SH EXIT STATUS",
        *(line for code, what in EXIT_STATUS for line in _entry(code, [what])),
        ".SH ENVIRONMENT",
        *(line for variable, what in ENVIRONMENT for line in _entry(variable, [what])),
        ".SH SEE ALSO",
        ", ".join(f"\\fB{_escaped(other)}\\fR(1)" for other in see_also),
    ]
    return "\n".join(lines) + "\n"


# Markdown to roff.


def _roff(text: str) -> Iterator[str]:
    """The lines of a text in Markdown, as roff."""
    text = re.sub(r"(?ms)^## Table of Contents\n.*?(?=^\*\*Commands)", "", text)
    text = re.sub(r"^\*\*Commands\*\*:\n\n(?:\* .*\n(?: {2,}.*\n)*)+", "", text, flags=re.MULTILINE)
    for block in _blocks(text):
        first = block[0]
        if first.startswith("#"):
            yield f".SS {_escaped(first.lstrip('#').strip())}"
        elif first.startswith("```"):
            yield from (".PP", ".nf", *(f"\\fB{_escaped(line)}\\fR" for line in block[1:]), ".fi")
        elif match := re.fullmatch(r"\*\*(Arguments|Parameters)\*\*:", first):
            yield from (".PP", f"{'Options' if match[1] == 'Parameters' else match[1]}:")
        elif match := re.match(r"\* `([^`]*)`: ?(.*)", first):
            yield from _entry(match[1], [match[2], *block[1:]])
        elif first.startswith(("- ", "* ")):
            yield from (".IP \\(bu 2", _inline(" ".join([first[2:], *block[1:]])))
        else:
            yield from (".PP", _inline(" ".join(block)))


def _blocks(text: str) -> Iterator[list[str]]:
    """Lines that belong together: a heading, a fence, an item of a list, a paragraph."""
    block: list[str] = []
    is_fenced = False
    for line in [*text.splitlines(), ""]:
        begins = line.startswith(("#", "- ", "* ", "```"))
        if is_fenced:
            is_fenced = not line.startswith("```")
            block += [line] if is_fenced else []
            continue
        if block and (begins or not line.strip()):
            yield block
            block = []
        if line.strip():
            block.append(line if begins else line.strip())
        is_fenced = line.startswith("```")


def _entry(label: str, text: list[str]) -> list[str]:
    return [".TP", f"\\fB{_escaped(label)}\\fR", _inline(" ".join(part for part in text if part)) or "\\&"]


def _inline(text: str) -> str:
    """A paragraph on one line: code in bold, emphasis as it is."""
    words = re.split(r"`([^`]+)`", " ".join(text.split()))
    plain = (re.sub(r"(\*{1,2})(\[.*?\])\1", r"\2", part) for part in words[::2])
    pieces = [_escaped(part) for part in plain]
    codes = [f"\\fB{_escaped(code)}\\fR" for code in words[1::2]]
    joined = "".join(piece + code for piece, code in zip(pieces, [*codes, ""], strict=True))
    return f"\\&{joined}" if joined.startswith((".", "'")) else joined


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")
