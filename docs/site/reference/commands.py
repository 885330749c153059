"""The commands: what `--help` says of each, on one page; cyclopts writes it from the same declarations."""

import re

from cyclopts import App
from docs.site.reference.markdown import made_from

from rackloom.cli.main import app, describe


def page() -> str:
    """Every command with its options, in the order of the help."""
    _describe_all(app)
    text = app.generate_docs(output_format="markdown", recursive=True, heading_level=1)
    text = _without_lists(text).replace(
        "# rackloom\n", f"# Commands\n\n{made_from('the declarations of the commands')}", 1
    )
    return re.sub(r"^(#{2,}) (rackloom.*)$", _heading, text, flags=re.MULTILINE)


def _describe_all(command: App) -> None:
    """Have the help of a command and of all commands below it show their docstrings."""
    describe(command)
    for name in command:
        if not name.startswith("-"):
            _describe_all(command[name])


def _heading(match: re.Match[str]) -> str:
    """`admin partition show` below `admin partition`: by the number of words, to at most four levels."""
    words = match[2].split()
    return f"{'#' * min(len(words), 4)} {' '.join(words)}"


def _without_lists(text: str) -> str:
    """The navigation of the site lists the commands; lists on the page would repeat it."""
    text = re.sub(r"(?ms)^## Table of Contents\n.*?(?=^\*\*Commands)", "", text, count=1)
    return re.sub(r"^\*\*Commands\*\*:\n\n(?:\* .*\n(?: {2,}.*\n)*)+", "", text, flags=re.MULTILINE)
