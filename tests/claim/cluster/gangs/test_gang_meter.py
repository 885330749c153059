"""The metrics of gangs."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families
from tests.claim.cluster.gangs.gang_site import run
from tests.claim.cluster.gangs.gang_stories import at_work, bound_job

from rackloom.claim.cluster.gang_controller import GangMetrics
from rackloom.core.cluster.objects import GANG_PLAN


async def scraped(site):
    page = site.meter.render((await site.user.list(GANG_PLAN)).items).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {
        (sample.name, sample.labels.get("reason")): sample.value
        for sample in samples
        if "le" not in sample.labels
    }


def test_all_series_are_there_from_the_start():
    page = GangMetrics().render(()).decode()
    for reason in (
        "DoesNotFit",
        "InvalidGang",
        "NotHeld",
        "TrayLost",
        "CannotBind",
        "TrayTaken",
        "ApiRefused",
    ):
        assert f'rackloom_gang_refusals_total{{reason="{reason}"}} 0.0' in page
    for series in ('gangs{reason="Placed"}', "gang_placements_total", "gang_members_replaced_total"):
        assert f"rackloom_{series} 0.0" in page


def test_a_life_of_gangs_is_counted():
    async def story():
        site = await at_work(racks=1, trays=5)
        job = await bound_job(site, "big", {"worker": 4}, spares=1)
        site.job("huge", {"worker": 9})
        await site.until(lambda: site.says("huge", "Placed", "DoesNotFit"))
        await asyncio.sleep(60)
        found = await scraped(site)
        assert found["rackloom_gangs", "Placed"] == found["rackloom_gangs", "DoesNotFit"] == 1
        assert found["rackloom_gang_placements_total", None] == 1
        assert found["rackloom_gang_refusals_total", "DoesNotFit"] == 1, (
            "told once, though tried again and again"
        )
        assert found["rackloom_gang_ungate_seconds_count", None] == 1
        assert 2 <= found["rackloom_gang_ungate_seconds_sum", None] <= 10, "it settles for two seconds"
        assert found["rackloom_gang_members_replaced_total", None] == 0
        lost = (await site.places("big"))["big-worker-0"]
        await site.say_ready(lost, "Unknown")

        async def moved():
            return (await site.places("big")).get("big-worker-0") not in (None, lost)

        await site.until(moved)
        found = await scraped(site)
        assert found["rackloom_gang_members_replaced_total", None] >= 1
        assert found["rackloom_gang_refusals_total", "TrayLost"] >= 1
        assert found["rackloom_gang_ungate_seconds_count", None] == 1
        await job.end()
        await site.end()

    run(story)
