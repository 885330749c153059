"""Bugs in the known state: statuses, readings and controllers that contradict each other."""

from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from tests.simulation.carving.run import LoadPlan as SimPlan
from tests.simulation.planted.plans import CALM, LYING, TWICE, Bug, only

from rackloom.carve.inventory import sync
from rackloom.carve.observation import conflicts, latest
from rackloom.carve.reconcile import records
from rackloom.carve.store.prepared import find_row
from rackloom.carve.store.schema import endpoint
from rackloom.carve.tenancy import instances, status


def stale_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "record_unreadable", lambda *_: None)


def removal_reported_but_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(status, "why_not_released", lambda *_, **__: None)


def ready_in_somebody_elses_partition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(status, "why_not_isolated", lambda *_: None)


def status_from_an_old_observation(patch: pytest.MonkeyPatch) -> None:
    for name in ("why_not_joined", "why_not_isolated"):
        judge = getattr(status, name)

        def timeless(gpu: Any, facts: Any, judge: Any = judge) -> Any:
            return judge(msgspec.structs.replace(gpu, intent_at=0.0), facts)

        patch.setattr(status, name, timeless)


def unknown_for_ever(patch: pytest.MonkeyPatch) -> None:
    put = latest._upsert_reading

    def sticky(conn: sa.Connection, endpoint_id: str, **values: Any) -> None:
        if values.get("unknown_since", 0) is None:
            values = {key: value for key, value in values.items() if not key.startswith("unknown")}
        put(conn, endpoint_id, **values)

    patch.setattr(latest, "_upsert_reading", sticky)


def swapped_tray_not_noticed(patch: pytest.MonkeyPatch) -> None:
    write = sync._write_gpus

    def first_sight_only(conn: sa.Connection, changed: Any, known: Any) -> None:
        new = {at: gpu for at, gpu in changed.items() if known.get(at, (None, 0))[0] is None}
        if new:
            write(conn, new, known)

    patch.setattr(sync, "_write_gpus", first_sight_only)


def interfaces_of_a_released_instance_stay_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(instances, "detach_all_interfaces", lambda *_: None)
    patch.setattr(status, "_record_leaving_reason", lambda *_: None)


def newest_of_two_controllers_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(conflicts, "update_conflict", lambda *_: None)


def contradiction_told_and_not_minded(patch: pytest.MonkeyPatch) -> None:
    compare = sync.apply_if_consistent
    patch.setattr(sync, "apply_if_consistent", lambda *arguments: compare(*arguments) and None)
    patch.setattr(
        records, "conflict_of_endpoint", lambda conn, key: (find_row(conn, endpoint, id=key).domain, None)
    )


def same_hardware_in_two_domains_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sync, "domains_sharing_hardware", lambda *_: frozenset())


BUGS: dict[Bug, SimPlan] = {
    stale_synced: only("unreachable", "dark"),
    removal_reported_but_not_seen: only("refused", "reply-lost", "slow", pause=6),
    ready_in_somebody_elses_partition: only("by-hand"),
    status_from_an_old_observation: CALM,
    unknown_for_ever: only("unreachable", "restart"),
    swapped_tray_not_noticed: only("tray-swapped"),
    interfaces_of_a_released_instance_stay_ready: only("unreachable", "dark", pause=8, think=4),
    newest_of_two_controllers_believed: LYING,
    contradiction_told_and_not_minded: LYING,
    same_hardware_in_two_domains_believed: TWICE,
}
