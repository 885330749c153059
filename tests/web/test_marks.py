"""The map, its sentence and its numbers, the doctor and the metrics show one list of problems."""

import re
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.diagnosis.healthy import healthy
from tests.core.diagnosis.test_reexamination import FAULTS, WELL, changed, changes

from rackloom.app.doctor_metrics import registry_of
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import LEVELS, Level, Severity, needs_attention
from rackloom.core.diagnosis.index import at_device, at_domain, at_logical, at_pod, places_around
from rackloom.core.diagnosis.report import summary_line
from rackloom.web.frames import ColourMode, GpuState, MapColours, rack_frames
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteReading, site_map
from rackloom.web.overview import rack_counts, site_counts, site_summary
from rackloom.web.panels import site_capacity
from rackloom.web.racks import LEVEL_CLASSES, drawn_rack

FINEST_FIRST = (("gpu", "device", "pod"), ("node", "machine"), ("partition", "logical", "domain"))
STATES = {
    None: GpuState.HEALTHY,
    Level.CRITICAL: GpuState.CRITICAL,
    Level.DEGRADED: GpuState.DEGRADED,
    Level.UNKNOWN: GpuState.UNKNOWN,
}


def names_of(gpu):
    """All names of a GPU and of the objects around it, as findings write them."""
    chain = gpu.chain
    found = {*places_around((chain,)), *map(at_device, chain.nics), at_domain(gpu.domain)}
    if chain.wanted is not None and chain.wanted.logical is not None:
        found.add(at_logical(chain.wanted.logical))
    return found | {at_pod(pod) for pod in (chain.use.pods if chain.use is not None else ())}


def expected_levels(findings, named):
    """The level of each GPU that a finding names at its finest, by the first such finding."""
    found = {}
    for finding in findings:
        for kinds in FINEST_FIRST:
            where = {name for name in finding.where if name.split(" ")[0] in kinds}
            here = [gpu for gpu, names in named.items() if where & names]
            for gpu in here:
                found.setdefault(gpu, LEVELS[finding.severity])
            if here:
                break
    return found


def shown(snapshot, findings):
    return site_map(SiteReading(snapshot=snapshot, findings=findings, examined_at=snapshot.at))


def agrees(snapshot):
    """Each surface shows the findings of this snapshot, and no other problem."""
    findings = examine(snapshot)
    whole = shown(snapshot, findings)
    frames = rack_frames(whole)
    spots = {
        (name, spot): frame.rack.trays[spot[0]][spot[1]]
        for name, frame in frames.items()
        for spot in frame.rack.spots
    }
    expected = expected_levels(findings, {at: names_of(gpu) for at, gpu in spots.items()})
    for mode, (name, frame) in product((ColourMode.HEALTH, ColourMode.PARTITION), frames.items()):
        drawn = drawn_rack(frame, mode, MapColours())
        for spot in frame.rack.spots:
            cell, level = drawn.trays[spot[0]].cells[spot[1]], expected.get((name, spot))
            assert cell.level == level, (name, spot)
            assert {LEVEL_CLASSES[level]} if level else set() == set(cell.style.split()) & {"s", "d", "v"}
            if mode is ColourMode.HEALTH:
                assert cell.state is STATES[level]
            nics = {
                LEVELS[finding.severity]
                for nic in spots[name, spot].chain.nics
                for finding in findings
                if at_device(nic) in finding.where
            }
            if cell.nic not in ("", "none"):
                assert (cell.nic == "well") == (not nics)
                assert cell.nic == "well" or cell.nic in nics
    counts = site_counts([rack_counts(frame) for frame in frames.values()])
    levels = Counter(expected.values())
    assert counts.problems == levels[Level.CRITICAL] + levels[Level.DEGRADED]
    assert counts.health_unknown == levels[Level.UNKNOWN]
    counted(snapshot, findings, whole, counts)


def counted(snapshot, findings, whole, counts):
    """The headline, the last line of the doctor and the metrics count the same findings."""
    severities = Counter(finding.severity for finding in findings)
    counted_in_doctor = summary_line(findings).partition("; ")[0]
    in_line = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)(?:,|$)", counted_in_doctor)}
    assert in_line == {severity.value: count for severity, count in severities.items()}
    (family,) = [
        family
        for family in registry_of(snapshot.at, snapshot.layers, snapshot.domains, findings).collect()
        if family.name == "rackloom_doctor_findings"
    ]
    samples = Counter()
    for sample in family.samples:
        samples[sample.labels["severity"]] += int(sample.value)
    assert +samples == severities
    summary = site_summary(LiveReading(number=1, whole=whole), whole, counts, site_capacity([]))
    wrong, unknown = len(needs_attention(findings)), severities[Severity.UNKNOWN]
    attention = summary.numbers[0]
    assert (attention.value, attention.note) == (f"{wrong:,}", f"and {unknown:,} unknown" if unknown else "")
    count = wrong or unknown
    begins = "Nothing" if not count else "One thing" if count == 1 else f"{count} things"
    assert summary.sentence.startswith(f"{begins} ") or not counts.gpus


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_is_marked_where_its_finding_names_it(name):
    agrees(FAULTS[name](WELL))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(changes(), max_size=8))
def test_a_part_is_marked_exactly_if_a_finding_names_it(story):
    snapshot = WELL
    for change in story:
        snapshot = changed(snapshot, change)
    agrees(snapshot)


def test_a_healthy_site_has_no_mark():
    seen = healthy(racks=1, trays=2)
    whole = shown(seen, examine(seen))
    assert [frame.marks.gpus for frame in rack_frames(whole).values()] == [{}]
    counts = site_counts([rack_counts(frame) for frame in rack_frames(whole).values()])
    assert (counts.gpus, counts.problems, counts.health_unknown) == (8, 0, 0)
