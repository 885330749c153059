"""Commands as a page of the documentation has them, so that a test runs the commands of a reader."""

from collections.abc import Mapping
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs"


def commands_of(page: str, heading: str, names: Mapping[str, str]) -> list[str]:
    """The commands of the first block below a heading, with `names` in place of its words in capitals."""
    _, _, section = (PAGES / page).read_text().partition(f"\n{heading}\n")
    block = section.split("\n```", 2)[1].partition("\n")[2]
    for word, name in sorted(names.items(), key=lambda pair: -len(pair[0])):
        block = block.replace(word, name)
    return block.splitlines()
