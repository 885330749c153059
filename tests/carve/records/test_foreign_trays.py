"""Foreign trays: by valid readings, and by decisions of operators."""

from typing import Any

import msgspec

from rackloom.carve.inventory import endpoints
from rackloom.carve.partitions import found, ownership
from rackloom.carve.partitions.ownership import foreign_trays
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.carve.store.journal import OperatorOrder


def shown(site: Any) -> dict[str, list[tuple[int, str]]]:
    """Machine -> number and name of each foreign partition that holds GPUs of it."""
    trays = site.read(foreign_trays, None)
    return {machine: [(tray.partition_id, tray.name) for tray in held] for machine, held in trays.items()}


def gpu(site: Any, slot: int, device: int, domain: int = 0) -> int:
    return int(site.guid(list(site.partitions)[domain], slot, device))


def test_one_gpu_makes_a_tray_foreign_and_several_partitions_may_hold_it(small_site: Any) -> None:
    first = next(iter(small_site.partitions))
    small_site.partitions[first] = {
        "theirs": frozenset({gpu(small_site, 0, 1), gpu(small_site, 1, 0)}),
        "also": frozenset({gpu(small_site, 1, 3)}),
        "unknown hardware": frozenset({4711}),
    }
    small_site.observe(first)
    assert shown(small_site) == {"chassis0-0": [(1, "theirs")], "chassis0-1": [(1, "theirs"), (2, "also")]}


def test_what_the_site_made_or_was_given_holds_no_tray_back(small_site: Any, demo: Any) -> None:
    first = next(iter(small_site.partitions))
    small_site.observe_all()
    partition = demo.partition()
    demo.instance([(partition, device) for device in range(4)])
    small_site.converge()
    small_site.partitions[first]["theirs"] = frozenset({gpu(small_site, 2, 0)})
    small_site.observe_all()
    assert list(shown(small_site)) == ["chassis0-2"]
    order = OperatorOrder("op", "left over", small_site.tick())
    small_site.run(found.release_partition, first, "theirs", order)
    assert shown(small_site) == {}


def test_trays_follow_the_readings_once_the_controllers_agree(small_site: Any) -> None:
    first = next(iter(small_site.partitions))
    small_site.observe(first)
    small_site.run(
        endpoints.register_endpoint, "http://switch/second", ["SECOND"], small_site.tick(), small_site.ids
    )
    (second,) = (
        known.id for known in small_site.read(endpoints.all_endpoints) if known.url.endswith("second")
    )
    small_site.partitions[first]["theirs"] = frozenset({gpu(small_site, 1, 0)})
    # The second controller was read after the partition was made, and the first before.
    reading = small_site.observation(first, at=small_site.tick())
    small_site.run(records.record_observation, second, reading, small_site.tick())
    assert shown(small_site) == {}
    small_site.observe(first)
    assert list(shown(small_site)) == ["chassis0-1"]


def test_no_tray_stays_foreign_for_a_partition_of_the_former_domain_uuid(small_site: Any) -> None:
    first = next(iter(small_site.partitions))
    small_site.partitions[first]["theirs"] = frozenset({gpu(small_site, 1, 0)})
    small_site.observe(first)
    small_site.partitions[first] = {}
    renamed = "00000000-0000-4000-8000-00000000d009"
    reading = msgspec.structs.replace(small_site.observation(first, at=small_site.tick()), domain=renamed)
    small_site.run(records.record_observation, small_site.endpoint[first], reading, small_site.tick())
    assert small_site.row(schema.machine, "chassis0-1").domain == renamed
    assert shown(small_site) == {}


def test_one_number_with_two_names_in_two_readings_is_one_row(small_site: Any) -> None:
    first = next(iter(small_site.partitions))
    small_site.observe(first)
    held = frozenset({gpu(small_site, 1, 0)})
    small_site.partitions[first] = {"before": held}
    older = small_site.observation(first, at=small_site.tick())
    small_site.partitions[first] = {"after\0": held}
    newest = small_site.observation(first, at=small_site.tick())
    small_site.run(ownership.update_foreign_trays, first, [newest, older])
    assert shown(small_site) == {"chassis0-1": [(1, "after\ufffd")]}


def test_a_reading_that_contradicts_itself_adds_trays_and_removes_none(small_site: Any) -> None:
    first = next(iter(small_site.partitions))
    small_site.partitions[first] = {"theirs": frozenset({gpu(small_site, 1, 0)})}
    small_site.observe(first)
    small_site.partitions[first] = {"new": frozenset({gpu(small_site, 2, 0)})}
    reading = small_site.observation(first, at=small_site.tick())
    doubtful = msgspec.structs.replace(reading, uncertain=frozenset({gpu(small_site, 3, 0)}))
    small_site.run(ownership.update_foreign_trays, first, [doubtful])
    assert list(shown(small_site)) == ["chassis0-1", "chassis0-2"]
    small_site.run(ownership.update_foreign_trays, first, [reading])
    assert list(shown(small_site)) == ["chassis0-2"]


def test_one_valid_reading_of_several_is_enough(small_site: Any) -> None:
    """The newest contradicts itself, and lists no partition. Another controller's reading does."""
    first = next(iter(small_site.partitions))
    small_site.partitions[first] = {"theirs": frozenset({gpu(small_site, 1, 0)})}
    older = small_site.observation(first, at=small_site.tick())
    small_site.observe_all()
    small_site.partitions[first] = {}
    small_site.observe(first)
    assert shown(small_site) == {}
    newest = small_site.observation(first, at=small_site.tick())
    doubtful = msgspec.structs.replace(newest, uncertain=frozenset({gpu(small_site, 1, 0)}))
    small_site.run(ownership.update_foreign_trays, first, [doubtful, older])
    assert list(shown(small_site)) == ["chassis0-1"]
