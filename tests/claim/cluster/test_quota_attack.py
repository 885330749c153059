"""A ComputeDomain with running pods that comes to need quota loses nothing that it has."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.claim.cluster import fake_site
from tests.claim.cluster.one_domain import UID, settle, started
from tests.claim.cluster.quota_kueue import QuotaKueue
from tests.claim.cluster.test_quota import (
    QUEUED,
    admitted,
    counted,  # noqa: F401 (a fixture)
    evict,
    has_reported,
    relabel,
    serve_workloads,
    workload,
)

from rackloom.core.domains import names
from rackloom.core.domains.compute_domain import read_compute_domain
from rackloom.core.domains.observe import take_domain_snapshot
from rackloom.core.domains.quota import SPARES_ANNOTATION, spare_quotas
from rackloom.core.domains.reconcile import reconcile_domain
from rackloom.core.domains.settings import ControllerSettings, QuotaMode
from rackloom.core.kubernetes.objects import COMPUTE_DOMAIN, DAEMON_SET, POD, SECRET, WORKLOAD
from rackloom.lab.virtual import event_loop


@pytest.mark.parametrize("has_kueue", [True, False])
def test_certificates_of_running_daemons_are_renewed_while_it_waits(site: Any, has_kueue: bool) -> None:
    async def story() -> None:
        place = site()
        await place.begin()
        made = await place.domain("old")
        await place.until(lambda: fake_site.has_condition(place, "old", "NoNodes"))
        await place.kill()
        secret = names.imex_secret_name(made["metadata"]["uid"])
        (daemons,) = (await place.user.list(DAEMON_SET)).items
        space = daemons["metadata"]["namespace"]
        await place.user.patch(SECRET, secret, space, {"data": {"tls.crt": "bm9uZQ=="}})
        if has_kueue:
            serve_workloads(place)
        place.settings = msgspec.structs.replace(place.settings, quota=QuotaMode.ALL)
        place.start()
        await place.until(lambda: has_reported(place, "old", "WaitingForQuota"))
        await asyncio.sleep(5)
        assert (await place.user.get(SECRET, secret, space))["data"]["tls.crt"] != "bm9uZQ=="
        await place.end()

    event_loop.run_simulation(1, story)


def test_upkeep_does_not_wait_for_a_write_that_kueue_may_refuse(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    """Writes are sent up to the first that fails."""
    world = make.world()
    started(world, make, counted)
    relabel(world, labels=QUEUED)
    world.delete(POD, next(pod for pod in world.of(POD) if pod["spec"]["nodeName"] == "n0"))
    decision = reconcile_domain(take_domain_snapshot(world, UID, counted, make.now))
    kinds = [action.kind for action in decision.actions]
    assert len(kinds) > 1
    assert kinds.index(WORKLOAD) == len(kinds) - 1


@pytest.mark.parametrize("rounds", range(1, 8))
def test_half_withdrawn_and_then_without_its_workload_nothing_is_stuck(
    make: SimpleNamespace, counted: ControllerSettings, rounds: int
) -> None:
    kueue = QuotaKueue()
    world = admitted(make, counted, kueue)
    evict(world, kueue, make)
    for _ in range(rounds):
        world.carry_out(reconcile_domain(take_domain_snapshot(world, UID, counted, make.now)), UID)
    own = workload(world)
    del world.objects[WORKLOAD, "team", own["metadata"]["name"]]
    settle(world, counted, make)
    for kind in (DAEMON_SET,):
        assert not [obj for obj in world.of(kind) if obj["metadata"].get("deletionTimestamp")]


def test_a_second_compute_domain_of_the_same_template_takes_no_spares_away(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    world = admitted(make, counted, QuotaKueue(), annotations={SPARES_ANNOTATION: "2"})
    first = world.at(COMPUTE_DOMAIN, "team", "job")
    second = make.domain("waits", uid="cd-2", template=read_compute_domain(first).template, labels=QUEUED)
    for order in ([first, second], [second, first]):
        domains = [read_compute_domain(obj) for obj in order]
        quotas = spare_quotas(domains, world.of(WORKLOAD), QuotaMode.LABELLED)
        assert quotas.room("team", [domains[0].template]) == 2
