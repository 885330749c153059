"""Bugs in how processes share domains: the checks that stop a process that lost its lease.

Each of two checks makes up for most failures of the other, and the deadline of a lease cancels its work as
well. So each is missed only if the others do not see it: the epoch if clocks differ, the deadline if a
process stops between the record of an operation and its request.
"""

import msgspec
import pytest
from tests.simulation.carving.run import LoadPlan as SimPlan
from tests.simulation.planted.plans import Bug

from rackloom.carve.reconcile import domain_pass, records

STOPPING = SimPlan(seconds=600, think=3, pause=30, kinds={"stop-recorded": 1}, replicas=2, operator=None)
APART = msgspec.structs.replace(STOPPING, kinds={"clock-ahead": 1})


def epoch_of_the_lease_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "require_lease", lambda *_: None)


def deadline_not_read_before_the_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(domain_pass.LeaseGuard, "has_ended", lambda _: False)


BUGS: dict[Bug, SimPlan] = {
    epoch_of_the_lease_not_checked: APART,
    deadline_not_read_before_the_request: STOPPING,
}
