"""Diagrams: what pages draw in Mermaid, as drawings that need no program of another host to be seen.

A page holds the text of a diagram, which code hosts draw themselves. `make diagrams` has Mermaid draw each in
a headless Chromium, once for light and once for dark pages, and keeps the drawings in docs/images/diagrams
under a digest of the text. The site shows these. A diagram that was changed has no drawing until
`make diagrams` ran again; the build of the site refuses it.

Mermaid is the only program here that comes from npm. It is fetched by `npm pack`, compared with the digest
below, and is no part of the site.
"""

import base64
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWINGS = ROOT / "docs" / "images" / "diagrams"
MERMAID = "mermaid@11.17.2"
INTEGRITY = "sha512-V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg=="
THEMES = {"light": "neutral", "dark": "dark"}

_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_DRAW = """async ([theme, text]) => {
  mermaid.initialize({ startOnLoad: false, theme, htmlLabels: false, deterministicIds: true,
                       fontFamily: "sans-serif", flowchart: { htmlLabels: false } });
  return (await mermaid.render("diagram", text)).svg;
}"""


class NotDrawn(Exception):
    """A diagram has no drawing."""


def drawn(text: str, page: str) -> str:
    """A page with its drawings in place of its diagrams. Raises NotDrawn if a drawing is missing."""

    def image(match: re.Match[str]) -> str:
        name = _name(match[1])
        if not all(_file(name, theme).is_file() for theme in THEMES):
            raise NotDrawn(f"{page}: a diagram has no drawing: run `make diagrams`")
        folder = "images/diagrams" if page.startswith("docs/") else "docs/images/diagrams"
        words = match[1].split()[0]
        return "\n\n".join(
            f"```{{image}} {folder}/{name}-{theme}.svg\n"
            f":alt: {words}, drawn\n:class: only-{theme} diagram\n```"
            for theme in THEMES
        )

    return _DIAGRAM.sub(image, text)


def diagrams() -> dict[str, str]:
    """The text of each diagram of the pages, by the name of its drawing."""
    pages = (path for folder in (ROOT, ROOT / "docs") for path in sorted(folder.glob("*.md")))
    return {_name(text): text for page in pages for text in _DIAGRAM.findall(page.read_text())}


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _file(name: str, theme: str) -> Path:
    return DRAWINGS / f"{name}-{theme}.svg"


def mermaid() -> str:
    """The program of Mermaid for browsers. Raises ValueError if npm gives another than is pinned."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", MERMAID], cwd=folder, check=True)
        (archive,) = (path.read_bytes() for path in Path(folder).glob("*.tgz"))
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if found != INTEGRITY:
        raise ValueError(f"{MERMAID} has the digest {found}, not {INTEGRITY}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        program = members.extractfile("package/dist/mermaid.min.js")
        if program is None:
            raise ValueError(f"{MERMAID} has no program for browsers")
        return program.read().decode()


def main() -> None:
    """Draw what has no drawing yet, and remove drawings of what no page has any more."""
    from playwright.sync_api import sync_playwright

    present = diagrams()
    DRAWINGS.mkdir(parents=True, exist_ok=True)
    for path in DRAWINGS.glob("*.svg"):
        if path.stem.rpartition("-")[0] not in present:
            path.unlink()
    missing = {name: text for name, text in present.items() if not _file(name, "dark").is_file()}
    if not missing:
        print("every diagram is drawn")
        return
    program = mermaid()
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=_FLAGS)
        page = browser.new_page()
        page.add_script_tag(content=program)
        for name, text in missing.items():
            for theme, of_mermaid in THEMES.items():
                _file(name, theme).write_text(page.evaluate(_DRAW, [of_mermaid, text]) + "\n")
            print(f"drawn: {name}")


if __name__ == "__main__":
    main()
