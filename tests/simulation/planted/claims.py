"""Bugs around ComputeDomains: membership, readiness, gangs, leftovers of dead and stopped processes.

Each is found in the stories of `lab/compute_domains`: in a plot, with a death at some steps, by the
violations that are reported then.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.simulation.compute_domains import machines
from tests.simulation.compute_domains.cluster import Disruption, StoryKind

from rackloom.claim.cluster.domain_caches import OrphanSweeper
from rackloom.claim.imex.daemon import DaemonReporter
from rackloom.claim.node import requests, tasks
from rackloom.claim.node.imex.domains import ImexDaemons
from rackloom.claim.node.imex.labels import ComputeDomainLabel
from rackloom.core.cluster.domain_objects import Readiness
from rackloom.core.domains import clique, membership
from rackloom.core.gangs import reconcile

Bug = Callable[[pytest.MonkeyPatch], None]


class Sought(msgspec.Struct, frozen=True):
    """The story in which a bug is found, by which words, and the step that is known to find it."""

    plot: StoryKind
    violation: str
    death: Disruption | None = None
    steps: Sequence[int] = (0,)
    at: int | None = None

    @property
    def order(self) -> Sequence[int]:
        """The other steps are tried only if the bug is not found where it was found before."""
        return known_first(self.steps, self.at)


def known_first(steps: Sequence[int], at: int | None) -> Sequence[int]:
    """All the steps, with this one first."""
    return sorted(steps, key=lambda step: step != at)


def stale_entries_removed_whatever_joined(patch: pytest.MonkeyPatch) -> None:
    """A controller that was stopped erases the entry of a daemon that joined during the stop."""
    members = membership.clique_members_json
    patch.setattr(membership, "clique_members_json", lambda value, version: members(value, {}))


def a_pod_that_is_not_ready_is_no_member(patch: pytest.MonkeyPatch) -> None:
    living = membership._living_daemons

    def ready_ones(clique: Any, snapshot: Any) -> Any:
        pods = tuple(pod for pod in snapshot.pods if pod.ready)
        return living(clique, msgspec.structs.replace(snapshot, pods=pods))

    patch.setattr(membership, "_living_daemons", ready_ones)


def ready_is_told_before_it_is_seen(patch: pytest.MonkeyPatch) -> None:
    async def hopeful(self: DaemonReporter) -> bool:
        return self.daemon.running_with is not None

    patch.setattr(DaemonReporter, "_is_ready", hopeful)


def a_new_daemon_takes_over_the_readiness_of_the_last(patch: pytest.MonkeyPatch) -> None:
    def kept(present: Any, ip_address: str) -> Any:
        return Readiness.READY if present is None else present.status

    patch.setattr(clique, "_readiness_at", kept)


def a_channel_does_not_wait_for_its_daemon(patch: pytest.MonkeyPatch) -> None:
    async def no_need(self: ImexDaemons, uid: str, clique_id: str) -> None:
        return None

    patch.setattr(ImexDaemons, "need_own", no_need)


def ready_of_an_earlier_boot_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ImexDaemons, "_is_of_this_boot", lambda self, uid: True)


def a_label_is_left_to_the_controller(patch: pytest.MonkeyPatch) -> None:
    """The plugin gives a claim back, but keeps the label, which stays while the ComputeDomain lives."""

    async def leave(self: ComputeDomainLabel, uid: str) -> None:
        return None

    patch.setattr(ComputeDomainLabel, "release", leave)


def a_moved_gang_keeps_the_tray_that_it_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconcile.PlannedGang, "_release_surplus_trays", lambda gang: ())


def a_gang_reserves_nothing(patch: pytest.MonkeyPatch) -> None:
    """Its pods are let go as if its trays were reserved."""
    patch.setattr(reconcile.PlannedGang, "_unreserved_trays", lambda gang: ())


def background_work_ends_piece_by_piece(patch: pytest.MonkeyPatch) -> None:
    """As it did until b731622: a second cancellation left a dead plugin's sweeper at work."""

    @asynccontextmanager
    async def background(*work: Any) -> Any:
        begun = [asyncio.create_task(coroutine) for coroutine in work]
        try:
            yield tasks.BackgroundTasks(begun)
        finally:
            for task in begun:
                await tasks.cancel_and_wait(task)

    patch.setattr(machines, "run_background", background)


def a_plugin_does_not_see_that_it_was_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requests, "STOPPED_SECONDS", float("inf"))


def late_secrets_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OrphanSweeper, "may_have_secrets", lambda self, uid: False)


BUGS: dict[Bug, Sought] = {
    stale_entries_removed_whatever_joined: Sought(
        StoryKind.GANG, "went away while it ran", Disruption.CONTROLLER_STOPS, range(120, 160), at=128
    ),
    a_pod_that_is_not_ready_is_no_member: Sought(StoryKind.DOMAIN, "went away while it ran"),
    ready_is_told_before_it_is_seen: Sought(StoryKind.DOMAIN, "was never READY"),
    a_new_daemon_takes_over_the_readiness_of_the_last: Sought(StoryKind.DOMAIN, "was never READY"),
    a_channel_does_not_wait_for_its_daemon: Sought(StoryKind.DOMAIN, "no IMEX daemon of it was READY"),
    ready_of_an_earlier_boot_counts: Sought(
        StoryKind.GANG, "no IMEX daemon of it was READY", Disruption.REBOOT, range(160, 190, 5)
    ),
    a_label_is_left_to_the_controller: Sought(StoryKind.DOMAIN, "only the jobs' nodes are labelled"),
    a_moved_gang_keeps_the_tray_that_it_lost: Sought(StoryKind.GANG, "the tray that is back is free"),
    a_gang_reserves_nothing: Sought(StoryKind.GANG, "is not reserved for its gang"),
    background_work_ends_piece_by_piece: Sought(
        StoryKind.DOMAIN, "goes on", Disruption.REBOOT, range(40, 200, 8), at=72
    ),
    a_plugin_does_not_see_that_it_was_stopped: Sought(
        StoryKind.DOMAIN, "waited for the resync", Disruption.PLUGIN_STOPS, range(20, 40), at=25
    ),
    late_secrets_are_not_looked_for: Sought(
        StoryKind.DOMAIN, "Secret computedomain-imex", Disruption.CONTROLLER_STOPS, range(8, 24), at=15
    ),
}
