"""Draws rack-map.png: the demo's racks in headless Chromium, a job over one of them, the GPU that it lost.

Needs chromium on PATH, or RACKLOOM_CHROMIUM.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from playwright.async_api import Page, async_playwright

from rackloom.app.demo.job import LostGpu, RackJob
from rackloom.app.demo.run import PART_OF_A_RACK, RACK_COUNT, RACK_PROFILE, WHOLE_RACK
from rackloom.app.demo.tenants import DemoTenant, DemoTenants
from rackloom.app.home import Home
from rackloom.app.twin.up import RunningTwin, running_twin
from rackloom.carve.api.auth import Role
from rackloom.carve.inventory.enrolment import DEMO_ORG

PICTURE = Path(__file__).with_name("rack-map.png")
LOST_GPU = "#findings a[data-shows]"
WIDTH, HEIGHT = 1400, 1000
TOKEN_SECONDS = 600.0
PATIENCE_MS = 60_000.0


async def draw(chromium: str) -> None:
    """Tell the demo's story up to the accident, and look at it."""
    with tempfile.TemporaryDirectory() as directory:
        async with (
            running_twin(Home(Path(directory)), port=0, racks=RACK_COUNT, profile=RACK_PROFILE) as whole,
            DemoTenant(whole.site, *WHOLE_RACK) as blue,
            DemoTenant(whole.site, *PART_OF_A_RACK) as green,
            async_playwright() as running,
        ):
            await _happened(whole, DemoTenants(blue, green))
            browser = await running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            await _look(page, whole)


async def _happened(whole: RunningTwin, tenants: DemoTenants) -> None:
    job, lost_gpu = RackJob(whole, WHOLE_RACK[0]), LostGpu(whole)
    job_runs = (tenants.create_partitions, tenants.create_instances, job.place, job.run)
    for act in (*job_runs, lost_gpu.lose, lost_gpu.check_found):
        await act()


async def _look(page: Page, whole: RunningTwin) -> None:
    token = whole.site.issuer.mint(DEMO_ORG, [Role.PROVIDER_ADMIN], now=time.time(), ttl=TOKEN_SECONDS)
    await page.goto(whole.site.url)
    await page.fill("input[name=org]", DEMO_ORG)
    await page.fill("input[name=token]", token)
    await page.keyboard.press("Enter")
    await page.click(LOST_GPU, timeout=PATIENCE_MS)
    await page.wait_for_selector("#chain table")
    await page.screenshot(path=PICTURE)


if __name__ == "__main__":
    program = os.environ.get("RACKLOOM_CHROMIUM") or shutil.which("chromium")
    sys.exit("no chromium on PATH" if program is None else uvloop.run(draw(program)))
