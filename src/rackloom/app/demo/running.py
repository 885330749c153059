"""A site that keeps running with the demonstration on it, `rackloom up --demo`.

The steps are those of `rackloom demo` up to the whole-rack job, and nothing is released: two tenants keep
their partitions, the job keeps running, and the measured transfer is saved where the map and the doctor
read it. Then a GPU below the job is lost and answers again, over and over, so that there is always
something to look at: three minutes lost, seven well. Each line names a command that shows the same.

A home that has the tenants from an earlier run is taken as it is. The job starts again, since the simulated
cluster starts empty. A step that fails ends the demonstration, not the site.
"""

import asyncio
import shlex
from functools import partial

from rackloom.app.demo.job import JOB_NAMESPACE, LostGpu, RackJob
from rackloom.app.demo.run import PART_OF_A_RACK, WHOLE_RACK, run_transfer
from rackloom.app.demo.story import DEGRADED, DemoStep, DemoStory, step_mark
from rackloom.app.demo.tenants import DemoTenant, DemoTenants
from rackloom.app.home import Home
from rackloom.app.twin.up import Announce, RunningTwin
from rackloom.carve.api.auth import Role
from rackloom.errors import Refused
from rackloom.topology.profiles import load_rack

LOST_SECONDS, WELL_SECONDS = 180.0, 420.0
FEWEST_RACKS = 2


def check_demo_racks(racks: int, profile: str) -> None:
    """Refuse racks on which the demonstration has no place."""
    found = load_rack(profile)
    if racks < FEWEST_RACKS or (found.trays_per_domain, found.gpus_per_tray) != (WHOLE_RACK[1], 4):
        raise Refused(
            f"the demonstration needs {FEWEST_RACKS} racks of {WHOLE_RACK[1]} trays with 4 GPUs",
            nearest_fix="use --racks 2 --profile gb200-nvl72, or leave out --demo",
        )


async def keep_demo(home: Home, announce: Announce, twin: RunningTwin) -> None:
    """Prepare the demonstration on a site that has just started, and keep it going until cancelled."""
    at = f"--home {shlex.quote(str(home.path))}"
    kubectl = f"kubectl --kubeconfig {shlex.quote(str(twin.kubeconfig))}"
    story = DemoStory(lambda step: announce(_line(step)))
    async with DemoTenant(twin.site, *WHOLE_RACK) as blue, DemoTenant(twin.site, *PART_OF_A_RACK) as green:
        tenants, job, lost_gpu = DemoTenants(blue, green), RackJob(twin, blue.org), LostGpu(twin)
        save = home.path / "transfers"
        save.mkdir(exist_ok=True)
        for name, act, command in (
            ("two tenants have partitions", tenants.keep_partitions, None),
            (
                f"carved: {blue.org} has a whole rack, {green.org} a third of one",
                tenants.keep_instances,
                f"rackloom token {at} --org {blue.org} --role TENANT_ADMIN",
            ),
            ("the switch controllers show both", tenants.see_partitions, None),
            ("placed: a job of 18 workers", job.place, None),
            (
                "claimed: it runs, each worker with 4 GPUs and a channel",
                job.run,
                f"{kubectl} -n {JOB_NAMESPACE} get pods -o wide",
            ),
            (
                "proved: a transfer on this host, measured and verified",
                partial(run_transfer, save / "demo.json"),
                f"rackloom transfer report {shlex.quote(str(save / 'demo.json'))}",
            ),
        ):
            await story.step_if_holding(name, act)
            if command is not None and story.holds:
                announce(f"         try: {command}")
            if act == tenants.keep_instances and story.holds:
                link = twin.site.sign_in_link(blue.org, [Role.TENANT_ADMIN])
                announce(f"         the map as {blue.org} sees it, in a private window: {link}")
    await _lose_and_heal(story, lost_gpu, announce, f"rackloom doctor {at}")


async def _lose_and_heal(story: DemoStory, gpu: LostGpu, announce: Announce, doctor: str) -> None:
    lost = f"a GPU is lost under the job, for {LOST_SECONDS:.0f} s"
    healed = "the GPU answers again, and no finding names it"
    while story.holds:
        for name, act, seconds in ((lost, gpu.lose, LOST_SECONDS), (healed, gpu.heal, WELL_SECONDS)):
            await story.step_if_holding(name, act)
            if story.steps[-1].ok:
                line = story.steps[-1].evidence.get("doctor")
                announce(f"         try: {doctor}" if name == lost else f"         doctor: {line}")
                await asyncio.sleep(seconds)
    announce("the demonstration has ended at the step above; the site goes on")


def _line(step: DemoStep) -> str:
    """A step in a line. Its gaps or the reason of its failure follow in another."""
    problem = step.degraded if step.ok else step.evidence.get("reason")
    because = "" if problem is None else f"\n         {DEGRADED if step.ok else 'reason'}: {problem}"
    return f"{step_mark(step)} {step.name} ({step.seconds:.1f} s){because}"
