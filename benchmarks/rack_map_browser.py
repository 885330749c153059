"""How soon a browser shows the rack map, and a change on it: Chromium, with the server in a thread beside it.

`first_view_seconds` is from the start of the navigation until the overview is in the document and the browser
has painted content (first-contentful-paint). The first page of a process also joins the layers
(`of_a_process`); the others find them joined (`later`, the median of `ROUNDS`). `change_seconds` is from the
moment at which the source has a sick GPU, or a sound one again, until the page says so in its summary, by one
clock of the machine.

python benchmarks/rack_map_browser.py --racks 100
python benchmarks/rack_map_browser.py --quick        # 2 racks: shows that it works
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# The snapshots, the server and the flags of the browser are those of the tests.
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rack_map import HOLDERS, one_sick_gpu, read
from benchmarks.site_figures import load
from playwright.sync_api import Page, sync_playwright
from tests.browser.conftest import FLAGS, OPERATOR, PATIENCE_MS, Served, serving
from tests.web.snapshots import snapshot

ROUNDS = 7
FIRST_VIEW = """() => new Promise((done) => {
  const seen = () => {
    const [paint] = performance.getEntriesByName("first-contentful-paint");
    const now = document.timeline.currentTime;
    if (paint && document.querySelector("#overview")) done(Math.max(paint.startTime, now));
    else requestAnimationFrame(seen);
  };
  seen();
})"""
WATCH = """() => {
  const summary = () => document.querySelector("#summary")?.textContent;
  const before = summary();
  window.changedAt = new Promise((done) => {
    new MutationObserver((_, observer) => {
      if (summary() === before) return;
      observer.disconnect();
      requestAnimationFrame(() => done(performance.timeOrigin + performance.now()));
    }).observe(document.body, { childList: true, subtree: true, characterData: true });
  });
}"""


def first_view(page: Page, url: str) -> float:
    """Seconds from the start of a navigation until the map is seen."""
    page.goto(url, wait_until="commit")
    return float(page.evaluate(FIRST_VIEW)) / 1000


def change(page: Page, served: Served, reading: Any) -> float:
    """Seconds until a page shows what the source has now."""
    page.evaluate(WATCH)
    begun = time.time()
    served.show(reading)
    return float(page.evaluate("() => window.changedAt")) / 1000 - begun


def figures(racks: int, program: str) -> dict[str, object]:
    """What a browser shows of a site of so many racks, and when."""
    well = snapshot(racks, 18, HOLDERS)
    sound, sick = read(well), read(one_sick_gpu(well))
    with serving(sound) as served, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{served.url}/map/login")
        page.fill("input[name=org]", "provider")
        page.fill("input[name=token]", OPERATOR)
        begun = time.perf_counter()
        page.click("button", no_wait_after=True)
        page.wait_for_selector("#summary")
        first = time.perf_counter() - begun
        later = [first_view(page, served.url) for _ in range(ROUNDS)]
        page.wait_for_selector("#live[data-state=live]")
        changes = [change(page, served, reading) for _ in range(ROUNDS) for reading in (sick, sound)]
        browser.close()
    return {
        "racks": racks,
        "first_view_seconds_of_a_process": round(first, 2),
        "first_view_seconds_later": round(statistics.median(later), 2),
        "longest_first_view_seconds_later": round(max(later), 2),
        "change_seconds": round(statistics.median(changes), 2),
        "longest_change_seconds": round(max(changes), 2),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--racks", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="2 racks")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="its program")
    asked = parser.parse_args()
    if asked.chromium is None:
        sys.exit("NO CHROMIUM (apt install chromium): nobody saw the rack map")
    print(json.dumps(figures(2 if asked.quick else asked.racks, asked.chromium) | load()))


if __name__ == "__main__":
    main()
