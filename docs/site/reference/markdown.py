"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def cell(text: object) -> str:
    """Text that may stand in a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def code(text: object) -> str:
    """Code in a cell; nothing where there is none."""
    return f"`{cell(text)}`" if str(text) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are already Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def made_from(what: str) -> str:
    """The line by which a page says what it is made from."""
    return f"*This page is generated from {what}, when the site is built.*\n"
