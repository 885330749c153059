"""The whole story, in a home of its own that is gone afterwards."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from rackloom.app.demo.breaking import Accident
from rackloom.app.demo.carving import Tenant, Tenants
from rackloom.app.demo.claiming import allocate_templates
from rackloom.app.demo.proving import move_buffer
from rackloom.app.demo.story import Evidence, Report, Step, Story
from rackloom.app.demo.working import RackJob
from rackloom.app.home import Home
from rackloom.app.whole.site import whole_site

PROFILE = "gb200-nvl72"
RACKS = 2
_SIMULATED = (
    "Simulated: switch controllers, API server, kubelets, nvidia-imex. All programs of ours are real."
)
WHOLE_RACK, PART_OF_A_RACK = ("blue", 18), ("green", 6)
"""Two tenants, and how many compute trays each of them takes."""


def run_demo(*, as_json: bool, say: Callable[[str], None] = print) -> int:
    """Tell the story; 0 only if every step was verified by observation."""
    import uvloop

    def told(step: Step) -> None:
        if not as_json:
            say(_line(step))

    if not as_json:
        say(f"{RACKS} racks of {PROFILE}. {_SIMULATED}\n")
    with tempfile.TemporaryDirectory(prefix="rackloom-demo-") as directory:
        report = uvloop.run(_story(Home(Path(directory)), Story(told)))
    say(msgspec.json.encode(report).decode() if as_json else _summary(report))
    return 0 if report.ok else 1


async def _story(home: Home, story: Story) -> Report:
    async with (
        whole_site(home, port=0, racks=RACKS, profile=PROFILE) as whole,
        Tenant(whole.site, *WHOLE_RACK) as blue,
        Tenant(whole.site, *PART_OF_A_RACK) as green,
    ):
        tenants, job, accident = Tenants(blue, green), RackJob(whole, WHOLE_RACK[0]), Accident(whole)
        for name, act in (
            ("two tenants' logical partitions created", tenants.create_partitions),
            ("instances batch-created", tenants.create_instances),
            ("partitions observed in the fabric", tenants.see_partitions),
            ("NVLink domain of every GPU", tenants.see_domains),
            ("whole-rack job placed before it exists", job.place),
            ("whole-rack MPIJob running with its own channel", job.run),
            ("doctor: all layers agree", accident.look_well),
            ("a GPU lost under the job", accident.happen),
            ("doctor: found, with both sides and the fix", accident.be_found),
            ("healed, and the doctor agrees", accident.be_healed),
            ("job ended, nothing of it left", job.end),
        ):
            await story.step_if_holding(name, act)
        await story.step("claims allocated", allocate_templates)
        await story.step("transfer run", move_buffer)
        await story.step("everything released, fabric empty", tenants.release)
    return story.report()


def _line(step: Step) -> str:
    mark = "ok    " if step.ok else "FAILED"
    facts = "\n".join(f"         {line}" for line in _facts(step.evidence))
    return f"{mark} {step.name} ({step.seconds:.2f} s)\n{facts}\n"


def _facts(evidence: Evidence) -> list[str]:
    lines = []
    for name, value in evidence.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            lines += [name, *(f"  {key}: {_flat(inner)}" for key, inner in value.items())]
        elif name == "results":
            lines.append(f"{name}: {len(value)} RESULT lines, in --json")
        else:
            lines.append(f"{name}: {_flat(value)}")
    return lines


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(_flat, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _summary(report: Report) -> str:
    verified = sum(step.ok for step in report.steps)
    seconds = sum(step.seconds for step in report.steps)
    return f"{verified} of {len(report.steps)} steps verified by observation in {seconds:.1f} s"
