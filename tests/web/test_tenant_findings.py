"""A tenant reads the findings about its own GPUs, partitions and jobs, and no word about other tenants."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.web.snapshots import AT, snapshot
from tests.web.test_pages_served import sign_in, visit
from tests.web.test_what_tenants_see import HOLDERS, MINE, THEIRS, reading, shown

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import CheckState, Severity
from rackloom.core.diagnosis.index import at_domain
from rackloom.topology.join_key import SlotKey
from rackloom.web.frames import ColourMode
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteReading, site_map
from rackloom.web.painters import Painter
from rackloom.web.tenant_findings import HARDWARE, WORKLOADS

RACK = (MINE, MINE, THEIRS)
"""The holders of the trays of one rack, from the lowest slot."""


def seen_by(org, whole):
    return Painter(org, ColourMode.TENANT, 9).follow(LiveReading(number=1, whole=whole)).whole.findings


def sick_at(seen, *slots):
    gpus = tuple(
        msgspec.structs.replace(gpu, healthy=gpu.place.slot not in slots or gpu.place.module_id != 1)
        for gpu in seen.fabric_gpus
    )
    return msgspec.structs.replace(seen, fabric_gpus=gpus)


def examined(seen, at=AT):
    return SiteReading(snapshot=seen, findings=examine(seen), examined_at=at)


def test_each_tenant_reads_of_its_own_gpu_where_it_is_and_whom_it_affects():
    whole = site_map(examined(sick_at(snapshot(1, 3, RACK), 1, 2)))
    for org, place in ((MINE, "rack-00/slot-1/gpu-0"), (THEIRS, "rack-00/slot-2/gpu-0")):
        (found,) = (finding for finding in seen_by(org, whole) if finding.check == Check.GPU_HEALTH)
        assert found.title == f"{place} is sick, by its switch controller"
        assert set(found.affects) == {f"Job {org}-ns/{org}-job", f"partition {org}-training"}
        assert (found.runbook, found.severity) == ("gpu-health", Severity.ERROR)
        assert (found.evidence, found.consequences, found.fix, found.steps) == ((), (), "", ())


def test_a_tenant_without_anything_there_reads_nothing():
    whole = site_map(examined(sick_at(snapshot(1, 3, RACK), 2)))
    assert Check.GPU_HEALTH not in {finding.check for finding in seen_by(MINE, whole)}
    assert seen_by("nobody", whole) == ()


def test_what_was_not_examined_is_not_called_well():
    assert seen_by(MINE, site_map(SiteReading(snapshot=snapshot(1, 3, RACK)))) is None


def finding_of(check, where, **change):
    (found,) = reading((MINE, THEIRS)).findings
    title = f"{THEIRS} is wrong"
    found = msgspec.structs.replace(
        found, check=str(check), where=where, title=title, affects=(THEIRS,), since=AT - 1
    )
    return msgspec.structs.replace(found, **change)


@settings(max_examples=60)
@given(
    holders=HOLDERS,
    check=st.sampled_from(Check),
    mode=st.sampled_from([ColourMode.TENANT, ColourMode.PARTITION]),
    state=st.sampled_from([CheckState.FAILS, CheckState.UNKNOWN]),
    subject=st.sampled_from([f"Pod {THEIRS}-ns/p", f"Pod {MINE}-ns/p of {THEIRS}", f"node {THEIRS}"]),
)
def test_no_word_of_another_tenant_is_in_any_finding(holders, check, mode, state, subject):
    site = reading(holders)
    (everywhere,) = (finding.where for finding in site.findings)
    found = finding_of(check, everywhere, state=state, subject=subject)
    page = shown(site_map(msgspec.structs.replace(site, findings=(found,), examined_at=AT)), MINE, mode)
    assert THEIRS not in page
    concerned = check in HARDWARE and MINE in holders
    assert (f"Runbook: {check}" in page) == concerned, "and what concerns it is there"


def test_every_check_is_for_tenants_or_for_operators_and_none_is_forgotten():
    operators = {
        Check.DOMAIN_PAUSED,
        Check.MULTICAST,
        Check.CLIQUE_WRITER,
        Check.SLICE_OF_NODE,
        Check.TRANSFER,
    }
    hosts = {Check.DRIVER, Check.CDI, Check.PORTS, Check.HOST_IMEX, Check.CHANNELS}
    assert set(Check) == set(HARDWARE) | WORKLOADS | operators | hosts
    assert not set(HARDWARE) & (WORKLOADS | operators | hosts)


def test_a_sick_neighbour_in_a_shared_domain_is_nobody_elses():
    seen = snapshot(1, 3, RACK)
    theirs = finding_of(Check.GPU_HEALTH, (at_domain("domain-0"), f"machine {THEIRS}-machine-0-2"))
    domain = finding_of(Check.CONTROLLER, (at_domain("domain-0"),), state=CheckState.UNKNOWN)
    whole = site_map(SiteReading(snapshot=seen, findings=(theirs, domain), examined_at=AT))
    (found,) = seen_by(MINE, whole)
    assert found.check == Check.CONTROLLER
    assert found.title.startswith("rack-00 is in a domain whose switch controllers cannot be read")


@pytest.mark.parametrize(("held", "count"), [(AT - 60, 1), (AT - 59, 0), (None, 0)])
def test_what_was_found_before_the_tenant_had_the_gpu_is_not_its_own(held, count):
    seen = sick_at(snapshot(1, 3, RACK), 1)
    machines = tuple(msgspec.structs.replace(machine, held_since=held) for machine in seen.machines)
    whole = site_map(examined(msgspec.structs.replace(seen, machines=machines), at=AT - 60))
    assert sum(finding.check == Check.GPU_HEALTH for finding in seen_by(MINE, whole)) == count


@pytest.mark.parametrize(("since", "read"), [(AT - 60, AT - 60), (AT - 61, None), (None, None)])
def test_since_when_it_was_so_is_told_of_its_own_time_only(since, read):
    found = finding_of(Check.NODE_READY, (f"node {MINE}-node-0-1",), since=since)
    whole = site_map(SiteReading(snapshot=snapshot(1, 3, RACK), findings=(found,), examined_at=AT))
    assert [finding.since for finding in seen_by(MINE, whole)] == [read]


@pytest.mark.parametrize("namespace", [MINE, THEIRS])
def test_a_job_that_waits_is_its_namespaces_owners(namespace):
    found = finding_of(Check.CLAIMS, (), subject=f"MPIJob {namespace}-ns/train")
    whole = site_map(SiteReading(snapshot=snapshot(1, 3, RACK), findings=(found,), examined_at=AT))
    mine = seen_by(MINE, whole)
    if namespace == THEIRS:
        assert mine == ()
    else:
        assert [finding.title for finding in mine] == [f"MPIJob {MINE}-ns/train waits for its devices"]
        (step,) = mine[0].steps
        assert (step.command, step.effect) == (f"kubectl -n {MINE}-ns describe mpijob train", "safe")


def test_two_tenants_over_http_in_the_present_the_past_and_everywhere_else():
    holders = ("acme", "acme", "blue")
    seen = sick_at(snapshot(1, 3, holders), 1, 2)
    assert next(gpu for gpu in seen.fabric_gpus if not gpu.healthy).place == SlotKey("serial-0", 1, 1)

    async def scenario(client, _):
        pages = {}
        for org, token in (("acme", "acme-token"), ("blue", "blue-token")):
            await sign_in(client, org=org, token=token)
            page = (await client.get("/")).text
            at = page.partition('datetime="')[2].partition('"')[0]
            links = [part.partition('"')[0] for part in page.split('href="/map/runbook/')[1:]]
            paths = (
                "/map/gpus.csv", "/map/search?find=acme", "/map/search?find=blue", "/map/search?find=sick",
                f"/map/at/{at}", f"/map/at/{at}/gpus.csv", f"/map/at/{at}/search?find=sick", "/map/history",
                *(f"/map/runbook/{link}" for link in links),
            )  # fmt: skip
            answers = [await client.get(path) for path in paths]
            assert {answer.status_code for answer in answers} == {200}, paths
            pages[org] = page, [answer.text for answer in answers], links
        return pages

    pages = visit(scenario, examined(seen))
    for org, other, slot in (("acme", "blue", 1), ("blue", "acme", 2)):
        page, answers, links = pages[org]
        assert f"One thing needs attention: rack-00/slot-{slot}/gpu-0 is sick" in page
        assert "gpu-health" in links
        assert "rackloom admin" not in page
        for text in (page, *answers):
            # The page repeats the search term.
            assert other not in text.replace(f"may see is called {other}", "").replace(f'"{other}"', "")
            assert "rackloom admin" not in text or "Runbook" in text
