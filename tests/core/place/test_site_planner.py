"""Several jobs on one site, as values: urgency, reservations, explanations, and the prices of segments."""

from typing import Any

import pytest
from tests.cli.place_objects import job, node

from rackloom.core.allocate.driver_slices import device_classes
from rackloom.core.place.jobs import PriorityClass, PriorityClasses, read_jobs
from rackloom.core.place.observed_site import DraDevices
from rackloom.core.place.site_planner import PlacementReport, PlanRequest, SiteObjects, SitePlanner
from rackloom.errors import Refused

URGENT = PriorityClass(name="urgent", value=7)


def report(objects: list[dict[str, Any]], trays: int, **request: Any) -> PlacementReport:
    nodes = tuple(node(f"tray-{number}", "domain.1") for number in range(trays))
    found = SiteObjects(
        nodes=nodes, pods=(), devices=DraDevices(nodes=(), classes=device_classes(), slices=())
    )
    classes = PriorityClasses([URGENT], are_all_known=True)
    asked = PlanRequest(**request)
    return SitePlanner(found, (), (), classes, asked).report(read_jobs(objects, asked.labels))


def urgent(name: str, members: int) -> dict[str, Any]:
    wanted = job(name, members)
    wanted["spec"]["template"]["spec"]["priorityClassName"] = "urgent"
    return wanted


def test_the_urgent_job_takes_the_trays_and_the_other_is_explained() -> None:
    first, second = report([job("later", 3), urgent("now", 2)], trays=4).jobs
    assert first.plan is not None
    assert (first.job, len({seat.tray for seat in first.plan.seats})) == ("now", 2)
    assert second.plan is None
    assert "3" in (second.blocked or "")
    assert second.fixes


def test_a_class_that_the_site_lacks_is_refused() -> None:
    unknown = urgent("now", 1)
    unknown["spec"]["template"]["spec"]["priorityClassName"] = "other"
    with pytest.raises(Refused, match="names the PriorityClass other"):
        report([unknown], trays=1)


def test_trays_that_are_left_out_take_no_job() -> None:
    (answer,) = report([job("all", 4)], trays=4, without_trays=("tray-2",)).jobs
    assert answer.plan is None


def test_segments_are_priced_where_trays_may_be_down() -> None:
    prices = report([], trays=4, down=0.0).segments
    assert [(price.trays, price.outside, price.usable) for price in prices] == [
        (1, 0, 1.0), (2, 0, 1.0), (3, 1, 0.75), (4, 0, 1.0)
    ]  # fmt: skip
