"""A finding about a reserved tray names the waiting tenant, unless a tenant may read it."""

import pytest
from tests.core.diagnosis.healthy import with_changed
from tests.core.diagnosis.ward import MACHINE, WELL, is_module

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine

KEPT = "reserved for acme until tomorrow"


def findings(check, **changes):
    machines = with_changed(
        WELL, "machines", lambda record: record.id == MACHINE, reservation=KEPT, **changes
    )
    sick = {"healthy": False, "problem": "is sick"} if check == Check.GPU_HEALTH else {}
    seen = with_changed(machines, "fabric_gpus", is_module(1), **sick)
    return [found for found in examine(seen) if found.check == check]


@pytest.mark.parametrize(
    ("check", "changes"),
    [(Check.MACHINE_PRESENT, {"missing_since": WELL.at - 30.0}), (Check.GPU_HEALTH, {})],
)
def test_an_empty_tray_names_who_waits_for_it_and_one_in_use_does_not(check, changes):
    for instance, is_named in ((None, True), ("an instance", False)):
        found = [
            line for finding in findings(check, instance=instance, **changes) for line in finding.evidence
        ]
        assert found
        assert any(KEPT in line for line in found) == is_named
