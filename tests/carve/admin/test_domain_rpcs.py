"""RPCs about domains: what is known of them, plans and operators' steps, through a real server."""

import msgspec
import pytest
import sqlalchemy as sa
from tests.carve.admin.admin_site import D0, D1, Code

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import latest
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import BlockedGpus


def test_pause_cordon_and_drain_are_recorded_with_the_name_of_the_certificate(small_site, run_on_site):
    small_site.observe_all()

    async def scenario(admin):
        domain = ours.DomainRequest(domain=D0, reason="firmware")
        tray = ours.TrayRequest(machine_id="chassis0-0", reason="fan")
        await admin.operator.PauseDomain(domain)
        await admin.operator.ResumeDomain(domain)
        assert (await admin.refused(admin.operator.ResumeDomain(domain)))[0] is Code.FAILED_PRECONDITION
        await admin.operator.CordonTray(tray)
        await admin.operator.DrainTray(tray)
        await admin.operator.UncordonTray(tray)
        steps = await admin.site.store.read(
            lambda conn: conn.execute(
                sa.select(schema.operator_step.c.step, schema.operator_step.c.asked_by).order_by(
                    schema.operator_step.c.id
                )
            ).all()
        )
        assert [tuple(step) for step in steps] == [
            (step, "admin") for step in ("pause", "resume", "cordon", "drain", "end-drain", "uncordon")
        ]
        missing = ours.DomainRequest(domain="nowhere", reason="typo")
        assert (await admin.refused(admin.operator.PauseDomain(missing)))[0] is Code.NOT_FOUND

    run_on_site(scenario)


def test_a_domain_is_shown_with_its_age_its_pause_and_what_is_blocked(small_site, run_on_site):
    small_site.observe_all()
    seen = small_site.now - 0.5
    guid = small_site.guid(D0, 2, 3)
    blockers = [BlockedGpus(guids=(guid,), reason="no room", fix=None)]
    small_site.run(records.record_blocked, D0, blockers, small_site.now)
    small_site.lose(D0, "no route")

    async def scenario(admin):
        await admin.operator.PauseDomain(ours.DomainRequest(domain=D1, reason="firmware"))
        lost, read = (await admin.operator.ShowDomains(ours.DomainsRequest())).domains
        assert (lost.domain, lost.HasField("observed_at"), lost.HasField("pause_reason")) == (
            D0,
            False,
            False,
        )
        assert "no route" in lost.doubt
        (blocked,) = lost.blocked
        assert (blocked.guid, blocked.reason, blocked.HasField("fix")) == (guid, "no room", False)
        assert (read.domain, read.pause_reason, read.doubt, len(read.blocked)) == (D1, "firmware", "", 0)
        assert read.observed_at.ToMicroseconds() / 1e6 == pytest.approx(seen)
        (only,) = (await admin.operator.ShowDomains(ours.DomainsRequest(domain=D1))).domains
        assert only == read
        code, _ = await admin.refused(admin.operator.ShowDomains(ours.DomainsRequest(domain="nowhere")))
        assert code is Code.NOT_FOUND

    run_on_site(scenario)


def test_a_domain_in_dispute_says_who_contradicts_whom_and_is_not_planned_for(small_site, run_on_site):
    small_site.observe_all()
    small_site.run(
        endpoints.register_endpoint, "http://second", ["CHASSIS9"], small_site.tick(), small_site.ids
    )
    second = next(
        endpoint.id
        for endpoint in small_site.read(endpoints.all_endpoints)
        if endpoint.url == "http://second"
    )
    whole = small_site.observation(D0, at=small_site.tick())
    less = msgspec.structs.replace(whole, gpus=whole.gpus[4:])
    small_site.run(records.record_observation, second, less, small_site.tick())

    async def scenario(admin):
        disputed, _ = (await admin.operator.ShowDomains(ours.DomainsRequest())).domains
        assert not disputed.HasField("observed_at")
        since = latest.rfc3339(less.observed_at)
        assert disputed.doubt == (
            f"unknown since {since}: switch controllers http://second and http://switch/{D0} contradict one "
            f"another: only http://switch/{D0} lists 4 of the GPUs"
        )
        code, details = await admin.refused(admin.operator.MakePlan(ours.PlanRequest(domain=D0)))
        assert code is Code.FAILED_PRECONDITION
        assert "contradict one another" in details

    run_on_site(scenario)


def test_no_plan_without_an_observation(run_on_site):
    async def scenario(admin):
        code, details = await admin.refused(admin.operator.MakePlan(ours.PlanRequest(domain=D0)))
        assert code is Code.FAILED_PRECONDITION
        assert D0 in details
        code, _ = await admin.refused(admin.operator.ApplyPlan(ours.ApplyRequest(plan="{}")))
        assert code is Code.INVALID_ARGUMENT

    run_on_site(scenario)


def test_the_first_call_of_every_client_is_answered(run_on_site):
    async def scenario(admin):
        version = await admin.forge.Version(pb.VersionRequest(display_config=True))
        assert version.build_version.startswith("rackloom ")
        assert version.build_hostname == ""

    run_on_site(scenario)
