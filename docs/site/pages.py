"""The pages of the repository as sources of a site: which there are, of which kind, and what links become.

docs/README.md is the one list of pages. Its four sections are the four kinds; the order there is the order
in the site's navigation. Every other page that is linked (examples, deployment, the README) is staged too.

The staged tree is laid out as the repository is, so that links between pages stay as they are written. Only
links that mean nothing in a site change: a folder becomes its README, a file that is no page is staged beside
the pages and offered as a download, and a diagram becomes the drawing of it (docs/site/diagrams.py). The
command that prints a generated page becomes a link to that page, because git has no such file to link to.
"""

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.site.diagrams import DRAWINGS, NotDrawn, drawn

ROOT = Path(__file__).parents[2]
__all__ = ["NotDrawn"]

LIST = ROOT / "docs" / "README.md"
FRONT = "README.md"
"""The page that the site begins with, as index.md."""
PATTERNS = ("*.md", "docs/*.md", "deploy/*/*.md", "examples/*/*.md", "src/rackloom/**/README.md")
KINDS = ("Tutorials", "How-to", "Reference", "Explanation")

_LINK = re.compile(r"\[(?P<label>[^]]*)\]\((?![a-z]+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
PRINTS = re.compile(r"`python -m docs\.site\.reference ([a-z-]+)`")
"""A command that prints a generated page."""
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Kind:
    """A section of docs/README.md: its name, what stands in it, and the pages that it links, in order."""

    name: str
    text: str
    pages: tuple[str, ...]

    @property
    def landing(self) -> str:
        """The site's page of this section."""
        return self.name.lower()


def kinds() -> list[Kind]:
    """The four kinds of pages. Raises ValueError if docs/README.md has other sections."""
    _, *sections = re.split(r"^## ", LIST.read_text(), flags=re.MULTILINE)
    found = [_kind(section) for section in sections]
    if tuple(kind.name for kind in found) != KINDS:
        raise ValueError(f"{LIST}: its sections are {[kind.name for kind in found]}, not {list(KINDS)}")
    return found


def _kind(section: str) -> Kind:
    name, _, text = section.partition("\n")
    linked = (_resolved(LIST, match["path"]) for match in _LINK.finditer(text))
    return Kind(name, text, tuple(dict.fromkeys(path for path in linked if path.endswith(".md"))))


def all_pages() -> list[str]:
    """Every page of the repository, by its path."""
    found = {path for pattern in PATTERNS for path in ROOT.glob(pattern)}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def stage(folder: Path) -> None:
    """Write every page, and what the pages show and offer, into `folder`."""
    pages = all_pages()
    for page in pages:
        text = drawn((ROOT / page).read_text(), page)
        _write(folder / _staged(page), "".join(_rewritten(text, page, pages, folder)))
    shutil.copytree(DRAWINGS, folder / "docs" / "images" / DRAWINGS.name, dirs_exist_ok=True)
    for kind in kinds():
        _write(folder / f"{kind.landing}.md", _landing(kind, pages, folder))


def _landing(kind: Kind, pages: list[str], folder: Path) -> str:
    """The page of a kind: its section of docs/README.md, and the pages below it in the navigation."""
    text = "".join(_rewritten(kind.text, "docs/README.md", pages, folder))
    text = re.sub(r"(?<=\]\()([\w./-]+\.(md|html))", lambda match: _from_top(match[1]), text)
    text = re.sub(r"\[([\w-]+)\.md\]", r"[\1]", text).replace("\n### ", "\n## ")
    generated = (
        sorted(path.stem for path in (folder / "reference").glob("*.md")) if kind.name == "Reference" else []
    )
    entries = [f"reference/{name}" for name in generated]
    entries += [_staged(page).removesuffix(".md") for page in kind.pages]
    return f"# {kind.name}\n\n{text.strip()}\n\n{toctree(entries)}"


def toctree(entries: Iterable[str], caption: str | None = None) -> str:
    """A list of pages that only the navigation shows."""
    head = [":hidden:", *([f":caption: {caption}"] if caption else []), ":maxdepth: 1"]
    return "\n".join(["```{toctree}", *head, "", *(f"/{entry}" for entry in entries), "```", ""])


def _from_top(target: str) -> str:
    return target.removeprefix("../") if target.startswith("../") else f"docs/{target}"


def _rewritten(text: str, page: str, pages: list[str], folder: Path) -> Iterator[str]:
    """A page with the links of a site; code is left alone."""
    top = "../" * page.count("/")
    for part in _FENCED.split(text):
        if _FENCED.fullmatch(part):
            yield part
        else:
            linked = _LINK.sub(lambda match: _link(match, page, pages, folder), part)
            yield PRINTS.sub(rf"[reference: \1]({top}reference/\1.md)", linked)


def _link(match: re.Match[str], page: str, pages: list[str], folder: Path) -> str:
    """The link in the site. One to a folder without a page loses its target."""
    label, path = match["label"], match["path"]
    if (ROOT / _resolved(ROOT / page, path)).is_dir():
        path = f"{path.rstrip('/')}/README.md"
        if _resolved(ROOT / page, path) not in pages:
            return label
    return f"[{label}]({_target(path, page, pages, folder)}{match['anchor'] or ''})"


def _target(target: str, page: str, pages: list[str], folder: Path) -> str:
    """The path of a link to a file. Raises ValueError if there is no such file."""
    path = _resolved(ROOT / page, target)
    if path == FRONT:
        return f"{target.removesuffix(FRONT)}index.md"
    if path not in pages:
        if not (ROOT / path).is_file():
            raise ValueError(f"{page}: there is no {target}")
        copy = folder / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy)
    return target


def _resolved(page: Path, target: str) -> str:
    return str((page.parent / target).resolve().relative_to(ROOT))


def _staged(page: str) -> str:
    return "index.md" if page == FRONT else page


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
