"""The pages of the repository, and the code that is in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for pattern in ("*.md", "docs/*.md", "deploy/*/*.md", "examples/*/*.md")
    for page in sorted(ROOT.glob(pattern))
}
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n)+", re.MULTILINE)


def fenced(name, language):
    """The contents of the fenced blocks of one language on a page."""
    block = re.compile(rf"^ *```{language}\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    return block.findall(PAGES[name])


def lines(name):
    """The lines of the code blocks of a page, fenced and indented, with continued lines joined."""
    page = PAGES[name]
    found = [*FENCED.findall(page), *INDENTED.findall(FENCED.sub("", page))]
    return [line.strip() for block in found for line in block.replace("\\\n", " ").splitlines()]


def spans(name):
    """Inline code: what stands between backticks outside of blocks, on one line or broken over two."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", FENCED.sub("", PAGES[name]))]


def section_lines(name, heading):
    """The lines of the fenced blocks below a heading (`## Install`), until the next of its rank or above."""
    rank = len(heading) - len(heading.lstrip("#"))
    _, _, rest = PAGES[name].partition(f"\n{heading}\n")
    section = re.split(rf"^#{{1,{rank}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return [
        line.strip() for block in FENCED.findall(section) for line in block.replace("\\\n", " ").splitlines()
    ]
