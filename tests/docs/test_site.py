"""The built site: every link has a target, nothing loads from another host, and search finds pages.

It is built once, as `make docs-site` does. Without its generator the tests are skipped and say so.
"""

import functools
import http.server
import importlib.util
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docs.site import build, diagrams, pages
from tests.browser.conftest import chromium
from tests.docs.markdown import PAGES, ROOT

__all__ = ["chromium"]
VERSION = "0.0.1"
ASKING = {
    ("link", "href"), ("script", "src"), ("img", "src"), ("img", "srcset"), ("source", "src"),
    ("source", "srcset"), ("iframe", "src"), ("video", "src"), ("audio", "src"), ("embed", "src"),
    ("object", "data"), ("form", "action"), ("use", "href"), ("image", "href"), ("track", "src"),
    ("video", "poster"), ("base", "href"), ("input", "src"),
}  # fmt: skip
"""Attributes that make a browser load something when a page is shown or used, so not links."""
COMMENTS = ("www.w3.org", "clipboardjs.com", "developer.mozilla.org", "snowballstem.org")
"""Hosts in scripts that no request goes to: XML namespaces, and sources and licences in comments."""


class Page(HTMLParser):
    """The addresses that a page loads, its links, and the names in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value is None:
                continue
            if (tag, name) in ASKING:
                self.asked.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)
            if name in ("id", "name"):
                self.names.add(value)
            if name == "style":
                self.asked += css_addresses(value)


def css_addresses(text: str) -> list[str]:
    """The addresses that a style sheet loads."""
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)
    return [address or imported for address, imported in found]


def elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc) or address.startswith(("//", "ws:", "wss:"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None:
        pytest.skip("NO SPHINX (make docs-site installs it): the site was not built")
    out = tmp_path_factory.mktemp("site")
    build.build(VERSION, out)
    return out


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


pytestmark = pytest.mark.slow


def test_every_page_is_in_the_site_and_in_one_kind(parsed: dict[Path, Page], site: Path) -> None:
    made = {str(path.relative_to(site / VERSION)) for path in parsed if path.parent != site}
    assert {page.replace(".md", ".html") for page in PAGES if page != "README.md"} <= made
    assert {f"reference/{name}.html" for name in build.REFERENCES} <= made
    listed = [page for kind in pages.kinds() for page in kind.pages]
    assert len(listed) == len(set(listed))
    assert {page for page in PAGES if page.startswith("docs/")} - {"docs/README.md"} <= set(listed)


def test_every_link_leads_to_a_page_and_a_name_in_it(parsed: dict[Path, Page]) -> None:
    broken = []
    for path, page in parsed.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            names = parsed[target].names if target in parsed else {unquote(parts.fragment)}
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in names):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_no_page_style_or_script_asks_another_host(parsed: dict[Path, Page], site: Path) -> None:
    asked = {address for page in parsed.values() for address in page.asked}
    for style in site.rglob("*.css"):
        asked |= set(css_addresses(style.read_text()))
    for drawing in site.rglob("*.svg"):
        asked |= set(css_addresses(drawing.read_text()))
        asked |= set(re.findall(r"(?:xlink:)?href=\"([^\"]+)\"", drawing.read_text()))
    assert len(asked) > 10
    assert {address for address in asked if elsewhere(address)} == set()
    # A script could compose an address, but no script names a host to start from.
    named = {
        (script.name, address)
        for script in site.rglob("*.js")
        if script.name != "searchindex.js"  # words of the pages
        for address in re.findall(r"https?://[^\s'\"`)<>]+", script.read_text())
        if urlsplit(address).netloc not in COMMENTS
    }
    assert named == set()


def test_a_page_that_asks_another_host_is_noticed() -> None:
    page = Page('<link href="//fonts.example/a.css"><img srcset="https://a/b.png"><a href="https://a/">')
    assert [elsewhere(address) for address in page.asked] == [True, True]
    assert css_addresses('@import "https://a/b"; x { src: url(https://c/d) }') == [
        "https://a/b",
        "https://c/d",
    ]


def test_versions_stand_side_by_side_the_newest_first(site: Path, tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "main"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    found = re.findall(r'href="([^/]+)/', build.versions_page(tmp_path))
    assert found == ["0.10.0", "0.9.0", "main"]
    assert f'href="{VERSION}/index.html"' in (site / "index.html").read_text()
    with pytest.raises(ValueError, match="no version"):
        build.build("../up", tmp_path)


def test_every_diagram_is_drawn() -> None:
    for name in diagrams.diagrams():
        for theme in diagrams.THEMES:
            assert (diagrams.DRAWINGS / f"{name}-{theme}.svg").is_file(), "run make diagrams"
    kept = {path.stem.rpartition("-")[0] for path in diagrams.DRAWINGS.glob("*.svg")}
    assert kept == set(diagrams.diagrams())


def test_a_diagram_without_a_drawing_is_refused() -> None:
    with pytest.raises(diagrams.NotDrawn, match="make diagrams"):
        diagrams.drawn("```mermaid\nflowchart LR\n    a --> b\n```\n", "docs/x.md")


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site on loopback."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=site)
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 1400), ("light", 390)])
def test_it_is_read_and_searched_in_a_browser(chromium, address: str, scheme: str, width: int) -> None:
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(f"{address}/{VERSION}/docs/architecture.html")
        drawing = page.locator(f"img.diagram.only-{scheme}").first
        assert drawing.is_visible()
        assert drawing.bounding_box()["width"] <= width
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.goto(f"{address}/{VERSION}/search.html?q=ComputeDomain")
        page.wait_for_selector("#search-results li a")
        assert "compute-domains" in " ".join(
            page.locator("#search-results li a").evaluate_all("a => a.map(x => x.href)")
        )
    finally:
        context.close()
    assert asked
    assert {url for url in asked if not url.startswith((address, "data:"))} == set()
    assert complaints == []


def test_the_pins_of_the_site_are_apart_from_those_of_the_program() -> None:
    docs, runtime = ((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("docs", "runtime"))
    assert all(f"\n{name}==" in f"\n{docs}" for name in ("sphinx", "furo", "myst-parser"))
    assert not re.search(r"^(sphinx|furo|myst-parser)==", runtime, re.MULTILINE)
