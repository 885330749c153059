"""Makes the site: `make docs-site`, or `python -m docs.site.build --version 1.2.0 --out build/site`.

The sources are the pages of the repository (docs/site/pages.py) and the references that are generated from
the code (docs/site/reference). Sphinx makes them into `<out>/<version>/`. Any warning of it is an error: a
link that leads nowhere, a page that the navigation does not have, code that no lexer reads.

Other versions below `<out>` stay as they are. `<out>/index.html` lists all of them, the newest first, and
each page links to it. To publish, copy `<out>` to any web server; no page asks another host.
"""

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

from deploy.release import licences
from docs.site import pages
from docs.site.reference import (
    commands,
    conditions,
    listeners,
    log_events,
    metrics,
    resources,
    rest,
    rights,
    roles,
    runbooks,
    scenarios,
    settings,
)

HERE = Path(__file__).parent
OUT = pages.ROOT / "build" / "site"
REFERENCES: dict[str, Callable[[], str]] = {
    "commands": commands.page,
    "settings": settings.page,
    "rest": rest.page,
    "resources": resources.page,
    "metrics": metrics.page,
    "conditions": conditions.page,
    "listeners": listeners.page,
    "rights": rights.page,
    "runbooks": runbooks.page,
    "roles": roles.page,
    "licences": licences.page,
    "scenarios": scenarios.page,
    "log-events": log_events.page,
}
"""The function that writes each generated page. `python -m docs.site.reference NAME` prints a page."""
_VERSION = re.compile(r"[0-9a-z][0-9a-z.+-]*")


def stage(folder: Path) -> None:
    """Write the sources of the site into `folder`."""
    (folder / "reference").mkdir(parents=True)
    for name, page in REFERENCES.items():
        (folder / "reference" / f"{name}.md").write_text(page())
    (folder / "reference" / "runbooks").mkdir()
    for name, text in runbooks.pages().items():
        (folder / "reference" / "runbooks" / f"{name}.md").write_text(text)
    pages.stage(folder)
    front = folder / "index.md"
    kinds = pages.kinds()
    rest_of_them = [page for page in pages.all_pages() if not any(page in kind.pages for kind in kinds)]
    about = [page for page in rest_of_them if page not in (pages.FRONT, "docs/README.md")]
    front.write_text(
        front.read_text()
        + "\n"
        + pages.toctree([kind.landing for kind in kinds])
        + "\n"
        + pages.toctree(["docs/README", *(page.removesuffix(".md") for page in about)], "Also")
    )
    shutil.copyfile(HERE / "conf.py", folder / "conf.py")


def build(version: str, out: Path) -> Path:
    """Build one version below `out` and list it there. Returns its folder.

    Raises ValueError for a version that is no name of a folder, and CalledProcessError if Sphinx warns.
    """
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is no version: digits, letters, dots, + and -")
    out.mkdir(parents=True, exist_ok=True)
    target = out / version
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch, "source"), Path(scratch, "html")
        stage(source)
        environment = {
            **os.environ,
            "RACKLOOM_SITE_VERSION": version,
            "RACKLOOM_SITE_STATIC": str(HERE / "static"),
            "RACKLOOM_SITE_TEMPLATES": str(HERE / "templates"),
        }
        command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
        subprocess.run([*command, "-b", "html", source, made], check=True, env=environment)
        shutil.rmtree(made / ".doctrees", ignore_errors=True)
        (made / ".buildinfo").unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target)
    (out / "index.html").write_text(versions_page(out))
    return target


def versions_page(out: Path) -> str:
    """The page that lists the versions below `out`, the newest first."""
    found = sorted((path.parent.name for path in out.glob("*/index.html")), key=_order, reverse=True)
    items = "\n".join(
        f'<li><a href="{name}/index.html">Rackloom {name}</a></li>' for name in map(html.escape, found)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>Rackloom documentation</title>\n'
        "<style>body { font: 1.1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto;"
        " padding: 0 1rem }</style>\n"
        "<h1>Rackloom documentation</h1>\n<p>By version, the newest first:</p>\n"
        f"<ul>\n{items}\n</ul>\n</html>\n"
    )


def _order(version: str) -> tuple[tuple[int, int | str], ...]:
    """Numbers by their value, and a version of letters alone (a branch) before all numbers."""
    parts = re.findall(r"\d+|[a-z]+", version)
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in parts)


def main() -> None:
    """Build the version of this checkout."""
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--version", default=project["version"], help="name of the folder (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where all versions are")
    given = parser.parse_args()
    try:
        print(build(given.version, given.out) / "index.html")
    except (ValueError, pages.NotDrawn) as error:
        sys.exit(f"docs-site: {error}")
    except subprocess.CalledProcessError:
        sys.exit("docs-site: Sphinx warned; see above")


if __name__ == "__main__":
    main()
