"""The cost per request of listing the free machines of a large site."""

from typing import Any

from rackloom.carve.tenancy import placement


def test_the_free_machines_of_a_domain_are_one_value(small_site: Any) -> None:
    """A domain costs a request the same, however many machines it has."""
    small_site.observe_all()
    rooms = small_site.read(placement.domain_rooms, small_site.type_id, {}, {}, {})
    assert {room.domain: [tray.count for tray in room.trays] for room in rooms} == {
        domain: [3] for domain in small_site.partitions
    }
