"""The tree of commands, by program."""

from collections.abc import Callable, Iterator

import pytest
from cyclopts import App, ArgumentCollection

from rackloom.cli.main import app

Words = tuple[str, ...]


def command_at(words: Words) -> App:
    """The command that these words call."""
    return app.parse_commands(words)[1][-1]


def leaves(words: Words = ()) -> Iterator[Words]:
    """Every command that does something, as the words that call it."""
    below = [name for name in command_at(words) if not name.startswith("-")]
    if not below:
        yield words
    for name in below:
        yield from leaves((*words, name))


def arguments(words: Words) -> ArgumentCollection:
    """The arguments of a command, with their help."""
    return command_at(words).assemble_argument_collection(parse_docstring=True)


def names(words: Words) -> set[str]:
    """The names of all flags of a command."""
    return {name for argument in arguments(words) for name in argument.names if name.startswith("-")}


LEAVES = tuple(leaves())
each_leaf = pytest.mark.parametrize("words", LEAVES, ids=" ".join)


def of_every_command(rule: Callable[[Words], None]) -> Callable[[], None]:
    """One test that walks all commands with a rule, and names each command that breaks it."""

    def walk() -> None:
        broken = {}
        for words in LEAVES:
            try:
                rule(words)
            except AssertionError as error:
                broken[" ".join(words)] = str(error)
        assert broken == {}

    return walk
